"""Versions for engine tests, made without a line of any engine: plain `transformers` models and raw blobs.

A version's weights are random by a seed and BF16-valued; different seeds are "updates" far larger than a
training step, so that a span scored under the wrong version cannot look right by chance.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from conformance import lowbit
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer

from syncline.contract.plan import PrecisionPlan
from syncline.contract.precision import PrecisionContract
from syncline.contract.recipes import RECIPES
from syncline.contract.schemes import KvFormat
from syncline.contract.version_path import (
    SignedManifest,
    TensorEntry,
    VersionId,
    VersionManifest,
    sign,
)
from syncline.runtime.store import BlobStore

MODELS = Path(__file__).parents[2] / "examples" / "models"
FAMILIES = ("tiny-dense", "tiny-moe", "tiny-hybrid", "tiny-kimi", "tiny-glm")
_COMMON: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "max_position_embeddings": 1024,
    "initializer_range": 0.06,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "intermediate_size": 64,
}
_SPARSE = {"num_local_experts": 8, "num_experts_per_tok": 2}
FURTHER: dict[str, dict[str, Any]] = {
    # layers that see a window of 8 tokens, alternating with full ones, and attention sinks
    "gpt-oss": {"model_type": "gpt_oss", **_COMMON, **_SPARSE, "head_dim": 16, "sliding_window": 8},
    "gemma3": {
        "model_type": "gemma3_text",
        **_COMMON,
        "head_dim": 16,
        "sliding_window": 8,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    },
    # layers whose only state is a convolution
    "lfm2": {
        "model_type": "lfm2",
        **_COMMON,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
    },
    # latent attention without an index
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        **_COMMON,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "q_lora_rank": 24,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 32,
    },
}
"""Families that no example ships: cache kinds that the examples leave out."""

JOB = "j00000test"
KEY = b"a key of the test job"
_NAMES = {
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
    torch.int32: "I32",
    torch.int64: "I64",
}


def family_folder(name: str, scratch: Path) -> Path:
    """The model folder of a family: an example's, or one written below `scratch`."""
    if name in FAMILIES:
        return MODELS / name
    folder = scratch / "models" / name
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(FURTHER[name]))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((MODELS / "tiny-moe" / file).read_bytes())
    return folder


@lru_cache(maxsize=64)
def plain(folder: Path, seed: int) -> Any:
    """The model of a version as plain `transformers`: FP32 tensors with BF16 values."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1000 + seed)
        config = AutoConfig.from_pretrained(folder)
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(tensor.bfloat16())
    return model.eval()


@lru_cache(maxsize=64)
def checkpoint(folder: Path, seed: int) -> Mapping[str, Tensor]:
    """The same version's tensors as `save_pretrained` writes them."""
    with tempfile.TemporaryDirectory() as where:
        plain(folder, seed).save_pretrained(where)
        return {
            name: tensor.bfloat16() for name, tensor in load_file(Path(where) / "model.safetensors").items()
        }


@lru_cache(maxsize=16)
def plan(folder: Path, contract: PrecisionContract) -> PrecisionPlan:
    """The plan of `contract` for the model in `folder`."""
    return lowbit.plan_of(plain(folder, 0), contract)


@lru_cache(maxsize=64)
def cold(folder: Path, seed: int, contract: PrecisionContract) -> Any:
    """The version of `seed` under `contract` as plain `transformers`: the values that its codes stand for."""
    if not contract.families:
        return plain(folder, seed)
    return lowbit.cold(plain(folder, seed), checkpoint(folder, seed), contract)


