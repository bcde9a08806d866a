"""Adapters on the server: a folder per version, under a name that is never used twice.

The server loads an adapter that a request names and it has forgotten from the folder of old: a name that came back
would bring old weights. So a name holds version and digest, and says by itself what sampled a token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from syncline.contract.adapters import is_adapter
from syncline.contract.version_path import VersionId, VersionManifest
from syncline.rollout.engines.sglang.labels import label_of, parse_label

_PREFIX = "policy-"
_PEFT = "base_model.model."


def adapter_name(version: VersionId, digest: str) -> str:
    """Name of a version's adapter, such as policy-0.12@0123456789ab."""
    return _PREFIX + label_of(version, digest)


def parse_adapter(name: str) -> tuple[VersionId, str]:
    """(version, short digest). Raises `ValueError` for a name that this engine did not give."""
    if not name.startswith(_PREFIX):
        raise ValueError(f"adapter {name!r} is not of the form {_PREFIX}EPOCH.NUMBER@DIGEST12")
    return parse_label(name.removeprefix(_PREFIX))


def contents_of(manifest: VersionManifest, adapter: bool) -> dict[str, str]:
    """Tensor -> digest of the manifest's adapter, or of its base."""
    return {entry.name: entry.digest for entry in manifest.tensors if is_adapter(entry.name) == adapter}


def write_adapter(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """A PEFT folder: `adapter_config.json` and the tensors, under the names that PEFT gives them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(dict(config)))
    held = {_PEFT + name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(held, folder / "adapter_model.safetensors", metadata={"format": "pt"})
