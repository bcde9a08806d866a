"""Products with quantised operands: stacks are quantised matrix by matrix, and kernels multiply the same values."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from syncline.contract.schemes import SCHEMES
from syncline.numerics.gemm import (
    elements,
    from_codes,
    kernel_of,
    quantize_rows,
    quantize_stack,
    row_scales,
    values,
    wide,
)
from syncline.numerics.quantized import NotQuantizable, Quantized, dequantize, outer_scale, quantize

WEIGHTS = ("fp8_block", "fp8_block_pow2", "int4_g32", "mxfp8", "mxfp4", "nvfp4")
PAIRS = (
    ("fp8_block", "fp8_tile"),
    ("fp8_block_pow2", "fp8_tile_pow2"),
    ("int4_g32", None),
    ("mxfp8", "mxfp8"),
    ("mxfp4", None),
    ("mxfp4", "mxfp8"),
    ("nvfp4", "nvfp4_row"),
    ("nvfp4", None),
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ends(*counts: int) -> Tensor:
    return torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)


def rounded(x: Tensor, activation: str | None) -> tuple[Tensor | Quantized, Tensor]:
    """The operand for `from_codes`, and the values that it stands for."""
    if activation is None:
        return x, x
    q = quantize_rows(x, SCHEMES[activation], "x")
    return q, dequantize(q)


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_stack_is_quantised_matrix_by_matrix(name: str) -> None:
    w = normal(3, 2, 40, 160) * torch.tensor([1.0, 30.0, 0.01]).view(3, 1, 1, 1)
    stack = quantize_stack(w, SCHEMES[name], "w")
    for e in range(3):
        for p in range(2):
            alone = quantize(w[e, p], SCHEMES[name], "w")
            assert torch.equal(stack.codes[e, p].view(torch.uint8), alone.codes.view(torch.uint8))
            assert torch.equal(stack.scale[e, p].view(torch.uint8), alone.scale.view(torch.uint8))
            assert torch.equal(dequantize(stack)[e, p], dequantize(alone))
    merged = values(stack, torch.float32)
    assert torch.equal(merged, dequantize(stack).reshape(3, 80, 160))
    assert torch.equal(values(stack, torch.bfloat16), merged.bfloat16())


def test_parts_may_share_an_outer_scale() -> None:
    w = normal(3, 2, 16, 32)
    w[:, 1] *= 20
    scheme = SCHEMES["nvfp4"]
    outer = torch.stack([outer_scale([w[e, 0], w[e, 1]], scheme) for e in range(3)]).view(3, 1, 1, 1)
    stack = quantize_stack(w, scheme, "w", outer)
    for e in range(3):
        alone = quantize(w[e, 0], scheme, "w", outer[e].view(()))
        assert torch.equal(dequantize(stack)[e, 0], dequantize(alone))
    assert not torch.equal(dequantize(stack), dequantize(quantize_stack(w, scheme, "w")))


@pytest.mark.parametrize("name", ["fp8_tile", "mxfp8", "nvfp4_row"])
def test_a_rows_codes_do_not_depend_on_other_rows(name: str) -> None:
    x = normal(7, 96)
    x[3] *= 1000
    together = dequantize(quantize_rows(x, SCHEMES[name], "x"))
    assert all(
        torch.equal(together[i : i + 1], dequantize(quantize_rows(x[i : i + 1], SCHEMES[name], "x")))
        for i in range(7)
    )


@pytest.mark.parametrize("name", ["fp8_block", "nvfp4"])
def test_schemes_of_weights_are_refused_for_activations(name: str) -> None:
    with pytest.raises(NotQuantizable, match="scheme of hidden"):
        quantize_rows(normal(4, 32), SCHEMES[name], "hidden")


def test_a_size_that_blocks_do_not_divide_is_refused_by_name() -> None:
    with pytest.raises(NotQuantizable, match="hidden has K = 40, no multiple of 32"):
        quantize_rows(normal(4, 40), SCHEMES["mxfp8"], "hidden")


@pytest.mark.parametrize("name", WEIGHTS)
def test_scales_times_elements_are_the_values(name: str) -> None:
    q = quantize_stack(normal(2, 40, 160), SCHEMES[name], "w")
    spread = row_scales(q).repeat_interleave(q.scheme.columns, -1)[..., :160]
    assert torch.equal(elements(q) * spread, dequantize(q))


@pytest.mark.parametrize(("weight", "activation"), PAIRS)
@pytest.mark.parametrize("shape", [(1, 1, 48, 160), (4, 1, 48, 160), (4, 2, 16, 64)])
def test_codes_multiply_to_what_their_values_do(
    weight: str, activation: str | None, shape: tuple[int, int, int, int]
) -> None:
    w = quantize_stack(normal(*shape), SCHEMES[weight], "w")
    offsets = ends(23) if shape[0] == 1 else ends(5, 0, 11, 7)
    x, x_values = rounded(normal(23, shape[3], seed=1), activation)
    assert kernel_of(x, w) == "emulated codes, fp32 partial sums"
    found = from_codes(x, w, offsets)
    exact = wide_by_hand(x_values.double(), values(w, torch.float32).double(), offsets)
    assert found.shape == (23, shape[1] * shape[2])
    torch.testing.assert_close(found.double(), exact, rtol=2e-6, atol=2e-6 * float(exact.abs().max()))
    torch.testing.assert_close(wide(x_values, values(w, torch.float32), offsets), found, rtol=1e-4, atol=1e-4)
    assert torch.equal(from_codes(x, w, offsets, torch.bfloat16), found.bfloat16())


def wide_by_hand(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    starts = [0, *offsets.tolist()]
    return torch.cat([x[a:b] @ w[e].T for e, (a, b) in enumerate(pairwise(starts))])


def test_an_activation_scheme_changes_the_product() -> None:
    """The emulation reads codes of both operands: against a wide x the product differs by the rounding of x."""
    w = quantize_stack(normal(1, 32, 64), SCHEMES["mxfp8"], "w")
    x = normal(9, 64, seed=1)
    q, x_values = rounded(x, "mxfp8")
    gap = (from_codes(q, w, ends(9)) - from_codes(x, w, ends(9))).abs().max()
    error = ((x - x_values).abs() @ values(w, torch.float32)[0].abs().T).max()
    assert 1e-3 < float(gap) <= float(error)


def test_operands_in_other_blocks_are_refused() -> None:
    w = quantize_stack(normal(1, 32, 64), SCHEMES["mxfp8"], "w")
    with pytest.raises(NotQuantizable, match="blocks of 128 and 32"):
        from_codes(quantize_rows(normal(4, 64), SCHEMES["fp8_tile"], "x"), w, ends(4))


def test_a_width_that_grouped_kernels_refuse_is_multiplied_all_the_same() -> None:
    """A stride that is no multiple of 16 bytes."""
    x, w, offsets = normal(6, 18), normal(2, 5, 18, seed=1), ends(2, 4)
    torch.testing.assert_close(wide(x, w, offsets), wide_by_hand(x, w, offsets))


def test_wide_products_round_once() -> None:
    x, w = normal(6, 64).bfloat16(), normal(1, 8, 64, seed=1)
    exact = x.float() @ w[0].T
    assert torch.equal(wide(x, w, ends(6)), exact)
    assert torch.equal(wide(x, w, ends(6), torch.bfloat16), exact.bfloat16())
