"""A trainer's export on disk: files checked against the trainer's digests, tensors as raw views."""

from __future__ import annotations

import hashlib
import mmap
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from safetensors import SafetensorError, safe_open

from syncline.contract.exports import CONVERTED_FILE, WIDTHS, ConvertedExport

T = TypeVar("T")

Bytes = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]

_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class BadExport(ValueError):
    """An export that is not what the trainer stamped, or is unreadable. Names file or tensor."""


class RawTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of an export: `data` is uint8 [nbytes], little-endian, C order, a view of the file."""

    name: str
    dtype: str  # safetensors name
    shape: tuple[int, ...]
    data: Any  # Bytes


class Fact(NamedTuple):
    """What a tensor is, without its bytes. `dtype`: safetensors' name."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return prod(self.shape) * WIDTHS[self.dtype]


class NonFinite(ValueError):
    """A weight that is infinite or no number. The message names tensor and flat index."""


class Export:
    """The export in `folder`, whose `files` (name -> sha256 hex) were hashed by the trainer.

    Each file is opened once, checked, and read through that one open file, so that bytes cannot be exchanged
    between check and use by renaming another file over it. Raises `BadExport`.
    """

    def __init__(self, folder: Path, files: dict[str, str]) -> None:
        self._maps: dict[str, mmap.mmap] = {}
        self._descriptors: dict[str, int] = {}
        self._checked: dict[str, tuple[int, int]] = {}  # size and time of the last write, when it was checked
        self._named: dict[str, RawTensor] = {}  # views by name, once asked for
        present = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        if unstamped := sorted(name for name in present - files.keys() if name.endswith(".safetensors")):
            raise BadExport(f"export {folder.name}: {unstamped[0]} is not among the stamped files")
        with ExitStack() as unfinished:
            unfinished.callback(self.close)
            for name, digest in sorted(files.items()):
                self._open(folder, name, digest)
            unfinished.pop_all()

    def _open(self, folder: Path, name: str, digest: str) -> None:
        if not _FILE.fullmatch(name):
            raise BadExport(f"export {folder.name}: {name!r} is not a plain file name")
        try:
            descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise BadExport(f"export {folder.name}: {name}: {error.strerror}") from None
        self._descriptors[name] = descriptor
        self._checked[name] = _state(descriptor)
        if os.fstat(descriptor).st_size == 0:
            raise BadExport(f"export {folder.name}: {name} is empty")
        view = self._maps[name] = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        found = hashlib.sha256(view).hexdigest()
        if found != digest:
            raise BadExport(f"export {folder.name}: {name} has sha256 {found}, the trainer stamped {digest}")

    def config(self) -> dict[str, Any]:
        """`config.json`, parsed. Raises `BadExport` if it is absent or no JSON object."""
        if "config.json" not in self._maps:
            raise BadExport("export without config.json")
        return self.told("config.json", dict[str, Any])

    def told(self, file: str, shape: type[T]) -> T:
        """Stamped JSON `file` as a `shape`. Raises `BadExport` if it is no such thing."""
        try:
            return msgspec.json.decode(self._maps[file], type=shape)
        except msgspec.MsgspecError as error:
            raise BadExport(f"{file}: {error}") from None

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the stamped files, sorted."""
        return tuple(sorted(self._maps))

    # ---- `source.Source` of a whole export ----
    def facts(self) -> dict[str, Fact]:
        """What each tensor is, by name. Raises as `tensors`."""
        return {name: Fact(tensor.dtype, tensor.shape) for name, tensor in self._by_name().items()}

    def converted(self) -> ConvertedExport | None:
        """What the trainer says of codes and scales that it made; None: values are wide. Raises `BadExport`."""
        return self.told(CONVERTED_FILE, ConvertedExport) if CONVERTED_FILE in self._maps else None

    ranks = 0
    gather_seconds = 0.0

    def read(self, name: str) -> RawTensor:
        """Tensor `name`, without a copy."""
        return self._by_name()[name]

    def copied(self, name: str) -> int:
        """Bytes of memory that `read` takes for `name`: none, the file is mapped."""
        return 0

    def _by_name(self) -> dict[str, RawTensor]:
        if not self._named:
            self._named = {tensor.name: tensor for tensor in self.tensors()}
        return self._named

    # ---- files ----

    def tensors(self) -> Iterator[RawTensor]:
        """All tensors, file by file in the order of their bytes. A name that comes twice: `BadExport`."""
        seen: dict[str, str] = {}
        for file in sorted(name for name in self._maps if name.endswith(".safetensors")):
            for tensor in self.tensors_of(file):
                if tensor.name in seen:
                    raise BadExport(f"tensor {tensor.name} is in {seen[tensor.name]} and in {file}")
                seen[tensor.name] = file
                yield tensor
        if not seen:
            raise BadExport("export without tensors")

    def tensors_of(self, file: str) -> Iterator[RawTensor]:
        """The tensors of safetensors `file`, in the order of their bytes. Raises `BadExport`."""
        view = self._maps[file]
        # the library checks the header (no holes, no overlap, sizes right), so offsets are sums of sizes
        try:
            with safe_open(f"/proc/self/fd/{self._descriptors[file]}", "np") as header:
                parts = [
                    (name, header.get_slice(name).get_dtype(), tuple(header.get_slice(name).get_shape()))
                    for name in header.offset_keys()
                ]
        except SafetensorError as error:
            raise BadExport(f"{file}: {error}") from None
        offset = 8 + int.from_bytes(view[:8], "little")
        for name, dtype, shape in parts:
            if dtype not in WIDTHS:
                raise BadExport(f"tensor {name} has dtype {dtype}; known are {', '.join(WIDTHS)}")
            nbytes = Fact(dtype, shape).nbytes
            data: Bytes = np.frombuffer(view, np.uint8, nbytes, offset)
            yield RawTensor(name=name, dtype=dtype, shape=shape, data=data)
            offset += nbytes
        if offset != len(view):
            raise BadExport(f"{file}: tensors end at byte {offset}, the file at {len(view)}")

    def check_unchanged(self) -> None:
        """Raise `BadExport` if a file was written to since it was checked: what was read may not be what was
        stamped.
        """
        for name, descriptor in self._descriptors.items():
            if _state(descriptor) != self._checked[name]:
                raise BadExport(f"{name} was changed while it was being converted")

    def close(self) -> None:
        """Give the files back. Views of tensors stay readable until they are dropped."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
        self._named.clear()
        self._maps.clear()


def _state(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_size, found.st_mtime_ns


def refuse_where(tensor: RawTensor, bad: Any, start: int) -> None:
    """Raise `NonFinite` at the first true element of `bad`, a chunk of flat elements from `start`."""
    if bad.any():
        index = start + int(bad.argmax())
        value = _value(tensor, index)
        why = f"{value}, which rounds to infinity in BF16" if np.isfinite(value) else f"{value}"
        raise NonFinite(f"tensor {tensor.name} is {why} at flat index {index} of shape {list(tensor.shape)}")


def _value(tensor: RawTensor, index: int) -> float:
    if tensor.dtype == "BF16":
        word = tensor.data.view("<u2")[index : index + 1].astype("<u4") << 16
        return float(word.view("<f4")[0])
    return float(tensor.data.view("<f2" if tensor.dtype == "F16" else "<f4")[index])
