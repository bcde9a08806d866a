"""Which of Megatron's modules and layers a plan leaves wide, said in Megatron's names."""

from __future__ import annotations

import re

import msgspec

from syncline.contract.compile import CannotCompile
from syncline.contract.compile.parts import linear
from syncline.contract.plan import PlanEntry, PrecisionPlan, sensitive

MODULES: tuple[tuple[str, str], ...] = (
    (r"self_attn\.[qkv]_proj", "self_attention.linear_qkv"),
    (r"self_attn\.o_proj", "self_attention.linear_proj"),
    (r"self_attn\.q_a_proj", "self_attention.linear_q_down_proj"),
    (r"self_attn\.q_b_proj", "self_attention.linear_q_up_proj"),
    (r"self_attn\.kv_a_proj_with_mqa", "self_attention.linear_kv_down_proj"),
    (r"self_attn\.kv_b_proj", "self_attention.linear_kv_up_proj"),
    (r"mlp\.(gate|up)_proj", "mlp.linear_fc1"),
    (r"mlp\.down_proj", "mlp.linear_fc2"),
    (r"(mlp|block_sparse_moe)\.experts\.\d+\.(gate_proj|up_proj|w1|w3)", "mlp.experts.linear_fc1"),
    (r"(mlp|block_sparse_moe)\.experts\.\d+\.(down_proj|w2)", "mlp.experts.linear_fc2"),
    (r"(mlp|block_sparse_moe)\.shared_experts?\.(gate|up)_proj", "mlp.shared_experts.linear_fc1"),
    (r"(mlp|block_sparse_moe)\.shared_experts?\.down_proj", "mlp.shared_experts.linear_fc2"),
)
"""A layer's checkpoint name -> Megatron's module, which may hold several of them as one matrix."""

_LAYER = re.compile(r"model\.layers\.(?P<layer>\d+)\.(?P<rest>.+)\.weight")


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """`modules`: module pattern -> format, None: all linear modules of the low-bit layers; `flags`: wide layers."""

    modules: dict[str, str] | None
    flags: tuple[str, ...]


def placement(plan: PrecisionPlan) -> Placement:
    """Where `plan` is low-bit. Raises `CannotCompile` for what neither a module list nor first and last layers say."""
    held: dict[str, dict[int, dict[bool, PlanEntry]]] = {}
    outside = False
    for entry in filter(linear, plan.entries):
        if sensitive(entry.name) and entry.weight is None:
            continue
        place = _LAYER.fullmatch(entry.name)
        name = _module(place["rest"]) if place else None
        if place is None or name is None:
            if entry.weight is not None:
                raise CannotCompile("families.0.match", f"{entry.name}: its module in Megatron is not known")
            outside = True
            continue
        held.setdefault(name, {}).setdefault(int(place["layer"]), {})[entry.weight is not None] = entry
    low = {name: layers for name, layers in held.items() if any(True in found for found in layers.values())}
    _check_fused(low)
    everywhere = not outside and low.keys() == held.keys()
    formats = {entry.weight.format for entry in plan.entries if entry.weight is not None}
    modules = None if everywhere else {f"*.{name}": "+".join(sorted(formats)) for name in sorted(low)}
    return Placement(modules=modules, flags=_wide_layers(low))


def _module(rest: str) -> str | None:
    return next((name for pattern, name in MODULES if re.fullmatch(pattern, rest)), None)


def _check_fused(low: dict[str, dict[int, dict[bool, PlanEntry]]]) -> None:
    for name, layers in low.items():
        for found in layers.values():
            if len(found) == 2:
                message = f"{found[True].name} is low-bit and {found[False].name} is wide; Megatron has both in {name}"
                raise CannotCompile("families.0.match", message)


def _wide_layers(low: dict[str, dict[int, dict[bool, PlanEntry]]]) -> tuple[str, ...]:
    """`--first-last-layers-bf16`, where modules that are low-bit elsewhere are wide in the outer layers."""
    spans = {}
    for name, layers in low.items():
        narrow = [layer for layer, found in layers.items() if True in found]
        inside = [n for n in layers if min(narrow) < n < max(narrow) and n not in narrow]
        if inside:
            message = f"{layers[inside[0]][False].name} is wide between low-bit layers; only outer layers have a flag"
            raise CannotCompile("families.0.keep", message)
        spans[name] = (
            max((layer + 1 for layer in layers if layer < min(narrow)), default=0),
            (max(layers) - max(narrow)) if max(layers) > max(narrow) else 0,
        )
    if len(set(spans.values())) > 1:
        told = "; ".join(
            f"{name}: first {first}, last {last}" for name, (first, last) in sorted(spans.items())
        )
        raise CannotCompile(
            "families.0.keep", f"wide outer layers differ by module ({told}); one flag is for all"
        )
    first, last = next(iter(spans.values()), (0, 0))
    if not first and not last:
        return ()
    ends = ["--num-layers-at-start-in-bf16", str(first), "--num-layers-at-end-in-bf16", str(last)]
    return ("--first-last-layers-bf16", *ends)
