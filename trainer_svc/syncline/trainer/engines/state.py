"""What a loaded torch engine holds: the model, its FP32 masters and the optimizer, and their way to disk.

Files are safetensors and JSON: nothing here is ever unpickled.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from syncline.contract.exports import CONFIG_FILE
from syncline.contract.job import OptimizerSpec
from syncline.contract.plan import PrecisionPlan
from syncline.reference.adapter import Adapters
from syncline.reference.model import LoadedModel, ModelFolder, TextCodec, named_windows, round_to_bf16
from syncline.runtime.durable import sync_file, sync_folder
from syncline.runtime.export_files import write_file
from syncline.trainer.engines.exporting import write_converted, write_wide
from syncline.trainer.engines.frozen import DIGEST, FrozenBase

WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"
Gathered = Callable[[str, Tensor], Tensor]


class Live:
    """A model under training. Parameter names are the model's own; tied parameters appear once.

    rounded    the model holds BF16 values of the masters; otherwise it holds the masters themselves
    gathered   (name, master) -> what reaches the model of it before it is rounded
    adapters   all that trains; everything else is the frozen base then: no masters, no gradients, no moments
    """

    def __init__(
        self,
        loaded: LoadedModel,
        optimizer: OptimizerSpec,
        rounded: bool,
        gathered: Gathered | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self.loaded = loaded
        self._gathered = gathered
        self._spec = optimizer
        self._rounded = rounded
        self._model = {name: p for name, p in loaded.model.named_parameters() if p.requires_grad}
        self.masters: dict[str, Tensor] = {
            name: nn.Parameter(p.detach().clone()) if rounded else p for name, p in self._model.items()
        }
        if rounded:
            round_to_bf16(loaded.model)
        if gathered is not None:
            self._round()
        self.optimizer = make_optimizer(list(self.masters.values()), optimizer)
        self.base = None if adapters is None else FrozenBase(loaded.model, adapters)

    # ---- one step ---------------------------------------------------------------------------------------
    def non_finite_gradients(self) -> list[str]:
        """Names of the gradients that hold NaN or infinity."""
        return [
            f"gradient of {name}"
            for name, p in self._model.items()
            if p.grad is not None and not bool(p.grad.isfinite().all())
        ]

    def non_finite_weights(self) -> list[str]:
        """Names of the master weights that hold NaN or infinity."""
        return [f"weight {name}" for name, p in self.masters.items() if not bool(p.isfinite().all())]

    def apply(self, update: int) -> float:
        """Clip, step number `update` (from 1), and round into the model. Returns the norm before clipping."""
        for name, p in self._model.items():
            self.masters[name].grad = None if p.grad is None else p.grad.float()
        norm = nn.utils.clip_grad_norm_(self.masters.values(), self._spec.clip_norm)
        rate = self._spec.lr * min(1.0, update / self._spec.warmup) if self._spec.warmup else self._spec.lr
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        for master in self.masters.values():
            master.grad = None
        self._round()
        return float(norm)

    def _round(self) -> None:
        if self._rounded:
            with torch.no_grad():
                for name, p in self._model.items():
                    value = self.masters[name]
                    p.copy_(
                        (value if self._gathered is None else self._gathered(name, value)).to(torch.bfloat16)
                    )

    @contextmanager
    def rounded_for_rollout(self, keep: Container[str] = ()) -> Iterator[None]:
        """The model holds BF16 values inside, except in tensors `keep`, and afterwards exactly what it held before."""
        if self._rounded:
            yield
            return
        every = dict(self.loaded.model.named_parameters())
        kept = {name: p.detach().clone() for name, p in every.items()}
        buffers = {name: b.clone() for name, b in self._buffers().items()}
        round_to_bf16(self.loaded.model, keep)
        try:
            yield
        finally:
            with torch.no_grad():
                for name, p in every.items():
                    p.copy_(kept[name])
                for name, b in self._buffers().items():
                    b.copy_(buffers[name])

    # ---- disk -------------------------------------------------------------------------------------------
    def write(self, folder: Path, durable: bool) -> None:
        """Masters, buffers, optimizer and random state into `folder`. `durable`: fsynced.

        Of a frozen base its digest alone.
        """
        weights = {f"parameter.{name}": p.detach() for name, p in self.masters.items()}
        weights |= self._fixed()
        save_file({k: v.contiguous() for k, v in weights.items()}, folder / WEIGHTS)
        save_file(self._optimizer_tensors() | {"rng.cpu": torch.get_rng_state()}, folder / OPTIMIZER)
        if durable:
            for name in (WEIGHTS, OPTIMIZER):
                sync_file(folder / name)

    def read(self, folder: Path) -> None:
        """Inverse of `write`. Raises `ValueError` naming the file and tensor; then nothing has changed."""
        weights = _read(folder / WEIGHTS)
        state = _read(folder / OPTIMIZER)
        targets = {f"parameter.{name}": p for name, p in self.masters.items()}
        targets |= self._fixed()
        _check(folder / WEIGHTS, weights, targets)
        if self.base is not None:
            self.base.refuse_other(folder / WEIGHTS, weights[DIGEST])
        moments = _moments(folder / OPTIMIZER, state, self.masters)
        with torch.no_grad():
            for name, target in targets.items():
                target.copy_(weights[name])
        for name, tensors in moments.items():
            self.optimizer.state[self.masters[name]] = tensors
        for name in self.masters.keys() - moments.keys():
            self.optimizer.state.pop(self.masters[name], None)
        torch.set_rng_state(state["rng.cpu"])
        self._round()

    def _fixed(self) -> dict[str, Tensor]:
        """What is kept beside the masters: buffers, or of a frozen base, whose they are, its digest."""
        if self.base is None:
            return {f"buffer.{name}": b for name, b in self._buffers().items()}
        return {DIGEST: self.base.check()}

    def _buffers(self) -> dict[str, Tensor]:
        """Persistent buffers: part of a checkpoint, never trained."""
        own = self.loaded.model.state_dict()
        return {name: b for name, b in self.loaded.model.named_buffers() if name in own}

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        out: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            for field, value in self.optimizer.state.get(master, {}).items():
                if isinstance(value, Tensor):  # plain SGD keeps a None here
                    out[f"{field}.{name}"] = value.contiguous()
        return out

    def export(
        self,
        folder: Path,
        dtype: torch.dtype,
        base: bool = True,
        plan: PrecisionPlan | None = None,
    ) -> dict[str, str]:
        """`model.safetensors` and `config.json` in the new `folder`. Returns file -> sha256 hex.

        base   False: the adapter alone, as `adapter.safetensors`
        plan   what is exported are the codes, scales and BF16 values that it makes of the base; None: wide values

        Raises `NotQuantizable` naming a weight that `plan` cannot make low-bit.
        """
        state, file = self.loaded.plan, "model.safetensors"
        if self.base is not None:
            self.base.check()
            adapters = self.base.adapters
            state = adapters.whole(state) if base else adapters.state
            file = file if base else "adapter.safetensors"
        folder.mkdir(parents=True)
        weights = named_windows(self.loaded.model, state)
        if plan is None or not base:
            files = {file: write_wide(folder / file, weights, dtype)}
        else:
            files = write_converted(folder, file, weights, dtype, plan)
        config = (self.loaded.folder.path / CONFIG_FILE).read_bytes()
        files[CONFIG_FILE] = write_file(folder / CONFIG_FILE, config)  # and the folder's names with it
        sync_folder(folder.parent)
        return files


class Sizes(NamedTuple):
    """Elements of an architecture. `per_rank`: of an adapter of rank 1 on every linear layer."""

    parameters: int
    per_rank: int


def import_code(folder: ModelFolder) -> Sizes:
    """Import all that the architecture needs, without memory for a single weight.

    So that the resident size before the first load is that of the code, and what sleep must return to.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            folder.config, trust_remote_code=False
        )
    TextCodec(folder.path)
    gc.collect()
    gc.freeze()  # what was imported lives for ever: looking through it at each sleep took 0.2 s
    linear = (m for m in model.modules() if isinstance(m, nn.Linear))
    return Sizes(
        sum(p.numel() for p in model.parameters()), sum(m.in_features + m.out_features for m in linear)
    )


