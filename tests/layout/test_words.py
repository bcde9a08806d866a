"""The house's words and rules that a machine can check."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PORTIONS = ("services", "rollout_svc", "trainer_svc", "sync_svc", "scheduler", "lab")
SOURCES = sorted(f for portion in PORTIONS for f in (ROOT / portion).rglob("*.py"))

SYNONYMS = re.compile(
    r"\b(episode|staleness_bound|policy_version|weight_version|off_policyness)\w*\b", re.IGNORECASE
)


def test_the_six_nouns_have_no_synonyms() -> None:
    """Names in code use trajectory, span, version, manifest, lag, placement and nothing else for them."""
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Name | ast.arg):
                continue
            name = node.id if isinstance(node, ast.Name) else node.arg
            if SYNONYMS.search(name):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {name}")
    assert not found


def test_only_service_catches_everything() -> None:
    """`except Exception` (or bare) stands in runtime/service.py alone; one that only cleans up and re-raises may."""
    found = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler) and path.name != "service.py":
                names = (
                    {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)}
                    if node.type
                    else {"Exception"}
                )
                cleans_up = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
                if names & {"Exception", "BaseException"} and not cleans_up:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found


def test_nothing_is_unpickled() -> None:
    banned = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
    found = []
    # SGLang takes tensors over HTTP in no other form: it is written there, and nothing is read
    written = ROOT / "rollout_svc/syncline/rollout/engines/sglang/buckets.py"
    assert not {"load", "loads", "Unpickler", "_Unpickler"} & {
        node.attr for node in ast.walk(ast.parse(written.read_text())) if isinstance(node, ast.Attribute)
    }
    for path in SOURCES:
        text = path.read_text()
        if path == written:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import) and banned & {a.name.split(".")[0] for a in node.names}:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in banned:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
        if "torch.load(" in text:
            found.append(f"{path.relative_to(ROOT)}: torch.load")
    assert not found


def test_no_utils_folder() -> None:
    assert [f for f in SOURCES if {"utils", "util", "helpers", "common"} & set(f.with_suffix("").parts)] == []


def test_redis_keys_are_written_in_streams_py_alone() -> None:
    """A literal key outside streams.py would be one that nobody can find."""
    found = []
    for path in SOURCES:
        if path.name == "streams.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and node.value.startswith("syncline:{")
            ):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not found
