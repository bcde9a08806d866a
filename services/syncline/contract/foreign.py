"""Settings that were written elsewhere, by hand, on two sides: do they say the same?

`lift_rollout` reads what an engine is started with (its checkpoint's `quantization_config`, flags, environment),
`lift_trainer` what Megatron is started with. Both become a `Side` in the contract's own words; `cross_check` names
each key that differs. Facts behind the keys are in `compile/`; a setting that is not known is left alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from syncline.contract.job import Problem
from syncline.contract.schemes import SCHEMES, Scheme


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """What one side does. `keys`: name of a fact -> the setting that it was read from.

    weight      scheme of the low-bit weights; None: BF16
    claimed     format that a flag promises, whether or not anything follows from it
    wide_first, wide_last   outer layers that stay BF16; None: this side lists names instead
    ignored     modules that stay BF16, by name or `re:` pattern
    options     options of one quantizer that both sides have, such as the error mode of 4/6 NVFP4
    """

    weight: Scheme | None
    claimed: str = ""
    wide_first: int | None = None
    wide_last: int | None = None
    layers: int | None = None
    ignored: tuple[str, ...] = ()
    options: dict[str, str] = {}
    keys: dict[str, str] = {}


def lift_rollout(settings: Mapping[str, Any]) -> Side:
    """`settings`: `quantization_config` (of config.json, or None), `flags` (name -> value), `env`.

    Raises `ValueError` naming the key for a quantization_config whose method is not known.
    """
    config = settings.get("quantization_config")
    flags, env = settings.get("flags", {}), settings.get("env", {})
    claim, key = _claim(flags, "--rollout-")
    where = "quantization_config"
    scheme, place = (None, where) if config is None else _scheme_of(config)
    ignored = (config or {}).get("modules_to_not_convert") or (config or {}).get("ignore") or ()
    return Side(
        weight=scheme,
        claimed=claim,
        ignored=tuple(ignored),
        options=_options(env, "FLASHINFER_NVFP4_4OVER6_"),
        keys={"weight": place, "claimed": key, "options": "FLASHINFER_NVFP4_4OVER6_"},
    )


def lift_trainer(settings: Mapping[str, Any]) -> Side:
    """`settings`: `flags` (name -> value) and `env` of Megatron with Transformer Engine.

    Raises `ValueError` naming the flag for a recipe that is not known.
    """
    flags, env = settings.get("flags", {}), settings.get("env", {})
    scheme, key = _trained(flags, env)
    first = last = 0
    if flags.get("--first-last-layers-bf16"):
        first = int(flags.get("--num-layers-at-start-in-bf16", 1))
        last = int(flags.get("--num-layers-at-end-in-bf16", 1))
    claim, claimed_by = _claim(flags, "--train-")
    return Side(
        weight=scheme,
        claimed=claim,
        wide_first=first,
        wide_last=last,
        layers=int(flags["--num-layers"]) if "--num-layers" in flags else None,
        options=_options(env, "NVTE_NVFP4_4OVER6_"),
        keys={"weight": key, "claimed": claimed_by, "options": "NVTE_NVFP4_4OVER6_"},
    )


def cross_check(rollout: Mapping[str, Any], trainer: Mapping[str, Any]) -> list[Problem]:
    """What the two sides say differently. Empty: nothing that is known of both."""
    ours, theirs = lift_rollout(rollout), lift_trainer(trainer)
    return [
        *_broken_promise(ours),
        *_broken_promise(theirs),
        *_schemes(ours, theirs),
        *_outer(ours, theirs),
        *_different_options(ours, theirs),
    ]


# ---- comparing ------------------------------------------------------------------------------------------------
def _broken_promise(side: Side) -> list[Problem]:
    if not side.claimed or side.weight is not None:
        return []
    message = (
        f"promises {side.claimed}, and {side.keys['weight'] or 'no other setting'} leaves the weights in BF16"
    )
    return [
        Problem(path=side.keys["claimed"], message=message, hint="convert the checkpoint, or drop the flag")
    ]


_FACTS = ("format", "rows", "columns", "rule")


def _schemes(rollout: Side, trainer: Side) -> list[Problem]:
    """A BF16 trainer under a quantised rollout is a choice (and a known mismatch): only two schemes can disagree."""
    if rollout.weight is None or trainer.weight is None:
        return []
    found = []
    for fact in _FACTS:
        mine, other = (
            msgspec.structs.asdict(rollout.weight)[fact],
            msgspec.structs.asdict(trainer.weight)[fact],
        )
        if mine != other:
            found.append(
                Problem(
                    path=f"weight.{fact}",
                    message=f"{rollout.keys['weight']} says {mine}, {trainer.keys['weight']} says {other}",
                    hint="one of the two executes another function: set both to the same",
                )
            )
        if fact == "format" and found:
            break  # blocks and rules of two formats do not compare
    return found


def _outer(rollout: Side, trainer: Side) -> list[Problem]:
    first, last, layers = trainer.wide_first or 0, trainer.wide_last or 0, trainer.layers
    if rollout.weight is None or not (first or last):
        return []
    if layers is None:
        return [
            Problem(
                path="--num-layers", message="is missing: which layers are last is not known", hint="give it"
            )
        ]
    wide = [*range(first), *range(layers - last, layers)]
    missed = [i for i in wide if not any(_covers(entry, i) for entry in rollout.ignored)]
    if not missed:
        return []
    message = f"the trainer keeps layers {wide} wide, and the engine quantises {missed} of them"
    hint = f"list {', '.join(f'model.layers.{i}' for i in missed)} in {rollout.keys['weight'].split('.')[0]}"
    return [Problem(path="--first-last-layers-bf16", message=message, hint=hint)]


def _covers(entry: str, layer: int) -> bool:
    """Whether an entry of an engine's list names layer `layer` as a whole."""
    probe = f"model.layers.{layer}."
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), f"{probe}mlp.down_proj") is not None
    return entry.rstrip(".*") == probe.rstrip(".")