def return_memory() -> None:
    """Give freed memory back to the system: collect cycles, then let the allocator release its free pages."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
    if trim is not None:
        trim(0)


def make_optimizer(masters: list[nn.Parameter] | list[Tensor], spec: OptimizerSpec) -> torch.optim.Optimizer:
    """The job's optimizer over `masters`."""
    match spec.name:
        case "adamw":
            return torch.optim.AdamW(masters, lr=spec.lr, betas=spec.betas, weight_decay=spec.weight_decay)
        case "sgd":
            return torch.optim.SGD(masters, lr=spec.lr, weight_decay=spec.weight_decay)


def _read(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no dict
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: {error}") from None


def _check(path: Path, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    for name in sorted(wanted.keys() | found.keys()):
        if name not in found or name not in wanted:
            raise ValueError(f"{path}: tensor {name} is {'missing' if name in wanted else 'unexpected'}")
        if found[name].shape != wanted[name].shape or found[name].dtype != wanted[name].dtype:
            raise ValueError(
                f"{path}: tensor {name} is {found[name].dtype} {list(found[name].shape)}, "
                f"the model has {wanted[name].dtype} {list(wanted[name].shape)}"
            )


def _moments(
    path: Path, state: Mapping[str, Tensor], masters: Mapping[str, Tensor]
) -> dict[str, dict[str, Tensor]]:
    """Optimizer tensors per parameter, checked. A parameter that never stepped has none."""
    out: dict[str, dict[str, Tensor]] = {}
    for key, tensor in state.items():
        if key == "rng.cpu":
            continue
        field, _, name = key.partition(".")
        if name not in masters:
            raise ValueError(f"{path}: tensor {key} is of no parameter of the model")
        if tensor.dim() and tensor.shape != masters[name].shape:
            raise ValueError(f"{path}: tensor {key} has shape {list(tensor.shape)}")
        out.setdefault(name, {})[field] = tensor.to(masters[name].device) if tensor.dim() else tensor
    if "rng.cpu" not in state:
        raise ValueError(f"{path}: tensor rng.cpu is missing")
    return out
