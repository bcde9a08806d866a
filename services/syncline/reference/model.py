"""Loading a `transformers` causal LM and its tokenizer from the model root.

Both reference engines call `load_model` with the job's `ModelSpec` and `seeds.model`, so both hold the same
architecture; random weights depend on nothing but the seed. Compute is FP32 throughout: under the `bf16`
recipe the values of the weights are BF16 (`round_to_bf16`), the arithmetic on them is wider.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils import logging as transformers_logging

from syncline.contract.job import ModelSpec
from syncline.reference.chunks import fit_chunks
from syncline.reference.state import (
    StatePlan,
    UnknownLayout,
    export_state,
    load_state,
    named_windows,
    round_to_bf16,
    state_plan,
)

__all__ = [
    "LoadedModel",
    "ModelFolder",
    "StatePlan",
    "TextCodec",
    "UnknownLayout",
    "empty_model",
    "export_state",
    "load_model",
    "load_state",
    "model_folder",
    "named_windows",
    "round_to_bf16",
    "state_plan",
]

transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]


class ModelFolder(msgspec.Struct, frozen=True):
    """A model folder that lies under the model root."""

    path: Path
    config: Any  # the transformers config
    config_digest: str  # sha256 hex of config.json: `VersionManifest.model`


class TextCodec:
    """Text to ids and back with the folder's tokenizer. Unknown text is refused, never made `<unk>`."""

    def __init__(self, path: Path) -> None:
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError) as error:
            raise ValueError(f"model {path.name}: tokenizer: {error}") from error
        self.unknown: int | None = self.tokenizer.unk_token_id
        self.has_template: bool = self.tokenizer.chat_template is not None

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with what the tokenizer puts in front. Raises `ValueError` naming the text."""
        return self._known(self.tokenizer(text)["input_ids"], text)

    def encode_piece(self, text: str) -> list[int]:
        """Ids of a text that stands behind others: nothing is put in front. Raises `ValueError` naming the text."""
        return self._known(self.tokenizer(text, add_special_tokens=False)["input_ids"], text)

    def _known(self, ids: list[int], text: str) -> list[int]:
        if not ids:
            raise ValueError(f"prompt {text[:60]!r} has no tokens")
        # where unk is also bos or eos (GPT-2's habit) every byte is known
        special = {self.tokenizer.bos_token_id, self.tokenizer.eos_token_id}
        if self.unknown is not None and self.unknown not in special and self.unknown in ids:
            raise ValueError(f"prompt {text[:60]!r} holds text that the tokenizer does not know")
        return ids

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """A chat by the tokenizer's own template, ending where the assistant begins."""
        if not self.has_template:
            raise ValueError("the task gives messages, and the model's tokenizer has no chat template")
        return str(
            self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        )

    def encode_messages(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Ids of a chat, as `render` writes it: what the template puts in front is all that stands there."""
        ids: list[int] = self.tokenizer(self.render(messages), add_special_tokens=False)["input_ids"]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled ids without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


class LoadedModel(msgspec.Struct, frozen=True):
    """A model with what goes with it. `model` is in eval mode, FP32, and requires gradients."""

    model: PreTrainedModel
    codec: TextCodec
    folder: ModelFolder
    plan: StatePlan
    stop_ids: tuple[int, ...]
    vocab: int


def model_folder(models: Path, name: str) -> ModelFolder:
    """The folder `name` under the model root. Raises `ValueError` naming the model.

    Its real path must lie under the root, and it may bring no code of its own.
    """
    root = models.resolve()
    path = (root / name).resolve()
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,62}", name) or root not in path.parents:
        raise ValueError(f"model {name!r} is not a folder under the model root {models}")
    file = path / "config.json"
    if not file.is_file():
        known = sorted(p.parent.name for p in root.glob("*/config.json"))
        raise ValueError(f"model {name!r} has no config.json under {models}; there are: {', '.join(known)}")
    raw = file.read_bytes()
    try:
        declared = msgspec.json.decode(raw, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise ValueError(f"model {name!r}: config.json: {error}") from None
    if "auto_map" in declared:
        raise ValueError(f"model {name!r}: config.json names code of its own (auto_map), which is never run")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"model {name!r}: config.json: {error}") from error
    return ModelFolder(path=path, config=config, config_digest=hashlib.sha256(raw).hexdigest())


def load_model(models: Path, spec: ModelSpec, seed: int) -> LoadedModel:
    """Build the model of `spec` with FP32 weights, random by `seed` or pretrained, and its tokenizer.

    Raises `ValueError` naming the model and, for pretrained weights, the missing or unexpected tensor.
    """
    folder = model_folder(models, spec.name)
    model = _random(folder, seed) if spec.weights == "random" else _pretrained(folder)
    return LoadedModel(
        model=model,
        codec=TextCodec(folder.path),
        folder=folder,
        plan=state_plan(model),
        stop_ids=stop_ids(folder),
        vocab=int(folder.config.get_text_config(decoder=True).vocab_size),
    )


def empty_model(folder: ModelFolder) -> PreTrainedModel:
    """The architecture with undefined weights, for a loader that writes each of them."""
    with no_init_weights():
        model = _build(folder)
    model.tie_weights()
    return _eval(model)


def stop_ids(folder: ModelFolder) -> tuple[int, ...]:
    """Ids that end a response: eos of generation_config.json if there is one, else of config.json."""
    eos = folder.config.get_text_config(decoder=True).eos_token_id
    file = folder.path / "generation_config.json"
    if file.is_file():
        eos = msgspec.json.decode(file.read_bytes(), type=dict[str, Any]).get("eos_token_id", eos)
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)


def _build(folder: ModelFolder) -> PreTrainedModel:
    try:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            folder.config, dtype=torch.float32, trust_remote_code=False
        )
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"model {folder.path.name!r} is no causal LM that transformers knows: {error}"
        ) from error
    return model


def _random(folder: ModelFolder, seed: int) -> PreTrainedModel:
    with _seeded(seed):
        return _eval(_build(folder))


def _pretrained(folder: ModelFolder) -> PreTrainedModel:
    try:
        loaded: tuple[PreTrainedModel, dict[str, Any]] = AutoModelForCausalLM.from_pretrained(  # type: ignore[assignment]
            folder.path,
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"model {folder.path.name!r}: weights: {error}") from error
    model, info = loaded
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[what]:
            raise ValueError(
                f"model {folder.path.name!r}: {what.replace('_', ' ')}: {sorted(map(str, info[what]))[0]}"
            )
    # so that names on export do not depend on which names this very checkpoint used
    model._weight_conversions = None  # type: ignore[assignment]
    return _eval(model)


def _eval(model: PreTrainedModel) -> PreTrainedModel:
    model.train(False)
    fit_chunks(model)
    return model


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Random numbers from `seed` inside, and the process's own stream untouched outside."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
