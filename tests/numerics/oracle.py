"""Reads the oracle files: inputs made by formula, and the bytes that public libraries make of them."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent / "oracles"


def cases(file: str) -> list[dict[str, Any]]:
    return list(json.loads((FOLDER / f"{file}.json").read_text())["cases"])


def tensor(entry: dict[str, Any]) -> torch.Tensor:
    """The tensor of an oracle entry; E4M3 and E8M0 bytes stay uint8."""
    raw = bytes.fromhex(entry["hex"]) if "hex" in entry else zlib.decompress(base64.b64decode(entry["zb64"]))
    dtype: torch.dtype = getattr(torch, entry["dtype"])
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(entry["shape"])


def raw(value: torch.Tensor) -> torch.Tensor:
    """A tensor as bytes, for comparison bit by bit."""
    return value.contiguous().flatten().view(torch.uint8)


def same(found: torch.Tensor, entry: dict[str, Any]) -> bool:
    """Whether `found` has exactly the bytes of an oracle entry (shapes may differ by dimensions of size 1)."""
    expected = tensor(entry)
    return found.numel() == expected.numel() and bool(torch.equal(raw(found), raw(expected)))
