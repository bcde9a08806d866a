"""Settings: the environment of a process, read once at its start and by nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

DEFAULT_REDIS = "redis://127.0.0.1:6379/0"
NO_STORE = "none"  # SYNCLINE_TRACES of a process that keeps no span store
_SCHEMES = ("redis", "rediss", "unix")
_KEY_CHARACTERS = 16  # at least
OWN_SECRETS = ("SYNCLINE_TOKEN", "SYNCLINE_METRICS_TOKEN")
"""Variables with a secret of the gateway's own: no other process is handed them."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Where things are. A field that may be None is None when the environment does not name it."""

    redis_url: str = DEFAULT_REDIS
    runs: Path
    models: Path
    job: str | None = None
    worker: str | None = None
    port: int | None = None
    otlp: str | None = None
    host: str = "127.0.0.1"  # where the gateway listens, and sync where the transport needs that
    cache: Path | None = None  # where workers keep stores of their own; None: below the job's folder
    sglang: Path = Path(".venv-sglang/bin/python").absolute()  # interpreter of SGLang's own environment
    token: str | None = None  # bearer token of the gateway; not handed on by `environ()`
    metrics_token: str | None = (
        None  # bearer token that reads /metrics and nothing else; not handed on either
    )
    worker_start: float | None = (
        None  # seconds, for specs without limits.worker_start; None: as the spec's key says
    )
    tokens: Path | None = None  # digests of the tenants' tokens; None: `tokens.json` in the run root
    tls_cert: Path | None = None  # certificate chain of the gateway; None: it speaks plain HTTP
    tls_key: Path | None = None  # the certificate's private key
    health_host: str = "127.0.0.1"  # where /started, /health and /ready answer; in a pod, its address
    health_port: int | None = None  # None: that of `port`, unless the service itself listens there
    traces_file: Path | None = None  # span store; None: `traces.sqlite` in the run root
    traces_kept: bool = (
        True  # whether this process writes a span store of its own; SYNCLINE_TRACES=none: it does not
    )
    traces_to: str | None = (
        None  # a gateway that takes spans (0021): where this process sends its own, besides
    )
    traces_port: int | None = None  # where the gateway takes spans of other processes; None: it takes none
    traces_key: str | None = (
        None  # bearer of who writes spans there: sent by those processes, asked for by the gateway
    )
    traces_days: float = 90.0  # older spans leave the gateway's store; 0: of any age
    traces_mib: int = 4096  # beyond it the oldest spans leave the gateway's store; 0: of any size
    drain: float = 0.0  # seconds that a rollout worker which is told to stop gives to what runs
    launcher: str = "local"  # who makes the processes of jobs: "local" or "kubernetes"
    launcher_file: Path | None = None  # launcher.yaml (0017), which the kubernetes launcher needs

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Settings:
        """Settings from `environ` (normally `os.environ`). Paths are made absolute.

        An empty value counts as unset, but for a token: who sets one means to have one.
        Raises `ValueError` naming the variable for a value that cannot be right.
        """
        if environ.get("SYNCLINE_TOKEN") == "":
            raise ValueError("SYNCLINE_TOKEN is empty: give a token, or unset it to serve this machine alone")
        if environ.get("SYNCLINE_METRICS_TOKEN") == "":
            raise ValueError("SYNCLINE_METRICS_TOKEN is empty: give a token, or unset it")
        given = {name: value for name, value in environ.items() if value != ""}
        if ("SYNCLINE_TLS_CERT" in given) != ("SYNCLINE_TLS_KEY" in given):
            raise ValueError("SYNCLINE_TLS_CERT and SYNCLINE_TLS_KEY: give both, or neither")
        return cls(
            redis_url=_redis_url(given.get("SYNCLINE_REDIS_URL", DEFAULT_REDIS)),
            runs=Path(given.get("SYNCLINE_RUNS", "runs")).absolute(),
            models=Path(given.get("SYNCLINE_MODELS", "examples/models")).absolute(),
            job=given.get("SYNCLINE_JOB"),
            worker=given.get("SYNCLINE_WORKER") or _worker_of(given.get("SYNCLINE_REPLICA")),
            port=_port(given, "SYNCLINE_PORT"),
            otlp=_http_url(given, "OTEL_EXPORTER_OTLP_ENDPOINT"),
            host=given.get("SYNCLINE_HOST", "127.0.0.1"),
            cache=Path(given["SYNCLINE_CACHE"]).absolute() if "SYNCLINE_CACHE" in given else None,
            sglang=Path(given.get("SYNCLINE_SGLANG", ".venv-sglang/bin/python")).absolute(),
            token=given.get("SYNCLINE_TOKEN"),
            metrics_token=given.get("SYNCLINE_METRICS_TOKEN"),
            worker_start=_number(given, "SYNCLINE_WORKER_START", "0", "seconds") or None,
            tokens=_path(given.get("SYNCLINE_TOKENS")),
            tls_cert=_path(given.get("SYNCLINE_TLS_CERT")),
            tls_key=_path(given.get("SYNCLINE_TLS_KEY")),
            health_host=given.get("SYNCLINE_HEALTH_HOST", "127.0.0.1"),
            health_port=_port(given, "SYNCLINE_HEALTH_PORT"),
            **_traces(given),
            drain=_number(given, "SYNCLINE_DRAIN", "0", "seconds"),
            launcher=_launcher(given),
            launcher_file=_path(given.get("SYNCLINE_LAUNCHER_FILE")),
        )

    def environ(self) -> dict[str, str]:
        """The variables that make a child process read these same settings."""
        named = {
            "SYNCLINE_REDIS_URL": self.redis_url,
            "SYNCLINE_RUNS": str(self.runs),
            "SYNCLINE_MODELS": str(self.models),
            "SYNCLINE_JOB": self.job,
            "SYNCLINE_WORKER": self.worker,
            "SYNCLINE_PORT": None if self.port is None else str(self.port),
            "SYNCLINE_HOST": self.host,
            "SYNCLINE_SGLANG": str(self.sglang),
            "SYNCLINE_CACHE": None if self.cache is None else str(self.cache),
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.otlp,
            "SYNCLINE_WORKER_START": None if self.worker_start is None else f"{self.worker_start:g}",
            "SYNCLINE_TOKENS": _text(self.tokens),
            "SYNCLINE_TLS_CERT": _text(self.tls_cert),
            "SYNCLINE_TLS_KEY": _text(self.tls_key),
            "SYNCLINE_HEALTH_HOST": self.health_host,
            "SYNCLINE_TRACES": _text(self.traces_file) if self.traces_kept else NO_STORE,
            "SYNCLINE_TRACES_TO": self.traces_to,
            "SYNCLINE_TRACES_PORT": None if self.traces_port is None else str(self.traces_port),
            "SYNCLINE_TRACES_KEY": self.traces_key,
            "SYNCLINE_TRACES_DAYS": f"{self.traces_days:g}",
            "SYNCLINE_TRACES_MIB": str(self.traces_mib),
            "SYNCLINE_DRAIN": f"{self.drain:g}",
            "SYNCLINE_LAUNCHER": self.launcher,
            "SYNCLINE_LAUNCHER_FILE": _text(self.launcher_file),
        }
        return {name: value for name, value in named.items() if value is not None}

    def inherited(self, given: Mapping[str, str]) -> dict[str, str]:
        """A child's environment: `given` without the gateway's own secrets, under these settings."""
        return {name: value for name, value in given.items() if name not in OWN_SECRETS} | self.environ()

    def job_dir(self, job: str) -> Path:
        """The folder of `job` under the run root. Raises `ValueError` for a name that is not a job id."""
        if not job.isalnum() or not job.isascii():
            raise ValueError(f"job id {job!r} is not of the form j0123456789")
        return self.runs / job

    def own_dir(self, job: str, worker: str) -> Path:
        """A folder for what `worker` of `job` alone uses. Raises `ValueError` for a name that cannot be a folder's."""
        if not worker.isalnum() or not worker.isascii():
            raise ValueError(f"worker {worker!r} is not of the form w0")
        folder = self.job_dir(job)
        return (folder / "workers" if self.cache is None else self.cache / job) / worker

    @property
    def secrets(self) -> tuple[Path, ...]:
        """Places that user code has no business with: all runs, keys, and a Redis that answers on a socket."""
        url = urlsplit(self.redis_url)
        socket = Path(url.path) if url.scheme == "unix" else None
        given = (self.cache, self.tls_cert, self.tls_key, socket)
        return (self.runs, self.token_store, *(path for path in given if path is not None))

    @property
    def token_store(self) -> Path:
        """The file with the digests of the tenants' tokens."""
        return self.runs / "tokens.json" if self.tokens is None else self.tokens

    @property
    def traces(self) -> Path:
        """The span store that all processes of this run root share."""
        return self.traces_file or self.runs / "traces.sqlite"

    @property
    def traces_written(self) -> Path | None:
        """The span store that this process writes; None: it keeps none."""
        return self.traces if self.traces_kept else None

    @property
    def traces_sent(self) -> tuple[str, str] | None:
        """URL and key of the gateway that takes this process's spans; None: none does."""
        return (
            None if self.traces_to is None or self.traces_key is None else (self.traces_to, self.traces_key)
        )


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text).absolute()


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _redis_url(text: str) -> str:
    if urlsplit(text).scheme not in _SCHEMES:
        raise ValueError(
            f"SYNCLINE_REDIS_URL {text!r} must begin with one of {', '.join(s + '://' for s in _SCHEMES)}"
        )
    return text


