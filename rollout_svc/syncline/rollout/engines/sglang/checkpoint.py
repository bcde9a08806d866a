"""A manifest's tensors as a checkpoint folder that the server can load, checked before the server sees it.

A truncated or misshapen file ends the server's process, and its own rollback reads the same file again: so each blob is
checked against its digest as it is read, and the file's header and bytes against the manifest once it is written.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from syncline.contract.version_path import TensorEntry
from syncline.reference.packed import DTYPES
from syncline.rollout.engine import StageFailed
from syncline.runtime.store import BadBlob, BlobStore, MissingBlob

FILE = "model.safetensors"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json")


def blob(entry: TensorEntry, store: BlobStore) -> Tensor:
    """The tensor of `entry`, its bytes checked against its digest. Raises `StageFailed` naming the tensor."""
    try:
        raw = store.read(entry.digest)
    except (MissingBlob, BadBlob, OSError) as error:
        raise StageFailed(f"tensor {entry.name}: {error}") from None
    dtype = DTYPES[entry.dtype]
    size = dtype.itemsize
    for width in entry.shape:
        size *= width
    if raw.nbytes != size:
        raise StageFailed(
            f"tensor {entry.name}: blob of {raw.nbytes} bytes, shape {list(entry.shape)} of {entry.dtype} needs {size}"
        )
    return torch.frombuffer(raw, dtype=dtype).reshape(entry.shape)


def write_config(folder: Path, model: Path, quantization: Mapping[str, Any] | None) -> None:
    """The model's config.json, with how its weights are quantised, and its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((model / "config.json").read_bytes())
    if quantization is not None:
        config["quantization_config"] = dict(quantization)
    (folder / "config.json").write_text(json.dumps(config))
    for name in _TOKENIZER:
        if (model / name).is_file():
            shutil.copyfile(model / name, folder / name)


def write_tensors(file: Path, tensors: Mapping[str, Tensor], entries: Iterable[TensorEntry]) -> None:
    """Write `tensors` and read the file back. Raises `StageFailed` naming a tensor that is not as in `entries`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"}
    )
    check_file(file, {entry.name: entry for entry in entries})


def check_file(file: Path, entries: Mapping[str, TensorEntry]) -> None:
    """Raise `StageFailed` unless `file` holds exactly `entries`: names, dtypes, shapes, bytes."""
    try:
        with safe_open(file, framework="pt") as held:
            names = set(held.keys())
            for name in sorted(names ^ entries.keys()):
                raise StageFailed(
                    f"tensor {name} is {'not due' if name in names else 'missing'} in {file.name}"
                )
            for name, entry in entries.items():
                tensor = held.get_tensor(name)
                if (tuple(tensor.shape), tensor.dtype) != (tuple(entry.shape), DTYPES[entry.dtype]):
                    raise StageFailed(
                        f"tensor {name} is {tensor.dtype} {list(tensor.shape)} in {file.name}, "
                        f"{entry.dtype} {list(entry.shape)} in the manifest"
                    )
                raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
                if hashlib.sha256(raw.data).hexdigest() != entry.digest:
                    raise StageFailed(f"tensor {name} has other bytes in {file.name} than in the manifest")
    except (SafetensorError, OSError) as error:
        raise StageFailed(f"{file.name}: {error}") from None


def read_tensors(file: Path) -> dict[str, Tensor]:
    """All tensors of a checked file."""
    with safe_open(file, framework="pt") as held:
        return {name: held.get_tensor(name) for name in sorted(held.keys())}
