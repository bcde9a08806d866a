"""Stand-ins for what megatron-core 0.16.1 asks of CUDA, applied only where there is none.

Each is one small function with the place that needs it. On a machine with CUDA `apply` does nothing. What they cannot
show: ordering between streams, NCCL, fused kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch._dynamo as dynamo

_FACTORIES = frozenset({"zeros", "tensor", "ones", "empty", "full", "arange", "rand", "randn"})
_applied: list[str] = []


def apply() -> tuple[str, ...]:
    """Apply every stand-in once per process, unless there is CUDA. Returns the names of those in force."""
    if not torch.cuda.is_available() and not _applied:
        dynamo.config.disable = True  # megatron-core compiles small functions: 20 s for nothing on CPU
        for name, shim in SHIMS.items():
            shim()
            _applied.append(name)
    return tuple(_applied)


def _current_device() -> None:
    """RoPE, router, mappings, point-to-point buffers: `device=torch.cuda.current_device()`."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]


def _synchronize() -> None:
    """Point-to-point sends (p2p_communication.py:398) and distributed checkpoints wait for the device."""
    torch.cuda.synchronize = lambda *_: None


def _streams() -> None:
    """The all-to-all dispatcher makes a side stream (token_dispatcher.py:445)."""

    class Stream:
        def __init__(self, *_: Any, **__: Any) -> None: ...
        def wait_stream(self, *_: Any) -> None: ...
        def wait_event(self, *_: Any) -> None: ...
        def synchronize(self) -> None: ...
        def record_event(self, *_: Any) -> Stream:
            return self

    one = Stream()
    torch.cuda.Stream = Stream  # type: ignore[assignment,misc]
    torch.cuda.current_stream = lambda *_: one  # type: ignore[assignment]
    torch.cuda.default_stream = lambda *_: one  # type: ignore[assignment]


def _gemm() -> None:
    """0.16.1 names `te_general_gemm` without defining it where Transformer Engine is absent (moe_utils.py:1192)."""
    import megatron.core.transformer.moe.moe_utils as moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def _split_sizes() -> None:
    """The all-to-all dispatcher makes split sizes numbers only if they lie on a GPU (mappings.py:444)."""
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    def moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.detach().numpy() if torch.is_tensor(tensor) and as_numpy else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = moved


def _latent_attention() -> None:
    """`HAVE_TE` stays true there without Transformer Engine (multi_latent_attention.py:185)."""
    import megatron.core.transformer.multi_latent_attention as multi_latent_attention

    multi_latent_attention.HAVE_TE = False


def _device_names() -> None:
    """`device="cuda"` in schedules.py: its name `torch` becomes one whose factories read that as "cpu"."""
    import megatron.core.pipeline_parallel.schedules as schedules
    import megatron.core.transformer.moe.moe_utils as moe_utils

    for module in (schedules, moe_utils):
        module.torch = _Torch("torch")


class _Torch(ModuleType):
    def __getattr__(self, name: str) -> Any:
        value = vars(torch)[name] if name in vars(torch) else torch.__getattr__(name)
        if name not in _FACTORIES:
            return value

        @functools.wraps(value)
        def made(*args: Any, **kwargs: Any) -> Any:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return value(*args, **kwargs)

        return made


def _tensor_cuda() -> None:
    """A tied embedding on the last stage moves to the GPU by name (language_module.py:244)."""
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]


def _recompute() -> None:
    """Running a layer again keeps and restores CUDA's random state (tensor_parallel/random.py:55)."""
    import megatron.core.tensor_parallel.random as random

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


SHIMS: dict[str, Callable[[], None]] = {
    "current_device": _current_device,
    "synchronize": _synchronize,
    "streams": _streams,
    "gemm": _gemm,
    "split_sizes": _split_sizes,
    "latent_attention": _latent_attention,
    "device_names": _device_names,
    "tensor_cuda": _tensor_cuda,
    "recompute": _recompute,
}
