"""The tree is as DESIGN section 3 says, and the two traps of a namespace package stay shut."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PORTIONS = ("services", "rollout_svc", "trainer_svc", "sync_svc", "scheduler", "lab")
PACKAGES = sorted(
    init.parent for portion in PORTIONS for init in (ROOT / portion / "syncline").rglob("__init__.py")
)


def test_no_portion_hides_the_others() -> None:
    """An `__init__.py` beside a portion's packages would turn the namespace into one regular package."""
    assert [p for p in PORTIONS if (ROOT / p / "syncline" / "__init__.py").exists()] == []


def test_editable_install_exposes_every_portion() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert sorted(build["dev-mode-dirs"]) == sorted(PORTIONS)
    assert sorted(build["targets"]["wheel"]["packages"]) == sorted(f"{p}/syncline" for p in PORTIONS)


@pytest.mark.parametrize(
    "package", ["contract", "runtime", "gateway", "rollout", "trainer", "sync", "scheduler", "lab"]
)
def test_every_package_is_found(package: str) -> None:
    assert importlib.util.find_spec(f"syncline.{package}") is not None


@pytest.mark.parametrize("package", PACKAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_every_package_has_a_constitution(package: Path) -> None:
    """`__init__.py` says in prose what may live there and what may not."""
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    assert "may live here" in text.lower(), (
        f"{package.relative_to(ROOT)}/__init__.py: say what may live there"
    )
    assert "may not" in text.lower(), f"{package.relative_to(ROOT)}/__init__.py: say what may not live there"


BLOCK = """
import importlib, pkgutil, sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in {'torch', 'transformers'}:
            raise ModuleNotFoundError(f'{name} is absent', name=name)
sys.meta_path.insert(0, Absent())
for package in sys.argv[1:]:
    root = importlib.import_module(package)
    for module in pkgutil.walk_packages(root.__path__, package + '.'):
        if not module.name.endswith('.__main__'):
            importlib.import_module(module.name)
assert 'torch' not in sys.modules
"""


LINT_A_COPY = """
import sys
portions = sys.argv[1:]
names = tuple(p.rsplit('/', 1)[1] for p in portions)
sys.path = portions + [p for p in sys.path if not p.rstrip('/').endswith(names)]
from importlinter.cli import lint_imports
sys.exit(lint_imports(no_cache=True))
"""


@pytest.mark.parametrize(
    "package", ["contract", "runtime", "environments", "gateway", "scheduler", "errands"]
)
def test_imports_with_torch_absent(package: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCK, f"syncline.{package}"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_imports_run_one_way() -> None:
    """The import-linter contracts of pyproject.toml hold."""
    script = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([script], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_planted_upward_import_is_caught(tmp_path: Path) -> None:
    """The law has teeth: a copy of the tree in which the contract imports a service fails."""
    copy = tmp_path / "tree"
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, tracked.stdout.split("\0")):
        if name.startswith(PORTIONS) or name == "pyproject.toml":
            target = copy / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    planted = copy / "services" / "syncline" / "contract" / "lag.py"
    planted.write_text(planted.read_text() + "\nimport syncline.scheduler.machine\n")
    done = subprocess.run(
        [sys.executable, "-c", LINT_A_COPY, *(str(copy / p) for p in PORTIONS)],
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "syncline.contract" in done.stdout


def test_test_modules_have_names_of_their_own() -> None:
    """Suites share one import path: of two modules with one name, one suite would get the other's."""
    names = [path.stem for path in (ROOT / "tests").rglob("*.py") if path.stem != "conftest"]
    assert sorted(names) == sorted(set(names))
