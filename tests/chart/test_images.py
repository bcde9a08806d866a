"""Dockerfiles, as far as they can be judged without an engine: nothing here builds an image.

They are linted, parsed with the parser that Docker itself uses, and held to the house's rules.
"""

from __future__ import annotations

import fnmatch
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import dockerfile
import pytest
import yaml
from chart_tools import ROOT, ran
from constraints import own

BASE = ROOT / "services" / "Dockerfile"
SERVICES = {
    "gateway": ROOT / "services" / "syncline" / "gateway" / "Dockerfile",
    "errands": ROOT / "services" / "syncline" / "errands" / "Dockerfile",
    "scheduler": ROOT / "scheduler" / "Dockerfile",
    "rollout": ROOT / "rollout_svc" / "Dockerfile",
    "trainer": ROOT / "trainer_svc" / "Dockerfile",
    "sync": ROOT / "sync_svc" / "Dockerfile",
}
ALL = {"base": BASE, **SERVICES}


def hadolint(path: Path) -> tuple[int, str]:
    return ran(Path(sys.executable).with_name("hadolint"), path)


def stages(path: Path) -> list[list[dockerfile.Command]]:
    """The commands of each stage, FROM first; ARG before the first FROM is left out."""
    found: list[list[dockerfile.Command]] = []
    for command in dockerfile.parse_file(str(path)):
        if command.cmd.upper() == "FROM":
            found.append([command])
        elif found:
            found[-1].append(command)
    return found


def value(stage: list[dockerfile.Command], name: str) -> dockerfile.Command:
    """The last such command of a stage, which is the one that counts."""
    found = [command for command in stage if command.cmd.upper() == name]
    assert found, f"no {name}"
    return found[-1]


@pytest.mark.parametrize("name", ALL)
def test_lint(name: str) -> None:
    code, said = hadolint(ALL[name])
    assert (code, said) == (0, "")


def test_the_linter_judges(tmp_path: Path) -> None:
    bad = tmp_path / "Dockerfile"
    bad.write_text("FROM debian\nRUN apt-get install curl\nCMD python -m x\n")
    code, said = hadolint(bad)
    assert code == 1
    assert {"DL3006", "DL3008", "DL3025"} <= set(re.findall(r"DL\d+", said))


@pytest.mark.parametrize("name", SERVICES)
def test_each_stage_runs_its_service_as_nobody(name: str) -> None:
    for stage in stages(SERVICES[name]):
        entry, user = value(stage, "ENTRYPOINT"), value(stage, "USER")
        assert entry.json, "exec form"
        assert list(entry.value) == ["/usr/bin/tini", "--", "python", "-m", f"syncline.{name}"]
        assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user.value[0]), (
            "a number, so that runAsNonRoot can be checked"
        )
        assert value(stage, "FROM").value[0] == "${BASE}"


def test_the_base_is_pinned_and_nobody() -> None:
    build, final = stages(BASE)
    assert value(final, "USER").value == ("10001:10001",)
    assert value(final, "ENTRYPOINT").json
    text = BASE.read_text()
    image = re.search(r"^ARG PYTHON_IMAGE=(\S+)$", text, re.M)
    assert image is not None
    assert re.fullmatch(r"docker\.io/library/python:3\.\d+\.\d+-slim-[a-z]+", image[1])
    assert {value(build, "FROM").value[0], value(final, "FROM").value[0]} == {"${PYTHON_IMAGE}"}


def test_the_services_of_the_code_have_an_image_each() -> None:
    processes = {path.parent.name for path in ROOT.glob("*/syncline/*/__main__.py")}
    assert processes - {"exporting", "lab"} == set(SERVICES)


def test_pythons_paths_are_of_the_base() -> None:
    """The version in a path and in the image are one."""
    text = BASE.read_text()
    image = re.search(r"python:(3\.\d+)\.", text)
    assert image is not None
    assert set(re.findall(r"lib/python(3\.\d+)/", text)) == {image[1]}


