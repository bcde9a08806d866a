"""Decode and prefill in few tensor operations: the same arithmetic as the library's modules, without walking them.

A small model's decode step is bound by what is spent per operation and per module, and not by its products. So a
family whose layers are known to the letter (`direct_of` compares types and settings, and gives None for every other)
is stepped by hand: q, k and v as one product, the heads of q and k normed and rotated together, attention as two
batched products over the slots, and, where at most half of the experts would be left out, all experts as one product
each instead of sorting tokens by expert.

The weights are the model's own parameters. Those of one product lie side by side in one matrix, of which the
parameters are views: what a version writes and reads back is what is multiplied. Nothing is derived from them.

Legend: N prompts, P tokens of each, R rows (of a prefill N x P), U hidden, H heads (q, then k), G query heads per key
head, D head width, C columns, E experts, K experts per token, I intermediate, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaMLP
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM, Qwen3MLP
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeExperts,
    Qwen3MoeForCausalLM,
    Qwen3MoeMLP,
    Qwen3MoeSparseMoeBlock,
)

from syncline.rollout.engines.hidden import Hidden
from syncline.rollout.engines.slots import ColumnLayer, SlotCache

_FAMILIES = (LlamaForCausalLM, Qwen3ForCausalLM, Qwen3MoeForCausalLM)
_FIXED_ROTATIONS = ("default", "linear", "llama3")  # frequencies that no position changes


@dataclass(frozen=True)
class _Mlp:
    """Two products with a gate between them."""

    gate_up: Tensor  # [U, 2 I]
    down: Tensor  # [I, U]

    def add(self, x_RU: Tensor, normed_RU: Tensor, routes: list[Tensor] | None) -> Tensor:
        gate_RI, up_RI = torch.mm(normed_RU, self.gate_up).chunk(2, dim=-1)
        return torch.addmm(x_RU, F.silu(gate_RI).mul_(up_RI), self.down)


@dataclass(frozen=True)
class _Sparse:
    """Experts behind a router that takes the K largest of a softmax."""

    router: Tensor  # [U, E]
    topk: int
    normalised: bool
    experts: Qwen3MoeExperts
    gate_up: Tensor  # [U, E 2 I]
    down: Tensor  # [E, I, U]

    def add(self, x_RU: Tensor, normed_RU: Tensor, routes: list[Tensor] | None) -> Tensor:
        scores_RE = torch.mm(normed_RU, self.router)
        if self.normalised:  # the softmax of the chosen scores is what the chosen shares of all come to
            scores_RK, ids_RK = scores_RE.topk(self.topk, dim=-1)
            weights_RK = scores_RK.softmax(-1)
        else:
            weights_RK, ids_RK = scores_RE.softmax(-1).topk(self.topk, dim=-1)
        if routes is not None:
            routes.append(ids_RK)
        count = self.down.shape[0]
        if count > 2 * self.topk:
            sparse: Tensor = self.experts(normed_RU, ids_RK, weights_RK)
            return x_RU + sparse
        rows = x_RU.shape[0]
        weights_RE = torch.zeros_like(scores_RE).scatter_(1, ids_RK, weights_RK)
        gate_REI, up_REI = torch.mm(normed_RU, self.gate_up).view(rows, count, 2, -1).unbind(2)
        inner_REI = F.silu(gate_REI).mul_(up_REI).mul_(weights_RE.unsqueeze(-1))
        return torch.bmm(inner_REI.transpose(0, 1), self.down).sum(0).add_(x_RU)


@dataclass(frozen=True)
class _Layer:
    """One layer's weights, as the products take them."""

    before: Tensor  # [U]: norm of the attention's input
    qkv: Tensor  # [U, H D + the values' heads x D]
    heads: Tensor | None  # [2, D]: norms of the heads of q and of k
    out: Tensor  # [heads of q x D, U]
    after: Tensor  # [U]
    feed: _Mlp | _Sparse


