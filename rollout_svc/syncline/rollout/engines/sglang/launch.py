"""The launch plan of a server, and the life of one server process.

The process runs `cpu/serve.py` with the interpreter of SGLang's own environment: it ends with this process, because
that file watches its standard input, whose other end is held here; the server's key goes that way too.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from syncline.contract.compile import CannotCompile
from syncline.contract.compile.sglang import adapted, sglang_flags
from syncline.contract.plan import PrecisionPlan
from syncline.contract.precision import Hardware, PrecisionContract
from syncline.contract.sglang_rules import EXPERTS_ON_CPU, TP_ON_CPU
from syncline.rollout.engines.sglang.client import Server, ServerGone

SCRIPT = Path(__file__).parent / "cpu" / "serve.py"
_PORTS = range(20_000, 32_000)  # below those that Linux gives away by itself
START = 300.0  # seconds a server may take until it answers
_CPU = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    # an idle scheduler would otherwise keep a core busy with looking for requests
    *("--max-total-tokens", "16384", "--sleep-on-idle"),
    # of the machine's free memory, which others take from while the server starts; the tokens bound what it takes
    *("--mem-fraction-static", "0.5"),
)
_ON_CPU = ("fp8_block", "mxfp8")


class LaunchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What a server is started with, for a local process or a pod; where it listens and what it loads is added then.

    quantization, adapter   for the checkpoint's config.json and for `adapter_config.json`
    wide                    dtype of its wide parameters, "float32" or "bfloat16"
    tp                      ranks that the model is cut over
    cuda                    the weights lie on GPUs, and are hashed there
    saves_memory            weights can be given back without ending the process
    emulations              what is emulated on this hardware, by name
    """

    arguments: tuple[str, ...]
    env: dict[str, str]
    quantization: dict[str, Any] | None
    adapter: dict[str, Any] | None
    wide: str
    tp: int
    cuda: bool
    saves_memory: bool
    emulations: tuple[str, ...]
    caveats: tuple[str, ...]


def plan_launch(
    contract: PrecisionContract,
    plan: PrecisionPlan,
    hardware: Hardware,
    max_running: int,
    experts: bool,
    tp: int = 1,
) -> LaunchPlan:
    """Raises `CannotCompile` naming the contract's key that SGLang, or SGLang on this hardware, has no setting for."""
    settings = sglang_flags(contract, plan, tp)
    arguments = list(settings.flags)
    if contract.compute == "fp32":
        arguments[arguments.index("--dtype") + 1] = "float32"
    wide = arguments[arguments.index("--dtype") + 1]
    emulations: tuple[str, ...] = ()
    if hardware == "cpu":
        emulations = _check_cpu(contract, plan, tp)
        arguments += _CPU
        if any(family.weight.format == "mxfp8" for family in contract.families):
            # the default for MXFP8 is a CUDA runner, for whose sake experts are loaded with up before gate
            arguments += ["--moe-runner-backend", "triton"]
        if contract.adapter is not None:
            arguments += ["--lora-backend", "torch_native"]
    else:
        arguments.append("--enable-memory-saver")
    if contract.adapter is not None:
        arguments.append("--lora-strict-loading")
        # old, new, and the base's own place
        arguments[arguments.index("--max-loras-per-batch") + 1] = "3"
    if experts:
        arguments.append("--enable-return-routed-experts")
    arguments += ["--max-running-requests", str(max_running)]
    return LaunchPlan(
        arguments=tuple(arguments),
        env=dict(settings.env),
        quantization=settings.quantization_config,
        adapter=settings.adapter_config,
        wide=wide,
        tp=tp,
        cuda=hardware != "cpu",
        saves_memory=hardware != "cpu",
        emulations=emulations,
        caveats=settings.caveats,
    )


