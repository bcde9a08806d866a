"""The small files of an export: what a loader reads beside the tensors."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from syncline.contract.compile import CannotCompile
from syncline.contract.compile.sglang import SGLangSettings, sglang_flags
from syncline.contract.plan import PrecisionPlan
from syncline.contract.precision import PrecisionContract
from syncline.exporting.held import CannotExport
from syncline.runtime.durable import write_whole

CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
PEFT = "base_model.model."
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)
"""What is copied from the model folder, where it is there."""


def config_of(model: Path, digest: str) -> dict[str, Any]:
    """The model's config.json. Raises `CannotExport` unless its sha256 is `digest` ("": nobody says)."""
    try:
        raw = (model / CONFIG).read_bytes()
    except OSError as error:
        raise CannotExport(f"model {model.name}: {CONFIG}: {error.strerror}") from None
    found = hashlib.sha256(raw).hexdigest()
    if digest and found != digest:
        raise CannotExport(
            f"model {model.name}: {CONFIG} has sha256 {found}, the version was made of a model with {digest}"
        )
    config: dict[str, Any] = json.loads(raw)
    return config


def write_model_settings(
    folder: Path, model: Path, config: dict[str, Any], dtype: str, quantization: dict[str, Any] | None = None
) -> None:
    """config.json with `dtype` (torch's name) and how weights are quantised; tokenizer; generation config.

    Of a model folder without generation_config.json one is made of the stop and start tokens of its config.
    """
    made = {**config, "dtype": dtype}
    made.pop("torch_dtype", None)
    if quantization is not None:
        made["quantization_config"] = quantization
    _write(folder / CONFIG, made)
    copy_tokenizer(folder, model)
    if not (folder / "generation_config.json").exists():
        text = config.get("text_config", config)
        tokens = {k: text[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if k in text}
        _write(folder / "generation_config.json", tokens)


def copy_tokenizer(folder: Path, model: Path) -> None:
    """The tokenizer's files as they lie in the model folder."""
    for name in TOKENIZER:
        if (model / name).is_file():
            shutil.copyfile(model / name, folder / name)


def sglang_settings(contract: PrecisionContract, plan: PrecisionPlan) -> SGLangSettings:
    """What SGLang must be told. Raises `CannotExport` with the contract's key where it has no way to say it."""
    try:
        return sglang_flags(contract, plan)
    except CannotCompile as error:
        raise CannotExport(f"SGLang cannot hold the contract {contract.name}: {error}") from None


def write_adapter_config(
    folder: Path, contract: PrecisionContract, names: Iterable[str], base: str, leaves: bool
) -> None:
    """`adapter_config.json` as PEFT and SGLang read it.

    names    adapter tensors by checkpoint name
    base     what `base_model_name_or_path` says
    leaves   name targets by their last part, as SGLang does; else by their whole path, so that no other is meant
    """
    adapter = contract.adapter
    if adapter is None:
        raise AssertionError("a contract without adapter has no adapter to describe")
    modules = {name.rsplit(".lora_", 1)[0] for name in names}
    targets = sorted({module.rsplit(".", 1)[-1] if leaves else module for module in modules})
    alpha = adapter.alpha
    _write(
        folder / ADAPTER_CONFIG,
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": adapter.rank,
            "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
            "use_rslora": adapter.rank_stable,
            "lora_dropout": 0.0,
            "target_modules": targets,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        },
    )


def _write(path: Path, value: Any) -> None:
    write_whole(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