def _different_options(rollout: Side, trainer: Side) -> list[Problem]:
    found = []
    for name in sorted(rollout.options.keys() | trainer.options.keys()):
        mine, other = rollout.options.get(name), trainer.options.get(name)
        if mine != other:
            message = f"the engine has {rollout.keys['options']}{name}={mine}, the trainer {other}"
            hint = "the option changes which codes are chosen: both sides must have the same"
            found.append(Problem(path=f"{trainer.keys['options']}{name}", message=message, hint=hint))
    return found


# ---- reading --------------------------------------------------------------------------------------------------
def _claim(flags: Mapping[str, Any], prefix: str) -> tuple[str, str]:
    named = [flag for flag, value in flags.items() if flag.startswith(prefix) and value is True]
    return (named[0].removeprefix(prefix), named[0]) if named else ("", "")


def _options(env: Mapping[str, Any], prefix: str) -> dict[str, str]:
    return {name.removeprefix(prefix): str(value) for name, value in env.items() if name.startswith(prefix)}


def _scheme_of(config: Mapping[str, Any]) -> tuple[Scheme, str]:
    method, where = config.get("quant_method"), "quantization_config"
    block = config.get("weight_block_size")
    if method in ("fp8", "mxfp8") and isinstance(block, list) and len(block) == 2:
        if method == "mxfp8" or block == [1, 32]:
            return SCHEMES["mxfp8"], f"{where}.weight_block_size"
        name = "fp8_block_pow2" if config.get("scale_fmt") == "ue8m0" else "fp8_block"
        scheme = msgspec.structs.replace(SCHEMES[name], rows=block[0], columns=block[1])
        return scheme, f"{where}.weight_block_size"
    if method == "modelopt" and config.get("quant_algo") == "NVFP4":
        return SCHEMES["nvfp4"], f"{where}.quant_algo"
    if method == "compressed-tensors":
        group: Mapping[str, Any] = next(iter(config.get("config_groups", {}).values()), {})
        weights = group.get("weights", {})
        match (weights.get("type"), weights.get("num_bits"), str(config.get("format"))):
            case ("int", 4, _):
                scheme = msgspec.structs.replace(SCHEMES["int4_g32"], columns=weights["group_size"])
                return scheme, f"{where}.config_groups.weights.group_size"
            case ("float", 4, form) if "mxfp4" in form:
                return SCHEMES["mxfp4"], f"{where}.format"
            case ("float", 4, form) if "nvfp4" in form:
                return SCHEMES["nvfp4"], f"{where}.format"
    raise ValueError(f"{where}.quant_method: {method!r} with these keys is not known")


def _trained(flags: Mapping[str, Any], env: Mapping[str, Any]) -> tuple[Scheme | None, str]:
    if env.get("OPEN_TRAINING_INT4_FAKE_QAT_FLAG") == "1":
        columns = int(env.get("OPEN_TRAINING_INT4_GROUP_SIZE", 128))
        return msgspec.structs.replace(SCHEMES["int4_g128"], columns=columns), "OPEN_TRAINING_INT4_GROUP_SIZE"
    if "--fp4-format" in flags:
        recipe = flags.get("--fp4-recipe", "nvfp4")
        if recipe != "nvfp4":
            raise ValueError(f"--fp4-recipe: {recipe!r} is not known")
        return SCHEMES["nvfp4"], "--fp4-recipe"
    if "--fp8-format" in flags:
        recipe = flags.get("--fp8-recipe", "delayed")
        if recipe == "mxfp8":
            return SCHEMES["mxfp8"], "--fp8-recipe"
        if recipe == "blockwise":
            pow2 = env.get("NVTE_FP8_BLOCK_SCALING_FP32_SCALES") == "0"
            return SCHEMES["fp8_block_pow2" if pow2 else "fp8_block"], "--fp8-recipe"
        raise ValueError(f"--fp8-recipe: {recipe!r} has no blocks to compare; 'blockwise' or 'mxfp8'")
    return None, ""
