"""Machine code and torch say the same bytes: every element, every shape, any number of threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from test_properties import NAMES, any_size, made, seeds, shapes, spreads

from syncline.contract.schemes import RULES, SCHEMES
from syncline.numerics import blockwise
from syncline.numerics.quantized import Quantized, dequantize, quantize

pytest.importorskip("numba", reason="the extra `fast` is not installed")

from syncline.numerics import compiled, kernels

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALL_BF16 = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
NEAR = [ALL_BF16.float().view(torch.int32) + step for step in (-0x8000, -1, 1, 0x8000)]
ELEMENTS = (ALL_BF16.view(-1, 64), torch.cat(NEAR).view(torch.float32).view(-1, 64))
"""All BF16 values, and in FP32 what lies beside them and between them."""

FACTORS = (1.0, 0.3, 448.0, 3e38, 2.0**-126, 1e-45)


T = TypeVar("T")


def both(work: Callable[[], T]) -> tuple[T, T]:
    """What `work` gives in machine code, and where numba is not installed."""
    assert blockwise.COMPILED
    fast = work()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "COMPILED", False)
        return fast, work()


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """The same bits; a NaN is like any other."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    nan = [
        t.float().isnan() if t.is_floating_point() else torch.zeros_like(t, dtype=torch.bool)
        for t in (left, right)
    ]
    bits = [t.contiguous().flatten().view(torch.uint8).view(t.numel(), -1) for t in (left, right)]
    return torch.equal(*nan) and torch.equal(*(b[~n.flatten()] for b, n in zip(bits, nan, strict=True)))


def same_quantized(left: Quantized, right: Quantized) -> bool:
    pairs = [(left.codes, right.codes), (left.scale, right.scale)]
    if left.outer is not None and right.outer is not None:
        pairs.append((left.outer, right.outer))
    return (left.outer is None) == (right.outer is None) and all(same(a, b) for a, b in pairs)


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("divide", [False, True])
def test_every_element_becomes_the_same_e4m3(factor: float, divide: bool) -> None:
    for x in ELEMENTS:
        scale = torch.full((x.shape[0], 2), factor)
        assert same(*both(lambda x=x, s=scale: blockwise.encode_e4m3(x, s, 1, 32, divide=divide)))  # type: ignore[misc]


@pytest.mark.parametrize("factor", FACTORS)
def test_every_element_becomes_the_same_e2m1_and_int4(factor: float) -> None:
    for values in ELEMENTS:
        x = values.nan_to_num()  # E2M1 and INT4 have no NaN
        scale = torch.full((x.shape[0], 4), factor)
        assert same(*both(lambda x=x, s=scale: blockwise.encode_e2m1(x, s, 16)))  # type: ignore[misc]
        for least in (-7, -8):
            assert same(*both(lambda x=x, s=scale, n=least: blockwise.encode_int4(x, s, 16, n)))  # type: ignore[misc]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_comes_back_the_same(dtype: torch.dtype) -> None:
    """Under scales of every size, NaN codes and scales among them: what is read may come from elsewhere."""
    scale = torch.cat(
        [ELEMENTS[0].float().flatten()[::17], torch.tensor([float("nan"), float("inf"), -1.0, 0.1])]
    )
    codes = torch.arange(256, dtype=torch.uint8).repeat(len(scale), 1)
    one = scale.unsqueeze(-1)
    assert same(*both(lambda: blockwise.decode_e4m3(codes.view(torch.float8_e4m3fn), one, 1, 256, dtype)))
    assert same(*both(lambda: blockwise.decode_e2m1(codes, one, 512, dtype)))
    words = codes.view(torch.int32)
    assert same(*both(lambda: blockwise.decode_int4(words, one, 512, 500, dtype)))


@given(x=st.lists(st.floats(width=32), min_size=1, max_size=70), columns=st.sampled_from([2, 16, 32]))
@settings(max_examples=150, deadline=None)
def test_block_maxima_are_the_same(x: list[float], columns: int) -> None:
    """Infinities and NaN come through."""
    for dtype in DTYPES:
        values = torch.tensor(x, dtype=torch.float32).to(dtype)
        assert same(*both(lambda v=values: blockwise.block_amax(v, 1, columns)))  # type: ignore[misc]
        stack = values.repeat(2, 3, 1)
        assert same(*both(lambda v=stack: blockwise.block_amax(v, 2, columns)))  # type: ignore[misc]


@given(
    name=st.sampled_from(NAMES),
    rule=st.integers(0, 4),
    shape=shapes,
    seed=seeds,
    spread=spreads,
    dtype=st.sampled_from(DTYPES),
    threads=st.integers(1, 4),
)
@settings(max_examples=300, deadline=None)
def test_any_tensor_is_the_same(
    name: str, rule: int, shape: list[int], seed: int, spread: float, dtype: torch.dtype, threads: int
) -> None:
    """Every format and rule, any shape and dtype, shared among any number of threads: quantised and back."""
    rules = RULES[SCHEMES[name].format]
    scheme = replace(any_size(name), rule=rules[rule % len(rules)])
    x = made(seed, shape, spread).clamp(-6e4, 6e4).to(dtype)
    before, share = torch.get_num_threads(), compiled.SHARE
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "SHARE", 1 if threads > 1 else share)
        torch.set_num_threads(threads)
        fast, plain = both(lambda: quantize(x, scheme, "w"))
        assert same_quantized(fast, plain)
        for wanted in DTYPES:
            assert same(*both(lambda d=wanted: dequantize(fast, d)))  # type: ignore[misc]
        torch.set_num_threads(before)


def test_a_scale_for_other_blocks_is_refused() -> None:
    """Machine code checks no index, so its caller does."""
    x, two = torch.ones(4, 64), torch.ones(4, 1)
    codes = torch.zeros(4, 64, dtype=torch.uint8)
    works: list[Callable[[], torch.Tensor]] = [
        lambda: compiled.encode_e4m3(x, two, 1, 32, False),
        lambda: compiled.encode_e2m1(x, two, 32),
        lambda: compiled.encode_int4(x, two, 32, -7),
        lambda: compiled.decode_e4m3(codes, two, 1, 32, torch.float32),
        lambda: compiled.decode_e2m1(codes, two, 32, torch.float32),
        lambda: compiled.decode_int4(codes.view(torch.int32), two, 32, 64, torch.float32),
    ]
    for work in works:
        with pytest.raises(ValueError, match=r"scales"):
            work()
    with pytest.raises(ValueError, match="K = 64 is no multiple of 48"):
        compiled.encode_e2m1(x, two, 48)


def test_without_a_folder_for_the_cache_it_is_compiled_each_time() -> None:
    space: dict[str, Callable[[int], int]] = {}
    exec("def twice(x):\n    return 2 * x", space)  # no file: numba finds no place beside it
    assert kernels.compiled(space["twice"])(21) == 42
