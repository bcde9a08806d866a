"""The rollout part of the six-component trace, read from a set of weights that has scored something."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from syncline.contract.artefact import encoded
from syncline.contract.precision_trace import ComponentTrace, Held, Use
from syncline.contract.schemes import KvFormat, KvTensor
from syncline.reference.packed import DTYPES, Stack
from syncline.rollout.engines.kv import growing_cache, nbytes, parts, stored_of
from syncline.rollout.engines.weights import Weights

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_STORED: tuple[KvTensor, ...] = get_args(KvTensor)
_SHORT, _LONG = 8, 16  # tokens between whose contexts the bytes of one are taken


class Context(NamedTuple):
    """How the attention context of a request is stored. `use`: None if nothing of it is codes."""

    bytes: int  # of one token
    use: Use | None


def rollout_trace(weights: Weights, context: Context) -> ComponentTrace:
    """What `weights` really are, and the context that they are used with."""
    families: dict[str, list[Stack]] = {}
    for stack in weights.packed.stacks.values():
        families.setdefault(stack.family, []).append(stack)
    sources = {} if weights.manifest is None else {t.name: t.dtype for t in weights.manifest.tensors}
    uses = [_low_bit(family, stacks, sources) for family, stacks in sorted(families.items())]
    adapter = {} if weights.adapters is None else weights.adapters.views()
    base = {name: view for name, view in weights.packed.views.items() if name not in adapter}
    uses.append(_wide("", base, sources))
    if adapter:
        uses.append(_wide("adapter", adapter, sources))
    held = weights.packed.nbytes()
    size = 0 if weights.adapters is None else weights.adapters.nbytes()
    bytes: dict[Held, int] = {
        "codes": held["codes"],
        "scales": held["scales"],
        "wide": held["wide"] - size,
        "adapter": size,
        "kv_cache": context.bytes,
    }
    if context.use is not None:
        uses.append(context.use)
    return ComponentTrace(component="rollout", uses=tuple(uses), bytes={k: v for k, v in bytes.items() if v})


def _wide(family: str, views: Mapping[str, Tensor], sources: dict[str, str]) -> Use:
    travelled = _joined(sources[name] for name in views if name in sources)
    return Use(
        family=family,
        tensors=len(views),
        encoded=f"{travelled} values",
        operands="X original, W original",
        kernel="wide",
        persistent=_dtypes(views.values()),
        communicated=travelled,
    )


def _low_bit(family: str, stacks: list[Stack], sources: dict[str, str]) -> Use:
    parts = [part for stack in stacks for part, _ in stack.slots()]
    travelled = {sources[name] for part in parts for name in (part.name, part.source) if name in sources}
    return Use(
        family=family,
        tensors=len({part.source for part in parts}),
        encoded=_joined(encoded(stack.scheme) for stack in stacks),
        operands=_joined(stack.operands() for stack in stacks),
        kernel=_joined(stack.ran or "none" for stack in stacks),
        persistent=_dtypes(slot for stack in stacks for _, slot in stack.slots()),
        communicated=_joined(travelled),
    )


def _dtypes(tensors: Iterable[Tensor]) -> str:
    return "+".join(sorted({_NAMES.get(tensor.dtype, str(tensor.dtype)) for tensor in tensors}))


def _joined(words: Iterable[str]) -> str:
    return "; ".join(sorted(set(words)))


@torch.inference_mode()
def context_of(model: PreTrainedModel, kv: KvFormat) -> Context:
    """What is stored of a request's context, and the bytes by which it grows with a token: of two prefills."""
    sizes: list[int] = []
    stored: list[dict[str, Tensor]] = []
    for length in (_SHORT, _LONG):
        cache = growing_cache(model.config, kv)
        model(input_ids=torch.zeros(1, length, dtype=torch.int64), cache=cache, use_cache=True)
        # linear-attention states do not grow
        stored = [stored_of(layer) for layer in cache.layers if isinstance(layer, DynamicLayer)]
        held = [nbytes(layer) for layer in stored]
        sizes.append(sum(size.codes + size.scales + size.wide for size in held))
    return Context((sizes[1] - sizes[0]) // (_LONG - _SHORT), _context_use(stored))


def _context_use(layers: Sequence[Mapping[str, Tensor]]) -> Use | None:
    """The stored context in words, if any of it is codes under scales."""
    coded, wide = set(), set()
    for layer in layers:
        for name in _STORED:
            if name not in layer:
                continue
            tensor, scale = layer[name], layer.get(parts(name)[1])
            if scale is None:
                wide.add(f"{name} {_dtypes([tensor])}")
            else:
                form = (
                    f"{_dtypes([tensor])} with an {_dtypes([scale])} scale per vector of {tensor.shape[-1]}"
                )
                coded.add(f"{name} {form}")
    if not coded:
        return None
    return Use(
        family="kv_cache",
        tensors=sum(name in layer for layer in layers for name in _STORED),
        encoded="; ".join([*sorted(coded), *sorted(wide)]),
        operands="values of what is stored, the newest token's too",
        kernel="wide",
        persistent=_dtypes(tensor for layer in layers for tensor in layer.values()),
    )
