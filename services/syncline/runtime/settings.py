"""Settings: the environment of a process, read once at its start and by nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

DEFAULT_REDIS = "redis://127.0.0.1:6379/0"
_SCHEMES = ("redis", "rediss", "unix")


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
    tokens: Path | None = None  # digests of the tenants' tokens; None: `tokens.json` in the run root
    tls_cert: Path | None = None  # certificate chain of the gateway; None: it speaks plain HTTP
    tls_key: Path | None = None  # the certificate's private key
    health_host: str = "127.0.0.1"  # where /started, /health and /ready answer; in a pod, its address
    health_port: int | None = None  # None: that of `port`, unless the service itself listens there
    traces_file: Path | None = None  # span store; None: `traces.sqlite` in the run root
    drain: float = 0.0  # seconds that a rollout worker which is told to stop gives to what runs
    launcher: str = "local"  # who makes the processes of jobs: "local" or "kubernetes"
    launcher_file: Path | None = None  # launcher.yaml (0017), which the kubernetes launcher needs

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Settings:
        """Settings from `environ` (normally `os.environ`). Paths are made absolute.

        An empty value counts as unset, but for the token: who sets one means to have one.
        Raises `ValueError` naming the variable for a value that cannot be right.
        """
        if environ.get("SYNCLINE_TOKEN") == "":
            raise ValueError("SYNCLINE_TOKEN is empty: give a token, or unset it to serve this machine alone")
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
            otlp=_http_url(given.get("OTEL_EXPORTER_OTLP_ENDPOINT")),
            host=given.get("SYNCLINE_HOST", "127.0.0.1"),
            cache=Path(given["SYNCLINE_CACHE"]).absolute() if "SYNCLINE_CACHE" in given else None,
            sglang=Path(given.get("SYNCLINE_SGLANG", ".venv-sglang/bin/python")).absolute(),
            token=given.get("SYNCLINE_TOKEN"),
            tokens=_path(given.get("SYNCLINE_TOKENS")),
            tls_cert=_path(given.get("SYNCLINE_TLS_CERT")),
            tls_key=_path(given.get("SYNCLINE_TLS_KEY")),
            health_host=given.get("SYNCLINE_HEALTH_HOST", "127.0.0.1"),
            health_port=_port(given, "SYNCLINE_HEALTH_PORT"),
            traces_file=_path(given.get("SYNCLINE_TRACES")),
            drain=_seconds(given, "SYNCLINE_DRAIN"),
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
            "SYNCLINE_TOKENS": _text(self.tokens),
            "SYNCLINE_TLS_CERT": _text(self.tls_cert),
            "SYNCLINE_TLS_KEY": _text(self.tls_key),
            "SYNCLINE_HEALTH_HOST": self.health_host,
            "SYNCLINE_TRACES": _text(self.traces_file),
            "SYNCLINE_DRAIN": f"{self.drain:g}",
            "SYNCLINE_LAUNCHER": self.launcher,
            "SYNCLINE_LAUNCHER_FILE": _text(self.launcher_file),
        }
        return {name: value for name, value in named.items() if value is not None}

    def inherited(self, given: Mapping[str, str]) -> dict[str, str]:
        """A child's environment: `given` without the token, which is nobody else's, under these settings."""
        return {name: value for name, value in given.items() if name != "SYNCLINE_TOKEN"} | self.environ()

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


def _http_url(text: str | None) -> str | None:
    if text is not None and urlsplit(text).scheme not in ("http", "https"):
        raise ValueError(f"OTEL_EXPORTER_OTLP_ENDPOINT {text!r} must begin with http:// or https://")
    return text


def _port(given: Mapping[str, str], name: str) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    if not text.isdecimal() or int(text) > 65535:
        raise ValueError(f"{name} {text!r} must be a port number from 0 (any) to 65535")
    return int(text)


def _seconds(given: Mapping[str, str], name: str) -> float:
    text = given.get(name, "0")
    if not text.replace(".", "", 1).isdecimal():
        raise ValueError(f"{name} {text!r} must be seconds, as in 10 or 0.5")
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
