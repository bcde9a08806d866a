"""A linear layer's three GEMMs: with wide operands they are torch's, and each operand kind changes its GEMM alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from syncline.contract.precision import Gemm, Operand
from syncline.contract.schemes import SCHEMES, Scheme
from syncline.numerics.gemm import quantize_rows, quantize_stack
from syncline.numerics.linear import Weight, grouped_linear
from syncline.numerics.operands import Copies, GemmName, How, Meter, Ran, problem
from syncline.numerics.quantized import NotQuantizable, dequantize

FORMATS = {
    "fp8": ("fp8_block", "fp8_tile"),
    "mxfp8": ("mxfp8", "mxfp8"),
    "mxfp4": ("mxfp4", "mxfp8"),
    "nvfp4": ("nvfp4", "nvfp4_row"),
}
WEIGHT_ONLY = ("int4_g32", "mxfp4", "nvfp4")
GEMMS: tuple[GemmName, ...] = ("fprop", "dgrad", "wgrad")
PLAIN = Gemm()
OFFSETS = torch.tensor([40, 40, 50, 100], dtype=torch.int32)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def how_of(weight: str, activation: str | None, held: torch.dtype | None = None, **gemms: Gemm) -> How:
    return How(
        fprop=gemms.get("fprop", PLAIN),
        dgrad=gemms.get("dgrad", PLAIN),
        wgrad=gemms.get("wgrad", PLAIN),
        weight=SCHEMES[weight],
        activation=None if activation is None else SCHEMES[activation],
        held=held or torch.float32,
    )


class World:
    """Weights [E, P, N, K], their input and the gradient at their output."""

    def __init__(self, experts: int = 4, parts: int = 2) -> None:
        self.w = normal(experts, parts, 32, 96, seed=0)
        self.x = normal(100, 96, seed=1)
        self.g = normal(100, parts * 32, seed=2)
        self.offsets = OFFSETS if experts == 4 else torch.tensor([100], dtype=torch.int32)
        self.meter = Meter()

    def run(self, how: How, trains: bool = True) -> dict[str, Tensor]:
        """What each GEMM gave; none for one that did not run."""
        assert problem(how) == ""
        parameter = self.w.flatten(1, 2).clone().requires_grad_(trains)
        x = self.x.clone().requires_grad_(True)
        copies = Copies(parameter.detach().view(self.w.shape), how, "w")
        y = grouped_linear(x, parameter, self.offsets, Weight("w", how, copies, self.meter))
        y.backward(self.g)  # type: ignore[no-untyped-call]
        gave = {"fprop": y.detach(), "dgrad": x.grad, "wgrad": parameter.grad}
        return {name: t for name, t in gave.items() if t is not None}

    def spans(self) -> list[tuple[int, int]]:
        return list(pairwise([0, *self.offsets.tolist()]))

    # ---- the judge: each GEMM said again, group by group and part by part, with values alone ------------------
    def judged(self, name: GemmName, left: Operand, right: Operand, how: How) -> Tensor:
        match name:
            case "fprop":
                x = act(self.x, left, how)
                return torch.cat(
                    [x[a:b] @ self.weight(e, right, how).T for e, (a, b) in enumerate(self.spans())]
                )
            case "dgrad":
                parts = self.w.shape[1]
                g = torch.cat([act(part, left, how) for part in self.g.chunk(parts, 1)], 1)
                kind = right
                return torch.cat(
                    [g[a:b] @ self.along_n(e, kind, how) for e, (a, b) in enumerate(self.spans())]
                )
            case "wgrad":
                out = []
                for a, b in self.spans():
                    g = tokens(self.g[a:b], left, how)
                    x = (
                        act(self.x, right, how)[a:b]
                        if right == "reconstructed"
                        else tokens(self.x[a:b], right, how)
                    )
                    out.append(g.T @ x)
                return torch.stack(out)

    def weight(self, e: int, kind: Operand, how: How) -> Tensor:
        if kind == "original":
            return self.w[e].flatten(0, 1)
        return dequantize(quantize_stack(self.w[e : e + 1], how.weight, "w"))[0].flatten(0, 1)

    def along_n(self, e: int, kind: Operand, how: How) -> Tensor:
        if kind in ("original", "reconstructed"):
            return self.weight(e, kind, how)
        return torch.cat([dequantize(quantize_stack(p.T[None], how.weight, "w"))[0].T for p in self.w[e]])


def act(x: Tensor, kind: Operand, how: How) -> Tensor:
    return (
        x
        if kind == "original" or how.activation is None
        else dequantize(quantize_rows(x, how.activation, "x"))
    )


def tokens(x: Tensor, kind: Operand, how: How) -> Tensor:
    """Quantised along tokens, as if nobody padded: partial blocks of FP8, whole ones elsewhere."""
    if kind == "original" or how.activation is None or not len(x):
        return x
    step = how.activation.columns
    padded = F.pad(x.T, (0, 0 if how.activation.padding == "partial" else -len(x) % step))
    return dequantize(quantize_rows(padded, how.activation, "x"))[:, : len(x)].T


@pytest.mark.parametrize(("experts", "parts"), [(1, 1), (4, 2)])
def test_wide_operands_are_torch_to_the_bit(experts: int, parts: int) -> None:
    world = World(experts, parts)
    found = world.run(how_of("fp8_block", "fp8_tile"))
    w = world.w.flatten(1, 2).requires_grad_(True)
    x = world.x.clone().requires_grad_(True)
    y = F.linear(x, w[0]) if experts == 1 else F.grouped_mm(x, w.transpose(-2, -1), offs=world.offsets)
    y.backward(world.g)  # type: ignore[no-untyped-call]
    for mine, theirs in zip(found.values(), (y, x.grad, w.grad), strict=True):
        assert theirs is not None
        assert torch.equal(mine, theirs)
    ran = {ran for seen in world.meter.seen.values() for ran in seen["w"]}
    assert ran == {
        Ran(f"{a} original, {b} original", "wide fp32", "")
        for a, b in (("X", "W"), ("G_Y", "W"), ("G_Y", "X"))
    }


def pairs(name: GemmName) -> list[tuple[Operand, Operand]]:
    """Operand pairs of one GEMM that differ from the plain one."""
    left: tuple[Operand, ...] = (
        ("original", "requantised") if name != "fprop" else ("original", "reconstructed")
    )
    wide: list[tuple[Operand, Operand]] = [
        (a, b) for a in left for b in ("original", "reconstructed", "requantised")
    ]
    return [*wide[1:], ("original", "codes"), ("codes", "codes")]


CASES = [(format_, name, *pair) for format_ in FORMATS for name in GEMMS for pair in pairs(name)]


@pytest.mark.parametrize(("experts", "parts"), [(1, 1), (4, 2)])
@pytest.mark.parametrize(("formats", "name", "left", "right"), CASES)
def test_an_operand_changes_its_gemm_alone(
    formats: str, name: GemmName, left: Operand, right: Operand, experts: int, parts: int
) -> None:
    world = World(experts, parts)
    gemms = {str(name): Gemm(left=left, right=right)}
    how = how_of(FORMATS[formats][0], FORMATS[formats][1], None, **gemms)
    plain, found = world.run(how_of(*FORMATS[formats])), world.run(how)
    for other in GEMMS:
        mine, base = found[other], plain[other]
        if other != name:
            assert torch.equal(mine, base)
            continue
        judged = world.judged(name, left, right, how)
        scale = float(judged.abs().max())
        torch.testing.assert_close(mine, judged, rtol=1e-5, atol=3e-6 * scale)
        assert float((mine - base).abs().max()) > 1e-3 * scale


@pytest.mark.parametrize("weight", WEIGHT_ONLY)
@pytest.mark.parametrize("fprop", ["reconstructed", "codes"])
def test_weight_only_formats_pass_the_gradient_straight_through(weight: str, fprop: Operand) -> None:
    world = World()
    gemms = {"fprop": Gemm(right=fprop), "dgrad": Gemm(right="reconstructed")}
    found, plain = world.run(how_of(weight, None, None, **gemms)), world.run(how_of(weight, None))
    judge = how_of(weight, None, None, **gemms)
    names: tuple[GemmName, ...] = ("fprop", "dgrad")
    for name in names:
        mine = found[name]
        right: Operand = "reconstructed"
        torch.testing.assert_close(
            mine,
            world.judged(name, "original", right, judge),
            rtol=1e-5,
            atol=1e-4,
        )
    assert torch.equal(found["wgrad"], plain["wgrad"])
    assert not torch.equal(found["fprop"], plain["fprop"])


def test_a_frozen_weight_has_no_wgrad_and_keeps_no_input() -> None:
    world = World()
    how = how_of("mxfp4", None, dgrad=Gemm(right="reconstructed"))
    trained = world.run(how)
    assert world.meter.saved == world.x.numel() * 4
    world.meter.reset()
    frozen = world.run(how, trains=False)
    assert "wgrad" not in frozen
    assert world.meter.saved == 0
    assert not world.meter.seen["wgrad"]
    assert torch.equal(frozen["dgrad"], trained["dgrad"])


@pytest.mark.parametrize(
    ("right", "bytes_each"),
    # x is 100 x 96 in 1 group; along K one tile of 96, along tokens one of 100
    [
        ("original", 4 * 9600),
        ("reconstructed", 9600 + 4 * 100),
        ("codes", 9600 + 4 * 96),
        ("requantised", 9600 + 4 * 96),
    ],
)
def test_what_wgrad_reads_is_what_is_saved(right: Operand, bytes_each: int) -> None:
    world = World(1, 1)
    left: Operand = "codes" if right == "codes" else "original"
    world.run(how_of("fp8_block", "fp8_tile", wgrad=Gemm(left=left, right=right)))
    assert world.meter.saved == bytes_each
    assert not world.meter._held  # released when it was read


def test_nothing_is_kept_without_gradients() -> None:
    world = World(1, 1)
    how = how_of("fp8_block", "fp8_tile", fprop=Gemm(left="codes", right="codes"))
    w = world.w.flatten(1, 2).requires_grad_(True)
    with torch.no_grad():
        y = grouped_linear(
            world.x, w, world.offsets, Weight("w", how, Copies(world.w, how, "w"), world.meter)
        )
    assert world.meter.saved == 0
    assert y.grad_fn is None
    assert torch.equal(y, world.run(how)["fprop"])


def test_copies_are_counted_when_they_exist() -> None:
    how = how_of("mxfp8", "mxfp8")
    copies = Copies(normal(2, 32, 64, seed=0), how, "w")
    assert copies.bytes("fprop") == {}
    copies.codes()
    assert copies.bytes("fprop") == {"codes": 2 * 32 * 64, "scales": 2 * 32 * 2}
    copies.requantised()
    assert copies.bytes("fprop") == {"codes": 4096, "scales": 128}
    assert copies.bytes("dgrad") == {"transposed": 4096 + 128, "reconstructed": 4 * 4096}


def test_operands_may_be_held_in_bf16() -> None:
    world = World(1, 1)
    both = Gemm(left="reconstructed", right="reconstructed")
    how = how_of("fp8_block", "fp8_tile", fprop=both)
    fp32 = world.run(how)["fprop"]
    bf16 = world.run(how_of("fp8_block", "fp8_tile", torch.bfloat16, fprop=both))["fprop"]
    x, w = act(world.x, "reconstructed", how), world.weight(0, "reconstructed", how)
    assert torch.equal(bf16, x.bfloat16().float() @ w.bfloat16().float().T)
    assert not torch.equal(bf16, fp32)


def test_an_operand_that_is_not_finite_is_named() -> None:
    world = World(1, 1)
    world.g[3, 5] = torch.inf
    with pytest.raises(NotQuantizable, match="gradient at w is inf"):
        world.run(how_of("fp8_block", "fp8_tile", dgrad=Gemm(left="codes", right="codes")))


def test_blocks_that_do_not_divide_n_are_refused_by_name() -> None:
    how = how_of("mxfp8", "mxfp8", dgrad=Gemm(left="codes", right="codes"))
    with pytest.raises(NotQuantizable, match="w along N has K = 40, no multiple of 32"):
        Copies(normal(1, 40, 64, seed=0), how, "w").transposed()


@pytest.mark.parametrize(
    ("activation", "gemms", "said"),
    [
        (
            None,
            {"fprop": Gemm(left="codes", right="codes")},
            "fprop.left is 'codes' and the family has no activation",
        ),
        (None, {"wgrad": Gemm(right="requantised")}, "wgrad.right is 'requantised'"),
        ("fp8_tile", {"dgrad": Gemm(left="reconstructed")}, "dgrad.left is 'reconstructed'"),
        ("fp8_tile", {"fprop": Gemm(left="codes")}, "no kernel takes codes on the left alone"),
        ("mxfp8", {"fprop": Gemm(left="codes", right="codes")}, "blocks of 32 and 128"),
    ],
)
def test_what_no_gemm_can_do_is_said(activation: str | None, gemms: dict[str, Gemm], said: str) -> None:
    assert said in problem(how_of("fp8_block", activation, None, **gemms))


def test_wgrad_of_nvfp4_scales_each_group_by_itself() -> None:
    """The outer scale of a feature's row comes from one expert's tokens, not from all of them."""
    scheme: Scheme = SCHEMES["nvfp4_row"]
    assert scheme.outer == "row"
    world = World()
    world.x[40:50] *= 1e6
    how = how_of("nvfp4", "nvfp4_row", wgrad=Gemm(left="codes", right="codes"))
    found = world.run(how)["wgrad"]
    judged = world.judged("wgrad", "codes", "codes", how)
    torch.testing.assert_close(found[0], judged[0], rtol=1e-5, atol=1e-4)