def test_what_is_copied_is_there_and_not_ignored() -> None:
    rules = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert rules[0] == "*", "what is not named stays out"
    named = {line[1:] for line in rules if line.startswith("!")}
    for path in ALL.values():
        for command in dockerfile.parse_file(str(path)):
            if command.cmd.upper() == "COPY" and not command.flags:
                for source in command.value[:-1]:
                    assert (ROOT / source).exists(), source
                    assert any(source == name or source.startswith(f"{name}/") for name in named), source


@pytest.mark.parametrize(
    "secret", [".env", "runs/tokens.json", ".git/config", ".venv/bin/python", "tests/x.py"]
)
def test_nothing_else_enters_the_context(secret: str) -> None:
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert not [
        rule for rule in rules if fnmatch.fnmatch(secret, rule[1:]) or secret.startswith(f"{rule[1:]}/")
    ]


def test_every_portion_of_the_package_is_in_the_image() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    copied = {c.value[0] for c in dockerfile.parse_file(str(BASE)) if c.cmd.upper() == "COPY" and not c.flags}
    assert set(build["dev-mode-dirs"]) <= copied


def constraints() -> dict[str, str]:
    lines = (ROOT / "services" / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def test_constraints_fit_the_ranges() -> None:
    """Each dependency of the image has one version, inside the range of pyproject.toml."""
    pinned = constraints()
    for requirement in own():
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        assert name in pinned, f"{name}: run python tests/chart/constraints.py > services/constraints.txt"
        assert requirement.specifier.contains(pinned[name]), f"{name} {pinned[name]}"


def test_torch_is_the_one_of_the_tests() -> None:
    text = BASE.read_text()
    assert f"ARG TORCH=torch=={constraints()['torch']}\n" in text
    assert f"TORCH ?= torch=={constraints()['torch']}\n" in (ROOT / "Makefile").read_text()


def test_chart_and_compose_name_the_user_of_the_image() -> None:
    chart = yaml.safe_load((ROOT / "helm" / "syncline" / "values.yaml").read_text())
    assert chart["security"] == {"uid": 10001}
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    assert services["gateway"]["user"] == "10001:10001"


def test_the_shell_in_the_images_is_sound() -> None:
    """`bash -n` over each RUN, as far as a shell can say without running it."""
    for path in ALL.values():
        for command in dockerfile.parse_file(str(path)):
            if command.cmd.upper() == "RUN":
                done = subprocess.run(["bash", "-n"], input=command.value[0], text=True, capture_output=True)
                assert done.returncode == 0, f"{path}: {done.stderr}"


def context(target: Path) -> None:
    """What the base's build stage copies, as git has it."""
    for command in stages(BASE)[0]:
        if command.cmd.upper() == "COPY":
            for source in command.value[:-1]:
                listed = subprocess.run(
                    ["git", "ls-files", "-z", source], cwd=ROOT, capture_output=True, text=True, check=True
                )
                for name in filter(None, listed.stdout.split("\0")):
                    place = target / (Path(source).name if name == source else name)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    place.write_bytes((ROOT / name).read_bytes())


@pytest.mark.long
def test_the_package_builds_from_the_context_alone(tmp_path: Path) -> None:
    """The step of the build that can be done here: a wheel of what is copied, with all files of the packages."""
    context(tmp_path / "context")
    code, said = ran(
        sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, tmp_path / "context"
    )
    assert code == 0, said
    (wheel,) = tmp_path.glob("*.whl")
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("syncline/")}
    portions = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["dev-mode-dirs"]
    wanted = {
        path.relative_to(tmp_path / "context" / portion).as_posix()
        for portion in portions
        for path in (tmp_path / "context" / portion / "syncline").rglob("*")
        if path.is_file()
    }
    assert wanted - inside == set()
    assert len(wanted) > 300