class Forge:
    """Makes signed versions of the model in `folder` in a store of its own, in the form that `contract` gives them."""

    def __init__(
        self,
        root: Path,
        folder: Path,
        job: str = JOB,
        key: bytes = KEY,
        contract: PrecisionContract = RECIPES["bf16"],
    ) -> None:
        self.store = BlobStore(root / "store")
        self.folder = folder
        self.job, self.key, self.contract = job, key, contract

    def cold(self, seed: int) -> Any:
        """The version of `seed` as plain `transformers`, with the values that its codes stand for."""
        return cold(self.folder, seed, self.contract)

    def manifest(
        self,
        number: int,
        seed: int | None = None,
        epoch: int = 0,
        change: Callable[[dict[str, Tensor]], object] | None = None,
    ) -> VersionManifest:
        """Blobs and an unsigned manifest of version `epoch.number`; weights by `seed` (default: the number).

        `change` alters the tensors of the manifest, by name.
        """
        tensors = dict(checkpoint(self.folder, number if seed is None else seed))
        sources: dict[str, str] = {}
        planned = plan(self.folder, self.contract)
        made = lowbit.quantised(planned, tensors)
        for entry in planned.low_bit():
            del tensors[entry.name]
            for part, tensor in lowbit.encoded(entry, made[entry.name]):
                tensors[part.name] = tensor
                sources[part.name] = "" if part.name == part.source else part.source
        if change is not None:
            change(tensors)
        entries = []
        for name, tensor in sorted(tensors.items()):
            raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            entries.append(
                TensorEntry(
                    name=name,
                    dtype=_NAMES[tensor.dtype],
                    shape=tuple(tensor.shape),
                    nbytes=len(raw),
                    digest=self.store.put(raw),
                    source=sources.get(name, ""),
                )
            )
        return VersionManifest(
            job=self.job,
            version=VersionId(epoch, number),
            parent=None,
            optimizer_step=number,
            contract=self.contract.digest(),
            representation=self.contract.representation,
            model=hashlib.sha256((self.folder / "config.json").read_bytes()).hexdigest(),
            tensors=tuple(entries),
            plan=planned.digest(),
        )

    def version(self, number: int, seed: int | None = None, epoch: int = 0) -> SignedManifest:
        """A signed version, published in the store."""
        signed = sign(self.manifest(number, seed, epoch), self.key)
        self.store.write_manifest(signed)
        return signed


def rounded_vectors(vectors: Tensor) -> Tensor:
    """`vectors` [.., D] as E4M3 times a scale of the largest magnitude / 448, by torch's cast alone."""
    scale = vectors.abs().amax(-1, keepdim=True) / 448
    scale = torch.where(scale > 0, scale, 1.0)
    return (vectors / scale).to(torch.float8_e4m3fn).float() * scale


def cold_cache(config: Any, kv: KvFormat) -> DynamicCache:
    """An empty `transformers` cache; under fp8_e4m3 a wide one of rounded values: no code of the engine's."""
    cache = DynamicCache(config=config)
    layers: list[Any] = [*cache.layers] if kv == "fp8_e4m3" else []
    for layer in layers:
        if isinstance(layer, DynamicLayer):
            layer.update = _rounding(layer.update)  # type: ignore[method-assign]
        if isinstance(layer, DynamicIndexedLayer):
            layer.update_indexer = _rounding(layer.update_indexer)  # type: ignore[method-assign]
    return cache


def _rounding(update: Callable[..., Any]) -> Callable[..., Any]:
    def rounded(*states: Tensor, **kwargs: Any) -> Any:
        return update(*map(rounded_vectors, states), **kwargs)

    return rounded


@torch.inference_mode()
def cold_logits(model: Any, ids: Sequence[int], kv: KvFormat = "wide") -> Tensor:
    """Logits [T, V] of one full forward pass."""
    cache = None if kv == "wide" else cold_cache(model.config, kv)
    logits: Tensor = model(
        input_ids=torch.tensor([list(ids)]), cache=cache, use_cache=cache is not None
    ).logits
    return logits[0]


def cold_logprobs(model: Any, ids: Sequence[int], first: int, kv: KvFormat = "wide") -> list[float]:
    """Log-probs of `ids[first:]` by one full forward pass, temperature 1."""
    logits_TV = cold_logits(model, ids, kv)
    logprobs_TV = torch.log_softmax(logits_TV, dim=-1)
    return [float(logprobs_TV[i - 1, ids[i]]) for i in range(first, len(ids))]


@torch.inference_mode()
def cold_replay(
    parts: Sequence[tuple[Any, int]], ids: Sequence[int], kv: KvFormat = "wide"
) -> list[list[float]]:
    """Log-probs of a response whose context was carried from model to model.

    parts   (model, index into `ids` at which its span ends), in order; each model feeds what is before its
    last
            token and is not fed yet, onto the state that the ones before it left
    """
    cache = cold_cache(parts[0][0].config, kv)
    fed, out = 0, []
    for model, end in parts:
        rows = []
        for at in range(fed, end - 1):  # token by token, as decoding did
            logits = model(input_ids=torch.tensor([[ids[at]]]), cache=cache, use_cache=True).logits[0, -1]
            rows.append(float(torch.log_softmax(logits, dim=-1)[ids[at + 1]]))
        fed = end - 1
        out.append(rows)
    return out


def gap(left: Sequence[float], right: Sequence[float]) -> float:
    """Largest absolute difference."""
    return max(abs(a - b) for a, b in zip(left, right, strict=True))