def _http_url(given: Mapping[str, str], name: str) -> str | None:
    text = given.get(name)
    if text is not None and urlsplit(text).scheme not in ("http", "https"):
        raise ValueError(f"{name} {text!r} must begin with http:// or https://")
    return text


def _traces(given: Mapping[str, str]) -> dict[str, Any]:
    """What `given` says of the span store, and of a gateway that takes spans. The key is never shown."""
    key, kept = given.get("SYNCLINE_TRACES_KEY"), given.get("SYNCLINE_TRACES") != NO_STORE
    takes = given.get("SYNCLINE_TRACES_PORT")
    for name in ("SYNCLINE_TRACES_TO", "SYNCLINE_TRACES_PORT"):
        if name in given and key is None:
            raise ValueError(
                f"{name} is set, and SYNCLINE_TRACES_KEY is not: spans are taken from who has it"
            )
    if key is not None and (
        len(key) < _KEY_CHARACTERS or not key.isascii() or not key.isprintable() or " " in key
    ):
        raise ValueError(
            f"SYNCLINE_TRACES_KEY must have at least {_KEY_CHARACTERS} printable ASCII characters and no space"
        )
    for name in OWN_SECRETS:
        if key is not None and key == given.get(name):
            raise ValueError(f"SYNCLINE_TRACES_KEY is {name}: who writes spans must not be who reads")
    if takes is not None and not kept:
        raise ValueError(
            "SYNCLINE_TRACES is none: a gateway that takes spans (SYNCLINE_TRACES_PORT) keeps them"
        )
    mib = given.get("SYNCLINE_TRACES_MIB", "4096")
    if not mib.isdecimal():
        raise ValueError(f"SYNCLINE_TRACES_MIB {mib!r} must be a whole number of MiB, or 0")
    return {
        "traces_file": _path(given.get("SYNCLINE_TRACES")) if kept else None,
        "traces_kept": kept,
        "traces_to": _http_url(given, "SYNCLINE_TRACES_TO"),
        "traces_port": _port(given, "SYNCLINE_TRACES_PORT"),
        "traces_key": key,
        "traces_days": _number(given, "SYNCLINE_TRACES_DAYS", "90", "days"),
        "traces_mib": int(mib),
    }


