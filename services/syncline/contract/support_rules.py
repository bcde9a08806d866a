"""The words of the support matrix, and its rules, read from `support_matrix.toml`. `support.py` looks them up."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Literal, get_args

import msgspec

from syncline.contract.precision import Hardware

Framework = Literal["reference", "sglang", "transformer_engine"]
Path = Literal["rollout", "fprop", "dgrad", "wgrad", "sync"]
FormatName = Literal["wide", "fp8_block", "fp8_block_pow2", "int4", "mxfp8", "mxfp4", "nvfp4", "kv_fp8_e4m3"]
Kernel = Literal["wide", "decoded", "qdq", "codes", "bytes"]
"""`decoded`: low-bit weights are decoded and meet wide activations. `qdq`: dequantised operands in a wide GEMM.
`codes`: codes and scales of both operands. `bytes`: nothing is multiplied (sync, and the KV cache as storage)."""
ModelFamily = Literal["dense", "moe", "mla_moe", "kimi", "hybrid_moe"]
Evidence = Literal["run", "read", "unproven"]
How = Literal["native", "emulation", "none"]

HARDWARE: tuple[Hardware, ...] = get_args(Hardware)
FRAMEWORKS: tuple[Framework, ...] = get_args(Framework)
PATHS: tuple[Path, ...] = get_args(Path)
FORMATS: tuple[FormatName, ...] = get_args(FormatName)
KERNELS: tuple[Kernel, ...] = get_args(Kernel)
MODELS: tuple[ModelFamily, ...] = get_args(ModelFamily)

MODEL_TYPES: dict[str, ModelFamily] = {
    "llama": "dense",
    "qwen3": "dense",
    "qwen3_moe": "moe",
    "glm_moe_dsa": "mla_moe",
    "deepseek_v3": "mla_moe",
    "kimi_linear": "kimi",
    "qwen3_5_moe_text": "hybrid_moe",
    "qwen3_next": "hybrid_moe",
}
"""`model_type` of a config.json -> the family that the matrix counts it to."""


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One entry of the file; its keys are told there. An empty tuple fits everything."""

    framework: Framework
    hardware: tuple[Hardware, ...] = ()
    formats: tuple[FormatName, ...] = ()
    kernels: tuple[Kernel, ...] = ()
    models: tuple[ModelFamily, ...] = ()
    paths: tuple[Path, ...] = ()
    how: How
    evidence: Evidence
    says: str
    source: str = ""


def _read() -> tuple[Rule, ...]:
    text = (files("syncline.contract") / "support_matrix.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text)["rule"], tuple[Rule, ...])


RULES: tuple[Rule, ...] = _read()
"""All rules, in order."""
