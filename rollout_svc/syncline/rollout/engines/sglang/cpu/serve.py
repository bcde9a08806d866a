"""`python serve.py <arguments of sglang.launch_server>`: an SGLang server that ends with the process that started it.

The first line of its standard input is the key that every endpoint asks for: a command line and an environment can be
read from outside. Once that input is closed, the server and all its processes end.

On a machine with CUDA no shim is applied. Without CUDA, SGLang 0.5.23 from PyPI starts only with these:

    torchvision     its CUDA operators cannot be loaded beside a CPU torch: two schemas are declared instead
    sgl_kernel      there is no CPU build: names resolve, and each raises `NotImplementedError` when it is called
    pinned memory   asked for by the LoRA backend and the cache of routed experts: plain memory instead
    fp8 and mxfp8   the CPU path asserts AMX: weights are dequantised in each call, activations stay wide. An emulation:
                    it shows that loaders and bytes are right, and nothing about speed or activation rounding

Without CUDA, SGLang's processes are forked: what is done at import is there already. With it they are spawned and
import this file anew.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any


class MissingKernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Resolves `sgl_kernel` to a module whose every function raises. It has no submodules: SGLang does without them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "sgl_kernel":
            return None
        return importlib.machinery.ModuleSpec(fullname, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return types.ModuleType(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__dict__["__version__"] = "0.0.0"
        module.__dict__["__getattr__"] = functools.partial(_missing, module.__name__)


def _missing(module: str, name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{module}.{name} has no CPU build")

    return absent


def _declare_torchvision(torch: Any) -> Any:
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def _unpin(torch: Any) -> None:
    """Constructors take `pin_memory` and ignore it. Only in the server: elsewhere it would break model loading."""

    def plain(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def made(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("pin_memory", None)
            return make(*args, **kwargs)

        return made

    for name in ("tensor", "empty", "zeros", "ones", "full", "arange", "empty_like", "zeros_like"):
        setattr(torch, name, plain(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    import sglang.srt.mem_cache.pool_host.common as host

    host._cuda_host_register = lambda *args, **kwargs: None


def _values(torch: Any, codes: Any, scales: Any, block: Sequence[int], dtype: Any) -> Any:
    """Codes [.., N, K] under scales [.., ceil(N/block 0), ceil(K/block 1)], FP32 or E8M0 exponents, as values."""
    factors = torch.exp2(scales.float() - 127) if scales.dtype == torch.uint8 else scales
    n, k = codes.shape[-2:]
    wide = factors.repeat_interleave(block[0], -2)[..., :n, :].repeat_interleave(block[1], -1)[..., :k]
    return (codes.float() * wide).to(dtype)


def _dequantise_fp8(torch: Any) -> None:
    import sglang.srt.layers.quantization.fp8 as fp8
    import sglang.srt.model_executor.model_runner as runner
    import sglang.srt.server_args as server_args
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    def linear(self: Any, layer: Any, x: Any, bias: Any = None) -> Any:
        block = self.quant_config.weight_block_size
        weight = _values(torch, layer.weight, layer.weight_scale_inv, block, x.dtype)
        return torch.nn.functional.linear(x, weight, bias)

    def experts(self: Any, layer: Any, dispatch_output: Any) -> Any:
        block, x = self.quant_config.weight_block_size, dispatch_output.hidden_states
        seen = types.SimpleNamespace(num_experts=layer.num_experts)
        seen.w13_weight = _values(torch, layer.w13_weight, layer.w13_weight_scale_inv, block, x.dtype)
        seen.w2_weight = _values(torch, layer.w2_weight, layer.w2_weight_scale_inv, block, x.dtype)
        made = moe_forward_native(seen, x, dispatch_output.topk_output, self.moe_runner_config)
        return StandardCombineInput(hidden_states=made)

    # activations stay wide here, so they may be FP32
    wide = [torch.bfloat16, torch.float16, torch.float32]
    fp8.Fp8Config.get_supported_act_dtypes = lambda *args: wide
    fp8.Fp8LinearMethod.process_weights_after_loading = lambda self, layer: None
    fp8.Fp8LinearMethod.apply = linear
    fp8.Fp8MoEMethod.process_weights_after_loading = lambda self, layer: None
    fp8.Fp8MoEMethod.apply = experts
    # the list holds CUDA runners alone; any of them is put in the place of one that is not on it
    server_args.add_mxfp8_moe_runner_backend_choices(["triton"])
    # pads for tensor parallelism, which one process has none of, and refuses blocks that are not square
    runner.adjust_config_with_unaligned_cpu_tp = lambda config, *args, **kwargs: config


def _fork() -> None:
    """SGLang spawns its processes, and each imports torch and SGLang again: that is most of a start without CUDA.

    A fork has them already. Nothing that a fork would break is there yet: no CUDA context, no thread of torch's.
    """
    import multiprocessing

    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda *args, **kwargs: None


def _prepare() -> None:
    """Apply the shims where there is no CUDA. The folder of this file is no place to import from."""
    own = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != own]
    import torch

    if torch.cuda.is_available():
        return
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
    sys.meta_path.insert(0, MissingKernels())
    _KEPT.append(_declare_torchvision(torch))
    import sglang.srt.managers.scheduler  # noqa: F401

    _unpin(torch)
    _dequantise_fp8(torch)
    _fork()


def _log_no_key() -> None:
    """SGLang logs its settings when it starts, the keys among them."""
    from sglang.srt.entrypoints import engine

    logged = engine._server_args_for_logging
    engine._server_args_for_logging = lambda args: {
        name: "hidden" if name.endswith("api_key") else value for name, value in logged(args).items()
    }


_KEPT: list[Any] = []  # a library's declarations end with it


def _first_line() -> str:
    """Up to the line's end and no further: the rest is `_end_with_parent`'s. Raises `SystemExit` if there is none."""
    line = b""
    while not line.endswith(b"\n"):
        line += os.read(0, 1) or sys.exit("the first line of standard input must be the server's key")
    return line.decode().strip() or sys.exit("the server's key is empty")


def _end_with_parent() -> None:
    """The parent holds the other end of standard input: once it is closed, the whole group goes."""
    while os.read(0, 4096):
        pass
    os.killpg(os.getpgid(0), signal.SIGKILL)


if __name__ in ("__main__", "__mp_main__"):
    _prepare()

if __name__ == "__main__":
    key = _first_line()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    _log_no_key()
    # in one word each: a key may begin with a dash
    run_server(prepare_server_args([*sys.argv[1:], f"--api-key={key}", f"--admin-api-key={key}"]))