def _port(given: Mapping[str, str], name: str) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    if not text.isdecimal() or int(text) > 65535:
        raise ValueError(f"{name} {text!r} must be a port number from 0 (any) to 65535")
    return int(text)


def _number(given: Mapping[str, str], name: str, default: str, unit: str) -> float:
    text = given.get(name, default)
    if not text.replace(".", "", 1).isdecimal():
        raise ValueError(f"{name} {text!r} must be {unit}, as in 10 or 0.5")
    return float(text)


def _worker_of(replica: str | None) -> str | None:
    """The worker that the pod of a StatefulSet with this name is: its ordinal's."""
    if replica is None:
        return None
    ordinal = replica.rpartition("-")[2]
    if not ordinal.isdecimal():
        raise ValueError(f"SYNCLINE_REPLICA {replica!r} must end with an ordinal, as in rollout-0")
    return f"w{ordinal}"


def _launcher(given: Mapping[str, str]) -> str:
    name = given.get("SYNCLINE_LAUNCHER", "local")
    if name not in ("local", "kubernetes"):
        raise ValueError(f"SYNCLINE_LAUNCHER {name!r} must be local or kubernetes")
    if name == "kubernetes" and "SYNCLINE_LAUNCHER_FILE" not in given:
        raise ValueError(
            "SYNCLINE_LAUNCHER_FILE is not set: the kubernetes launcher reads how pods are made there"
        )
    return name
