"""Where codes and scales lie, for kernels and checkpoints that want another order. Bytes move; no value changes."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from syncline.numerics.elements import blocked


def swizzle(scale: torch.Tensor) -> torch.Tensor:
    """Block scales [N, S] in the order that Blackwell's scaled GEMM reads (cuBLAS "128x4 block scaling factors").

    One byte per scale. Rows are padded with zeros to 128 and columns to 4; the result is flat, of
    ceil(N/128) * ceil(S/4) * 512 elements. In each 128 x 4 tile, row r and column c lie at
    (r % 32) * 16 + (r // 32) * 4 + c.
    """
    if scale.dim() != 2:
        raise ValueError(f"scales of shape {list(scale.shape)}: a matrix is needed")
    n, s = scale.shape
    raw = F.pad(scale.view(torch.uint8), (0, -s % 4, 0, -n % 128))
    rows, columns = raw.shape[0] // 128, raw.shape[1] // 4
    tiles = raw.reshape(rows, 4, 32, columns, 4)  # [tile row, r // 32, r % 32, tile column, c]
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def unswizzle(flat: torch.Tensor, n: int, s: int) -> torch.Tensor:
    """Inverse of `swizzle`: uint8 [n, s]. Raises `ValueError` if the size does not fit."""
    rows, columns = -(-n // 128), -(-s // 4)
    if flat.numel() != rows * columns * 512:
        raise ValueError(f"{flat.numel()} swizzled scales for {n} x {s}: {rows * columns * 512} are needed")
    tiles = flat.view(torch.uint8).view(rows, columns, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows * 128, columns * 4)[:n, :s].contiguous()


def gpt_oss_blocks(codes: torch.Tensor) -> torch.Tensor:
    """MXFP4 codes [E, out, K/2] as GPT-OSS `*_blocks` [E, out, K/32, 16]; scales stay as they are."""
    return blocked(codes, 16)


def from_gpt_oss_blocks(blocks: torch.Tensor) -> torch.Tensor:
    """Inverse of `gpt_oss_blocks`."""
    return blocks.flatten(-2)
