"""The command about precision: what a recipe says and compiles to, or what a job does."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from syncline.scheduler.cli_jobs import AsJson
from syncline.scheduler.cli_session import LATEST, reading, say, say_json, show_table, the_job

if TYPE_CHECKING:
    from syncline.contract.precision import PrecisionContract

Target = Annotated[
    str | None,
    typer.Argument(
        help="a recipe (bf16, unified_fp8, int4_qat_w4a16, ...; a wrong name lists them), or a job id; "
        "default: the latest job",
        metavar="RECIPE|JOB",
    ),
]

_WORDS = """\
X activations, W weights, G_Y gradient of a layer's output; wide: not quantised; codes: few-bit numbers, under scales
original: wide values; reconstructed: what codes stand for; run, read, unproven: how it is known; docs/precision.md"""
_JOB = re.compile(r"j[0-9a-f]{10}")


class Hardware(StrEnum):
    """What engines run on."""

    CPU = "cpu"
    AMPERE = "ampere"
    ADA = "ada"
    HOPPER = "hopper"
    BLACKWELL = "blackwell"


On = Annotated[Hardware, typer.Option("--hardware", help="for a recipe: where it would run")]


def precision(
    context: typer.Context, target: Target = None, hardware: On = Hardware.CPU, json: AsJson = False
) -> None:
    """Show what a recipe says of each component and compiles to, or a job's contract, plan and trace."""
    from syncline.contract.recipes import RECIPES

    if target in RECIPES:
        _recipe(RECIPES[target], hardware, json)
        return
    if target is not None and target != LATEST and not _JOB.fullmatch(target):
        message = (
            f"there is no recipe {target!r}, and no job is called so; recipes: {', '.join(sorted(RECIPES))}"
        )
        raise typer.BadParameter(message, param_hint="RECIPE|JOB")
    with reading(context) as client:
        found = client.get(f"/v1/jobs/{the_job(client, target)}/precision")
    if json:
        say_json(found)
    else:
        _job(found)


# ---- a recipe ---------------------------------------------------------------------------------------------
def _recipe(contract: PrecisionContract, hardware: Hardware, json: bool) -> None:
    import msgspec

    from syncline.contract.precision_words import components
    from syncline.contract.support import decide

    here = decide(contract, hardware.value)
    production = decide(contract, hardware.value, "sglang", "transformer_engine")
    compiled = _compiled(contract)
    if json:
        say_json(
            {
                "contract": msgspec.to_builtins(contract),
                "digest": contract.digest(),
                "components": components(contract),
                "reference": msgspec.to_builtins(here),
                "production": msgspec.to_builtins(production),
                **compiled,
            }
        )
        return
    say(f"{contract.name}: {contract.about}")
    _contract(contract)
    say()
    say(f"on {hardware.value}, reference engines: {_told(msgspec.to_builtins(here))}")
    say(f"on {hardware.value}, SGLang and Megatron: {_told(msgspec.to_builtins(production))}")
    for name in ("sglang", "megatron"):
        say()
        say(f"{name} (without a model; modules that stay wide are not listed):")
        for line in _lines(compiled[name]):
            say(f"  {line}")


def _contract(contract: PrecisionContract) -> None:
    from syncline.contract.precision_words import components, scheme_words

    if contract.families:
        say()
        rows = [
            [
                f.name,
                scheme_words(f.weight),
                scheme_words(f.activation),
                " ".join(f.match),
                " ".join(f.keep) or "-",
            ]
            for f in contract.families
        ]
        show_table(["family", "weights", "activations", "matches", "keeps wide"], rows)
    say()
    show_table(["component", "what it does"], [[name, said] for name, said in components(contract).items()])


def _compiled(contract: PrecisionContract) -> dict[str, dict[str, Any]]:
    """Settings of each component as JSON; a contract that has none says why: {"refused": key and reason}."""
    import msgspec

    from syncline.contract.compile import CannotCompile
    from syncline.contract.compile.megatron import megatron_flags
    from syncline.contract.compile.sglang import sglang_flags

    made: dict[str, dict[str, Any]] = {}
    for name, compile_flags in (("sglang", sglang_flags), ("megatron", megatron_flags)):
        try:
            made[name] = msgspec.to_builtins(compile_flags(contract))
        except CannotCompile as error:
            made[name] = {"refused": str(error)}
    return made


def _lines(settings: dict[str, Any]) -> list[str]:
    import json

    if "refused" in settings:
        return [f"refused: {settings['refused']}"]
    lines = [" ".join(settings["flags"]) or "(no flags)"]
    lines += [f"{name}={value}" for name, value in settings["env"].items()]
    for key in ("quantization_config", "adapter_config", "adapter"):
        if settings.get(key) is not None:
            lines.append(f"{key} = {json.dumps(settings[key])}")
    return lines + [f"note: {caveat}" for caveat in settings["caveats"]]


# ---- a job ------------------------------------------------------------------------------------------------
def _job(found: dict[str, Any]) -> None:
    import msgspec

    from syncline.contract.precision import PrecisionContract

    contract = msgspec.convert(found["contract"], PrecisionContract)
    say(f"job {found['job']}: contract {contract.name}, digest {found['digest'][:12]}")
    _contract(contract)
    say()
    say(f"on {found['decision']['hardware']}: {_told(found['decision'])}")
    say(f"plan {found['plan']}" + (f", digest {found['plan_digest'][:12]}" if found["plan_digest"] else ""))
    if found["groups"]:
        rows = [
            [g["name"], str(g["tensors"]), "x".join(map(str, g["shape"])), g["format"] or "wide", g["reason"]]
            for g in found["groups"]
        ]
        show_table(["tensors", "count", "shape", "held as", "reason"], rows)
    say()
    if not found["trace"]:
        say("no update has told yet what was really used")
        return
    say(f"what update {found['traced_update']} really used")
    rows = [
        [
            part["component"],
            use["family"] or "the rest",
            str(use["tensors"]),
            use["encoded"],
            use["operands"],
            use["kernel"],
        ]
        for part in found["trace"]
        for use in part["uses"]
    ]
    show_table(["component", "family", "tensors", "encoded", "operands", "kernel"], rows)
    held = [[p["component"], name, f"{n:,}"] for p in found["trace"] for name, n in p["bytes"].items()]
    if held:
        show_table(["component", "holds", "bytes"], held)
    say(_WORDS)


def _told(decision: dict[str, Any]) -> str:
    """Kind and evidence, then each reason with the paths that it is about."""
    wanted = {"refused": "none", "emulation": "emulation", "native": ""}[decision["kind"]]
    paths: dict[str, list[str]] = {}
    for cell in decision["cells"]:
        if cell["how"] == wanted:
            paths.setdefault(f"{cell['framework']}: {cell['says']}", []).append(cell["path"])
    reasons = [f"{', '.join(dict.fromkeys(of))} by {says}" for says, of in paths.items()]
    return "; ".join([f"{decision['kind']} ({decision['evidence']})", *reasons])