def _check_cpu(contract: PrecisionContract, plan: PrecisionPlan, tp: int) -> tuple[str, ...]:
    if tp > 1:
        raise CannotCompile("rollout.sglang.tp", TP_ON_CPU)
    experts = [name for name in adapted(contract, plan) if ".experts." in name]
    if experts:
        raise CannotCompile("adapter.targets", f"{experts[0]}: {EXPERTS_ON_CPU}")
    if contract.rollout.kv_cache != "wide":
        raise CannotCompile("rollout.kv_cache", f"{contract.rollout.kv_cache!r}: SGLang on CPU keeps it wide")
    told: list[str] = []
    for i, family in enumerate(contract.families):
        name = family.weight.format
        if name not in _ON_CPU:
            raise CannotCompile(f"families.{i}.weight.format", f"SGLang has no kernel for {name} on CPU")
        told.append(f"{name} weights dequantised in each call, activations wide")
    return tuple(dict.fromkeys(told))


class ServerProcess:
    """One local server, started when it is first needed and again after it died. Driven by one thread at a time.

    python   interpreter of SGLang's environment
    folder   model folder that gives the architecture; weights begin as noise, under no version
    log      file that its output is appended to
    """

    def __init__(self, python: Path, plan: LaunchPlan, folder: Path, log: Path) -> None:
        self.plan = plan
        self.starts = 0
        self._python, self._folder, self._log = python, folder, log
        self._process: subprocess.Popen[bytes] | None = None
        self._server: Server | None = None

    @property
    def alive(self) -> bool:
        """Whether its process runs, be it ready or not."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self.alive else None

    @property
    def server(self) -> Server:
        """The server's interface. Raises `ServerGone` where there is none."""
        if self._server is None or not self.alive:
            raise ServerGone("the SGLang server does not run")
        return self._server

    def start(self) -> None:
        """Start it if it does not run. Does not wait. Raises `ValueError` where SGLang's environment is missing."""
        if self.alive:
            return
        if not self._python.is_file():
            raise ValueError(f"{self._python} is missing: `make sglang-venv` makes SGLang's environment")
        self.stop()
        port, key = _free_port(), secrets.token_urlsafe(32)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as out:
            self._process = subprocess.Popen(
                self._command(port),
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=_environment(self.plan.env),
                start_new_session=True,
            )
        if self._process.stdin is None:
            raise RuntimeError("the server has no standard input")
        with contextlib.suppress(BrokenPipeError):  # it has ended already: `wait` says so
            self._process.stdin.write(key.encode() + b"\n")
            self._process.stdin.flush()
        self._server = Server(f"http://127.0.0.1:{port}", key)
        self.starts += 1

    def _command(self, port: int) -> list[str]:
        own = ("--host", "127.0.0.1", "--port", str(port), "--model-path", str(self._folder))
        return [
            *(str(self._python), "-u", str(SCRIPT)),
            *self.plan.arguments,
            *own,
            *("--load-format", "dummy", "--weight-version", "none"),
        ]

    def wait(self, seconds: float = START) -> Server:
        """Wait until it answers. Raises `ServerGone` if it ends first or takes longer; then it is stopped."""
        until = time.monotonic() + seconds
        while self.alive and time.monotonic() < until:
            if self.server.ready():
                return self.server
            time.sleep(0.25)
        state = "did not answer in time" if self.alive else "ended while it started"
        self.stop()
        raise ServerGone(f"the SGLang server {state}: see {self._log.name}\n{self._tail()}")

    def stop(self) -> None:
        """End the process and all that it started."""
        process, self._process = self._process, None
        if self._server is not None:
            self._server.close()
            self._server = None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):  # all of it is gone already
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines() if self._log.is_file() else []
        return "\n".join(lines[-8:])


def _free_port() -> int:
    """One that nobody listens on, and that the system gives to nobody who asks for any: the server needs ten seconds
    until it listens, and somebody else would hear its key."""
    while True:
        port = _PORTS.start + secrets.randbelow(len(_PORTS))
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    """This process's environment, without what would lead the server to this project's packages, or is our own."""
    ours = ("PYTHONPATH", "VIRTUAL_ENV")
    held = {k: v for k, v in os.environ.items() if k not in ours and not k.startswith("SYNCLINE_")}
    return {**held, "HF_HUB_OFFLINE": "1", **more}
