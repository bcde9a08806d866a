"""`python tests/chart/constraints.py > services/constraints.txt`: what this environment has of what an image needs."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = ("fast", "objects", "kubernetes")
HEAD = """\
# What the tests ran with: all that `syncline[fast,objects,kubernetes]` brings. tests/chart holds it to pyproject.toml;
# made by `python tests/chart/constraints.py`."""


def plain(name: str) -> str:
    """A project's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def own() -> list[Requirement]:
    """What pyproject.toml asks for, with the extras of the images."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [
        Requirement(text) for part in (project["dependencies"], *(extras[e] for e in EXTRAS)) for text in part
    ]


def versions() -> dict[str, str]:
    """Name and version of the distribution's dependencies, theirs included, under this environment's markers."""
    wanted = [(plain(one.name), frozenset(one.extras)) for one in own()]
    seen: dict[str, frozenset[str]] = {}
    found: dict[str, str] = {}
    while wanted:
        name, extras = wanted.pop()
        if name in seen and seen[name] >= extras:
            continue
        seen[name] = seen.get(name, frozenset()) | extras
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # what a marker of another platform brings, such as CUDA's libraries
        found[name] = distribution.version.partition("+")[0]
        for text in distribution.requires or ():
            requirement = Requirement(text)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in {"", *seen[name]}):
                wanted.append((plain(requirement.name), frozenset(requirement.extras)))
    return found


if __name__ == "__main__":
    print(HEAD)  # noqa: T201 - its purpose
    for name, version in sorted(versions().items()):
        print(f"{name}=={version}")  # noqa: T201
