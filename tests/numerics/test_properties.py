"""What holds for every shape and every finite value, whatever the format."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from syncline.contract.schemes import SCHEMES, Scheme
from syncline.numerics import int4, layouts, mxfp
from syncline.numerics.elements import (
    E2M1_VALUES,
    from_e2m1,
    from_e8m0,
    inverse_e8m0,
    pack_nibbles,
    power_of_two,
    to_e2m1,
    unpack_nibbles,
)
from syncline.numerics.quantized import NotQuantizable, dequantize, outer_scale, quantize

NAMES = sorted(SCHEMES)
EXACT = ("mxfp8", "mxfp4", "fp8_block_pow2", "fp8_tile_pow2")
"""Schemes whose values survive a second quantisation bit for bit: their scales are powers of two."""


OVERFLOWING = ("mxfp8", "mxfp4", "fp8_block_pow2", "fp8_tile_pow2")
"""Schemes that round the very largest values up, beyond float32."""


def any_size(name: str) -> Scheme:
    """The scheme, made to accept every size."""
    scheme = SCHEMES[name]
    return scheme if scheme.padding == "partial" else replace(scheme, padding="zero")


def made(seed: int, shape: list[int], spread: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values over many binades, zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x = x * torch.exp2(spread * torch.randn(shape, generator=generator))
    x[torch.rand(shape, generator=generator) < 0.1] = 0.0
    return x.clamp(-1e37, 1e37).to(dtype)


shapes = st.lists(st.integers(1, 70), min_size=1, max_size=3).map(lambda s: [*s[:-1], s[-1] * 3 % 301 + 1])
seeds = st.integers(0, 2**31)
spreads = st.sampled_from([0.0, 1.0, 6.0, 30.0])


@given(name=st.sampled_from(NAMES), shape=shapes, seed=seeds, spread=spreads)
@settings(max_examples=150, deadline=None)
def test_every_shape_comes_back_close(name: str, shape: list[int], seed: int, spread: float) -> None:
    """No value is off by more than half a step of its element format, or of the smallest step of its block."""
    x = made(seed, shape, spread)
    back = dequantize(quantize(x, any_size(name), "w"))
    assert back.shape == x.shape
    assert bool(torch.isfinite(back).all())
    relative, absolute = {
        "fp8_block": (2**-4, 2**-9 / 448),
        "mxfp8": (2**-4, 2**-9 / 256),
        "mxfp4": (0.25, 0.5),
        "nvfp4": (0.25 * 1.07, 0.5 / 3),
        "int4": (0.0, 0.5 / 7),
    }[SCHEMES[name].format]
    amax = float(x.abs().amax())  # of the whole tensor: an upper bound of each block's
    error = (x - back).abs()
    assert bool((error <= relative * x.abs() + absolute * amax * 1.001 + 1e-36).all())


@given(name=st.sampled_from(EXACT), shape=shapes, seed=seeds, spread=spreads)
@settings(max_examples=100, deadline=None)
def test_powers_of_two_are_exact_the_second_time(
    name: str, shape: list[int], seed: int, spread: float
) -> None:
    once = dequantize(quantize(made(seed, shape, spread), any_size(name), "w"))
    assert torch.equal(dequantize(quantize(once, any_size(name), "w")), once)
    assert torch.equal(once.to(torch.bfloat16).float(), once), "exact in BF16 too"


@given(name=st.sampled_from(NAMES), seed=seeds, rows=st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_the_same_bytes_however_it_is_done(name: str, seed: int, rows: int) -> None:
    """Another thread count, a shard at a time, a transposed view, BF16 instead of the same values in FP32."""
    scheme = SCHEMES[name]
    x = made(seed, [scheme.rows * rows, 256], 3.0, torch.bfloat16)
    outer = outer_scale([x], scheme) if scheme.format == "nvfp4" else None
    whole = quantize(x, scheme, "w", outer)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    again = quantize(x.float().t().contiguous().t(), scheme, "w", outer)
    torch.set_num_threads(threads)
    shards = [quantize(part, scheme, "w", outer) for part in torch.split(x, scheme.rows)]
    for found in (again.codes, torch.cat([s.codes for s in shards])):
        assert torch.equal(found.view(torch.uint8), whole.codes.view(torch.uint8))
    for found in (again.scale, torch.cat([s.scale for s in shards])):
        assert torch.equal(found.view(torch.uint8), whole.scale.view(torch.uint8))


@given(
    x=st.lists(
        st.floats(-40, 40, width=32) | st.sampled_from([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]), min_size=1
    )
)
@settings(max_examples=200, deadline=None)
def test_e2m1_is_the_nearest_value_ties_to_even(x: list[float]) -> None:
    codes = to_e2m1(torch.tensor(x, dtype=torch.float32)).tolist()
    for value, code in zip(x, codes, strict=True):
        exact = Fraction(torch.tensor(value).item())
        size = min(abs(exact), Fraction(6))
        distance = [abs(size - Fraction(v)) for v in E2M1_VALUES]
        best = min(range(8), key=lambda c: (distance[c], c % 2))
        assert code & 7 == best
        assert code >> 3 == (str(value)[0] == "-")


def test_e2m1_codes_come_back() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(to_e2m1(from_e2m1(codes)), codes)


def test_e8m0_bytes_are_exact_powers() -> None:
    bytes_ = torch.arange(255, dtype=torch.uint8)
    assert from_e8m0(bytes_).double().log2().tolist() == [float(b - 127) for b in range(255)]
    assert bool((from_e8m0(bytes_).double() * inverse_e8m0(bytes_).double() == 1).all())


def test_powers_of_two_are_exact() -> None:
    power = torch.arange(-160, 128, dtype=torch.int32)
    want = [0.0 if p < -149 else 2.0**p for p in range(-160, 128)]
    assert power_of_two(power).double().tolist() == want


@given(
    amax=st.floats(0, 2.0**127, width=32),
    format=st.sampled_from(["mxfp8", "mxfp4"]),
    rule=st.sampled_from(["floor", "ceil", "rceil", "even"]),
)
@settings(max_examples=400, deadline=None)
def test_mx_scales_by_exact_arithmetic(amax: float, format: str, rule: str) -> None:
    """Each rule, said again with fractions instead of bits."""
    scheme = Scheme(format=format, rows=1, columns=32, rule=rule)  # type: ignore[arg-type]
    byte = int(mxfp.scale_bytes(torch.tensor([amax]), scheme)[0])
    if amax == 0:
        assert byte == 0
        return
    exact = Fraction(amax)
    top, emax, bits = (Fraction(448), 8, 3) if format == "mxfp8" else (Fraction(6), 2, 1)
    power = -160
    while Fraction(2) ** (power + 1) <= exact:
        power += 1  # floor(log2(amax))
    match rule:
        case "floor":
            want = power - emax
        case "ceil":
            want = power - emax + (exact != Fraction(2) ** power)
        case "rceil":
            want = power - emax - 1
            while exact / Fraction(2) ** want > top:
                want += 1
        case _:
            want = (
                power - emax + (exact + Fraction(2) ** power / 2 ** (bits + 1) >= Fraction(2) ** (power + 1))
            )
    assert byte == min(max(want + 127, 0), 254)


@given(shape=st.lists(st.integers(1, 30), min_size=1, max_size=3), seed=seeds)
@settings(max_examples=60, deadline=None)
def test_packers_come_back(shape: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-8, 8, shape, generator=generator, dtype=torch.int8)
    assert torch.equal(int4.unpack(int4.pack(codes), shape[-1]), codes)
    nibbles = torch.randint(0, 16, [*shape[:-1], shape[-1] * 2], generator=generator, dtype=torch.uint8)
    assert torch.equal(unpack_nibbles(pack_nibbles(nibbles)), nibbles)
    scales = torch.randint(0, 256, [shape[0] * 9, shape[-1]], generator=generator, dtype=torch.uint8)
    assert torch.equal(layouts.unswizzle(layouts.swizzle(scales), *scales.shape), scales)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 1e-40, 2.0**-126, 1e-30])
def test_zero_and_tiny_blocks_are_defined(name: str, value: float) -> None:
    """Finite, of the right sign, and no further off than the value itself (or the floor's step)."""
    x = torch.full((scheme.rows, 256), value) if (scheme := SCHEMES[name]) else torch.empty(0)
    back = dequantize(quantize(x, scheme, "w"))
    assert bool(torch.isfinite(back).all())
    assert bool((back.abs() <= 2 * abs(value)).all())
    assert bool(((back - x).abs() <= max(abs(value), 1e-34)).all())


@pytest.mark.parametrize("name", NAMES)
def test_the_largest_values_are_defined(name: str) -> None:
    """FP32's largest value: kept finite and close, or refused by name; never infinite."""
    scheme = SCHEMES[name]
    x = torch.full((scheme.rows, 256), torch.finfo(torch.float32).max)
    if name in OVERFLOWING:
        with pytest.raises(NotQuantizable, match=r"layer\.w dequantises to inf at flat index 0"):
            quantize(x, scheme, "layer.w")
        return
    back = dequantize(quantize(x, scheme, "layer.w"))
    assert bool(torch.isfinite(back).all())
    assert bool(((back / x - 1).abs() < 0.3).all())


def test_a_scheme_that_contradicts_itself_is_refused_with_its_key() -> None:
    x = torch.ones(4, 64)
    for changes, says in (
        ({"rule": "floor"}, "rule 'floor' is none of nvfp4"),
        ({"columns": 32}, "rows x columns is 1x32; nvfp4 has 1x16"),
        ({"padding": "partial"}, "padding 'partial'"),
    ):
        with pytest.raises(NotQuantizable, match=says):
            quantize(x, replace(SCHEMES["nvfp4"], **changes), "w")
    with pytest.raises(NotQuantizable, match="outer scale has no meaning"):
        quantize(x, SCHEMES["mxfp4"], "w", torch.ones(()))
    with pytest.raises(NotQuantizable, match=r"w is torch\.int64"):
        quantize(torch.ones(4, 64, dtype=torch.int64), SCHEMES["mxfp4"], "w")
    with pytest.raises(NotQuantizable, match="at least one"):
        quantize(torch.ones(0, 64), SCHEMES["mxfp4"], "w")


def test_fused_projections_share_one_outer_scale() -> None:
    """Gate and up quantised apart under their common outer scale are the fused tensor's bytes."""
    scheme = SCHEMES["nvfp4"]
    gate, up = made(1, [32, 64], 1.0), made(2, [32, 64], 1.0) * 9
    fused = quantize(torch.cat([gate, up]), scheme, "gate_up")
    outer = outer_scale([gate, up], scheme)
    parts = [quantize(part, scheme, "part", outer) for part in (gate, up)]
    assert torch.equal(torch.cat([p.codes for p in parts]), fused.codes)
    assert torch.equal(torch.cat([p.scale for p in parts]).view(torch.uint8), fused.scale.view(torch.uint8))
    assert not torch.equal(quantize(gate, scheme, "gate").codes, parts[0].codes)


def test_three_projections_share_one_outer_scale() -> None:
    """q, k and v of different heights, the largest value in the smallest of them."""
    scheme = SCHEMES["nvfp4"]
    parts = [made(3, [64, 96], 1.0), made(4, [16, 96], 1.0) * 30, made(5, [16, 96], 1.0)]
    outer = outer_scale(parts, scheme)
    fused = quantize(torch.cat(parts), scheme, "qkv")
    assert fused.outer is not None
    assert torch.equal(fused.outer, outer)
    apart = [quantize(part, scheme, "part", outer) for part in parts]
    assert torch.equal(torch.cat([p.codes for p in apart]), fused.codes)
    assert torch.equal(torch.cat([dequantize(p) for p in apart]), dequantize(fused))


@given(shape=shapes, seed=seeds, spread=spreads)
@settings(max_examples=60, deadline=None)
def test_a_row_with_its_own_outer_scale_depends_on_no_other(
    shape: list[int], seed: int, spread: float
) -> None:
    scheme = any_size("nvfp4_row")
    x = made(seed, shape, spread)
    whole = quantize(x, scheme, "w")
    assert whole.outer is not None
    assert whole.outer.shape == (*shape[:-1], 1)
    back = dequantize(whole).reshape(-1, shape[-1])
    for row, want in zip(x.reshape(-1, shape[-1])[:5], back, strict=False):
        assert torch.equal(dequantize(quantize(row, any_size("nvfp4"), "row")), want)


# ---- the seed's example ----
@pytest.mark.parametrize(
    ("values", "rule", "codes", "back"),
    [
        ([1.0, 3.0, 100.0], "amax/7", [0, 0, 7], [0.0, 0.0, 100.0]),
        ([1.0, 3.0, 100.0], "amax/7.5", [0, 0, 7], [0.0, 0.0, 93.333]),
        ([1.0, 3.0], "amax/7", [2, 7], [0.857, 3.0]),
        ([1.0, 3.0], "amax/7.5", [2, 7], [0.8, 2.8]),
    ],
)
def test_the_example_of_the_source_text(
    values: list[float], rule: str, codes: list[int], back: list[float]
) -> None:
    """One outlier takes the whole range: 1 and 3 beside 100 become 0, and apart from it they do not."""
    x = torch.tensor([values])
    scheme = Scheme(format="int4", rows=1, columns=len(values), rule=rule)  # type: ignore[arg-type]
    found, _ = int4.encode(x, scheme)
    assert found.tolist() == [codes]
    assert dequantize(quantize(x, scheme, "toy"))[0].tolist() == pytest.approx(back, abs=5e-4)
    if values[-1] == 100.0:
        assert int4.pack(found).tolist() == [[0x00000F88]]