class Direct:
    """Decode and prefill of one model. Made by `direct_of`."""

    def __init__(self, model: Any, layers: Sequence[_Layer]) -> None:
        config, inner = model.config, model.model
        self._layers = layers
        self._embedding: Tensor = inner.embed_tokens.weight
        self._norm: Tensor = inner.norm.weight
        self._output: Tensor = model.lm_head.weight.t()
        self._q, self._k = config.num_attention_heads, config.num_key_value_heads
        first = inner.layers[0].self_attn
        self._width: int = first.head_dim
        self._scaling: float = first.scaling
        self._hidden = Hidden(self._k)
        self._head_kind = torch.tensor([0] * self._q + [1] * self._k)
        half_D = inner.rotary_emb.inv_freq.float()
        widths = (self._width, config.hidden_size)
        self._least = {width: torch.tensor((width * config.rms_norm_eps) ** 0.5) for width in widths}
        self._nothing = torch.zeros(1)
        # cos is even and sin odd: a rotated half is the other half times this sine
        self._frequencies = torch.cat((-half_D, half_D))[None, :]
        self._rotations = torch.zeros(0, 2, 1, self._width)  # by position: cosines, signed sines

    def step(
        self, ids_R: Tensor, fed_R: Tensor, starts_R: NDArray[np.int64], cache: SlotCache, wanted: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits [R, V] of one more token of each row, whose keys and values go to the cache's free column.

        ids_R, fed_R   int64 [R]: the token, and its position
        starts_R       the first column of the window that a row may see
        wanted         whether to return the experts' ids [R, K] of each routing layer
        """
        routes: list[Tensor] | None = [] if wanted else None
        columns = cache.geometry.column - cache.geometry.low + 1
        rotation, bias = self._rotation(fed_R, columns), self._hidden.bias(starts_R, columns)
        x_RU = self._embedding.index_select(0, ids_R)
        for layer, slots in zip(self._layers, cache.slot_layers, strict=True):
            assert isinstance(slots, ColumnLayer)
            q_RHD, k_RHD, v_RHD = self._heads(layer, self._normed(x_RU, layer.before), rotation)
            keys, values = slots.extend(k_RHD, v_RHD)
            x_RU = torch.addmm(x_RU, self._attend(q_RHD, keys, values, bias), layer.out)
            x_RU = layer.feed.add(x_RU, self._normed(x_RU, layer.after), routes)
        return torch.mm(self._normed(x_RU, self._norm), self._output), routes or []

    def prefill(self, ids_NP: Tensor, cache: DynamicCache, wanted: bool) -> tuple[Tensor, list[Tensor]]:
        """Logits [N, V] after each of N prompts of P tokens, whose keys and values go to the empty `cache`.

        wanted   whether to return the experts' ids [N x P, K] of each routing layer
        """
        n, p = ids_NP.shape
        routes: list[Tensor] | None = [] if wanted else None
        rotation = self._rotation(torch.arange(p).repeat(n), p)
        x_RU = self._embedding.index_select(0, ids_NP.flatten())
        for i, layer in enumerate(self._layers):
            heads = self._heads(layer, self._normed(x_RU, layer.before), rotation)
            q_NHPD, k_NHPD, v_NHPD = (h.reshape(n, p, -1, self._width).transpose(1, 2) for h in heads)
            keys, values = cache.update(k_NHPD, v_NHPD, i)
            mixed_NHPD = F.scaled_dot_product_attention(
                q_NHPD, keys, values, is_causal=True, scale=self._scaling, enable_gqa=True
            )
            x_RU = torch.addmm(x_RU, mixed_NHPD.transpose(1, 2).reshape(n * p, -1), layer.out)
            x_RU = layer.feed.add(x_RU, self._normed(x_RU, layer.after), routes)
        last_NU = x_RU.view(n, p, -1)[:, -1]
        return torch.mm(self._normed(last_NU, self._norm), self._output), routes or []

    def _rotation(self, positions_R: Tensor, reach: int) -> Sequence[Tensor]:
        """Cosines and signed sines [R, 1, D] of positions below `reach`."""
        if reach > self._rotations.shape[0]:
            angles_PD = torch.arange(2 * reach)[:, None].float() * self._frequencies
            self._rotations = torch.stack((angles_PD.cos(), angles_PD.sin()), 1)[:, :, None]
        return self._rotations.index_select(0, positions_R).unbind(1)

    def _heads(
        self, layer: _Layer, x_RU: Tensor, rotation: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Heads [R, heads, D] of q and k, rotated, and of v."""
        q, k, width = self._q, self._k, self._width
        all_RHD = torch.mm(x_RU, layer.qkv).view(x_RU.shape[0], q + 2 * k, width)
        qk_RHD, v_RHD = all_RHD.split_with_sizes((q + k, k), 1)
        if layer.heads is not None:
            qk_RHD = self._normed(qk_RHD, layer.heads.index_select(0, self._head_kind))
        cos_R1D, sin_R1D = rotation
        qk_RHD = torch.addcmul(qk_RHD * cos_R1D, qk_RHD.roll(width // 2, -1), sin_R1D)
        q_RHD, k_RHD = qk_RHD.split_with_sizes((q, k), 1)
        return q_RHD, k_RHD, v_RHD

    def _attend(self, q_RHD: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
        """One query of each row over its window: [R, heads of q x D]."""
        rows, q, width = q_RHD.shape
        queries = q_RHD.reshape(rows * self._k, q // self._k, width)
        if bias is None:
            scores = torch.bmm(queries, keys).mul_(self._scaling)
        else:
            scores = torch.baddbmm(bias, queries, keys, alpha=self._scaling)
        return torch.bmm(scores.softmax(-1), values).view(rows, q * width)

    def _normed(self, x_RU: Tensor, weight: Tensor) -> Tensor:
        """Root mean square norm over the last dimension: x w sqrt(U) / hypot(|x|, sqrt(U eps)), four operations."""
        width = x_RU.shape[-1]
        length = torch.hypot(torch.linalg.vector_norm(x_RU, 2, -1, True), self._least[width])
        return torch.addcmul(self._nothing, x_RU / length, weight, value=width**0.5)


def direct_of(model: PreTrainedModel) -> Direct | None:
    """The direct step of `model`, whose weights are undefined yet: some are given another place in memory.

    None: it is of no family that is known here, or differs in a setting; nothing has changed then.
    """
    if type(model) not in _FAMILIES or not _plain(model):
        return None
    anyone: Any = model
    return Direct(model, [_layer(layer) for layer in anyone.model.layers])


def _plain(model: Any) -> bool:
    config, inner = model.config, model.model
    rotary, attention = inner.rotary_emb, inner.layers[0].self_attn
    modules = list(model.modules())
    linears = [m for m in modules if isinstance(m, nn.Linear)]
    return (
        model.dtype == torch.float32
        and model.device.type == "cpu"
        and config._attn_implementation == "sdpa"
        and config.hidden_act == "silu"
        and rotary.rope_type in _FIXED_ROTATIONS
        and rotary.attention_scaling == 1.0
        and 2 * rotary.inv_freq.numel() == attention.head_dim
        and all(type(m) is nn.Linear and m.bias is None for m in linears)
        and not any("forward" in vars(m) or m._forward_hooks or m._forward_pre_hooks for m in modules)
        and all(_known(layer.mlp) for layer in inner.layers)
    )


def _known(mlp: nn.Module) -> bool:
    return type(mlp) in (LlamaMLP, Qwen3MLP, Qwen3MoeMLP, Qwen3MoeSparseMoeBlock)


def _layer(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    normed = hasattr(attention, "q_norm")
    return _Layer(
        before=layer.input_layernorm.weight,
        qkv=_joined([attention.q_proj, attention.k_proj, attention.v_proj]).t(),
        heads=_joined([attention.q_norm, attention.k_norm]).view(2, -1) if normed else None,
        out=attention.o_proj.weight.t(),
        after=layer.post_attention_layernorm.weight,
        feed=_sparse(mlp) if isinstance(mlp, Qwen3MoeSparseMoeBlock) else _mlp(mlp),
    )


def _mlp(mlp: Any) -> _Mlp:
    return _Mlp(gate_up=_joined([mlp.gate_proj, mlp.up_proj]).t(), down=mlp.down_proj.weight.t())


def _sparse(block: Any) -> _Sparse:
    experts, router = block.experts, block.gate
    return _Sparse(
        router=router.weight.t(),
        topk=router.top_k,
        normalised=router.norm_topk_prob,
        experts=experts,
        gate_up=experts.gate_up_proj.detach().flatten(0, 1).t(),
        down=experts.down_proj.transpose(1, 2),
    )


def _joined(modules: Sequence[Any]) -> Tensor:
    """One tensor for the weights of `modules`, one behind the other; their parameters become views of it."""
    sizes = [m.weight.shape[0] for m in modules]
    whole = torch.empty(sum(sizes), *modules[0].weight.shape[1:])
    for module, part in zip(modules, whole.split_with_sizes(sizes), strict=True):
        module.weight.data = part
    return whole
