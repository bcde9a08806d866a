"""What a rank holds while awake: its part of the model, masters, routers, and the reference policy of a KL term."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from syncline.contract.job import JobSpec
from syncline.contract.plan import resolve
from syncline.contract.precision import Adapter
from syncline.contract.sharding.grid import Grid, Rank
from syncline.contract.sharding.layout import dimensions
from syncline.contract.sharding.pieces import Sharding
from syncline.contract.trainer_rules import layout_of
from syncline.reference.adapter import initial
from syncline.reference.model import export_state, load_model
from syncline.trainer.engines.frozen import BaseMoved
from syncline.trainer.engines.megatron import build, families, topology
from syncline.trainer.engines.megatron.base import FrozenPart, anywhere
from syncline.trainer.engines.megatron.held import Groups, Masters, Replicas
from syncline.trainer.engines.megatron.load import LoadedPart
from syncline.trainer.engines.megatron.lora import Lora
from syncline.trainer.engines.megatron.precision import Rounded, compute_dtype
from syncline.trainer.engines.megatron.quantised import Quantised
from syncline.trainer.engines.megatron.routes import Routers
from syncline.trainer.engines.megatron.wire import ModelFacts


class Awake:
    """What a rank holds while awake."""

    def __init__(self, spec: JobSpec, models: Path, grid: Grid, rank: Rank, groups: Groups) -> None:
        loaded = load_model(models, spec.model, spec.seeds.model)
        self.vocab = loaded.vocab
        self._folder = loaded.folder.path
        full = dict(export_state(loaded.model, loaded.plan))
        shapes = {name: tuple(t.shape) for name, t in full.items()}
        self._base_names = set(full)
        contract = spec.contract()
        plan = resolve(contract, shapes)
        if contract.adapter is not None:
            full |= initial(contract.adapter, shapes, spec.seeds.model)
        self.shapes = {name: tuple(t.shape) for name, t in full.items()}
        dims = dimensions(loaded.folder.config.to_dict())
        topology.check(grid, dims)
        self.layout = layout_of(grid, dims)
        self.sharding = Sharding(self.layout, self.shapes)
        self.sharding.check()
        self.settings = families.settings_of(loaded.folder.config)
        self._grid, self._rank = grid, rank
        self.dtype = compute_dtype(contract)
        self.rounded = Rounded(contract, self.sharding)
        self.recompute = spec.trainer.recompute == "layers"
        self.model, self.part, self.lora = self._built(full, contract.adapter)
        self.quantised = Quantised(self.model, contract, plan, self.part.shards)
        trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self.replicas = Replicas(self.sharding, rank.index)
        self.masters = Masters(trained, self.replicas, rank.index, spec.optimizer, self.rounded, groups)
        self.masters.send()
        for name, tensor in self.part.tensors.items():
            if name not in trained:
                tensor.copy_(self.rounded(name, tensor.float()))
        self.base: FrozenPart | None = None
        if self.lora is not None:
            held = {name: t for name, t in self.part.tensors.items() if name not in trained}
            self.base = FrozenPart(held, {name: full[name] for name in self._base_names})
        sparse = self.settings.get("moe_layer_freq", [0] * dims.layers)
        self.routers = Routers(self.model, sparse, self.layout.layers(rank.pp).start)
        self.reference: nn.Module | None = None
        if spec.loss.kl.coefficient > 0 and self.lora is None:
            self.reference, reference, _ = self._built(full, None)
            self.reference.requires_grad_(False)
            for name, tensor in reference.tensors.items():
                tensor.copy_(self.rounded(name, tensor.float()))

    def config_bytes(self) -> bytes:
        """The model folder's config.json."""
        return (self._folder / "config.json").read_bytes()

    def facts(self) -> ModelFacts:
        """What rank 0 tells of the model."""
        narrow = "bf16" if self.dtype == torch.bfloat16 else "fp32"
        return ModelFacts(
            shapes=self.shapes,
            trained=tuple(sorted(self.trained)),
            layout=self.layout,
            vocab=self.vocab,
            device=str(build.device()),
            dtype=narrow,
            values=f"{self.rounded.values} values in {narrow}",
            routed=(self.routers.layers, self.routers.topk, self.routers.experts),
        )

    def fixed(self) -> dict[str, Tensor]:
        """Buffers that belong to the model's state and are never trained; a frozen base's belong to it."""
        if self.base is not None:
            return {}
        own = dict(self.model.named_buffers())
        return {name: t for name, t in self.part.tensors.items() if name in own}

    @property
    def trained(self) -> set[str]:
        """Checkpoint names of what trains, anywhere."""
        return set(self.shapes) if self.lora is None else set(self.shapes) - self._base_names

    def agree_on_base(self) -> None:
        """Raise `BaseMoved` on every rank if any rank's part of the frozen base has changed."""
        moved = "" if self.base is None else self.base.moved()
        if self.base is None or not anywhere(bool(moved)):
            return
        raise BaseMoved(moved or "the frozen base has changed on another rank")

    @contextmanager
    def as_rollout(self) -> Iterator[None]:
        """Inside, the model is what rollout will hold of the present weights, and multiplies as rollout does."""
        low_bit = self.quantised.names
        with self.rounded.as_rollout(self.part.tensors, low_bit), self.quantised.as_rollout():
            yield

    @contextmanager
    def as_reference(self) -> Iterator[nn.Module]:
        """The reference policy: a model of its own, or, of a job with an adapter, the base without it."""
        if self.reference is not None:
            yield self.reference
            return
        assert self.lora is not None
        with self.lora.disabled():
            yield self.model

    def _built(
        self, full: dict[str, Tensor], adapter: Adapter | None
    ) -> tuple[nn.Module, LoadedPart, Lora | None]:
        model = build.build(
            self.settings, self._grid, self.dtype, self.layout.padded(self.vocab), self.recompute
        )
        shards = {shard.name: shard for shard in self.sharding.on(self._rank.index)}
        lora = None if adapter is None else Lora(model, adapter, shards)
        part = LoadedPart(model, self.sharding, self._rank.index)
        part.fill(full)
        return model, part, lora
