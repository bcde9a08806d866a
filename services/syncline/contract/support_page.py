"""`docs/support-matrix.md`: `python -m syncline.contract.support_page > docs/support-matrix.md`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from syncline.contract.support import lookup
from syncline.contract.support_rules import (
    FORMATS,
    FRAMEWORKS,
    HARDWARE,
    MODELS,
    PATHS,
    RULES,
    FormatName,
    Framework,
    Kernel,
    ModelFamily,
    Path,
)

_HEAD = """# Support matrix

Generated from `contract/support_matrix.toml` by `python -m syncline.contract.support_page`. It decides at submit how a
job's precision contract runs on `device.hardware`: natively, as an emulation that has a name, or not at all.

Each cell says how, on what evidence, and by which rule below.

- **run**: tests of this repository run it. **read**: its vendor or its source says so. **unproven**: neither.
- `decoded`: low-bit weights are decoded and meet wide activations. `qdq`: dequantised operands in a wide GEMM.
  `codes`: codes and scales of both operands. `bytes`: storage; nothing is multiplied.
- rollout, fprop, dgrad, wgrad and sync are the paths of one RL update; `-`: there is none.
"""
_TITLES: dict[Framework, str] = {
    "reference": "Reference engines (torch)",
    "sglang": "SGLang (rollout)",
    "transformer_engine": "Megatron with Transformer Engine (trainer)",
}
Row = tuple[int, ...]


def page() -> str:
    """The whole page."""
    parts = [_HEAD]
    for framework in FRAMEWORKS:
        header = "| format | kernel | path | model | " + " | ".join(HARDWARE) + " |\n"
        parts.append(f"\n## {_TITLES[framework]}\n\n{header}|{'---|' * (4 + len(HARDWARE))}\n")
        parts.extend(_rows(framework))
    parts.append("\n## Rules\n\n")
    for number, rule in enumerate(RULES, 1):
        source = f" ({rule.source})" if rule.source else ""
        parts.append(f"{number}. {rule.says}{source}\n")
    return "".join(parts)


def _rows(framework: Framework) -> Iterator[str]:
    """Formats and paths whose cells are the same share a row."""
    shared: dict[tuple[Kernel, tuple[Path, ...], tuple[ModelFamily, ...], Row], list[FormatName]] = {}
    for name in FORMATS:
        for kernel, paths in _uses(framework, name):
            same: dict[tuple[tuple[tuple[ModelFamily, ...], Row], ...], list[Path]] = {}
            for path in paths:
                same.setdefault(tuple(_by_model(framework, name, kernel, path)), []).append(path)
            for by_model, alike in same.items():
                for models, numbers in by_model:
                    shared.setdefault((kernel, tuple(alike), models, numbers), []).append(name)
    for (kernel, together, models, numbers), names in shared.items():
        told = "all" if len(models) == len(MODELS) else ", ".join(models)
        cells = " | ".join(map(_cell, numbers))
        yield f"| {', '.join(names)} | {kernel} | {', '.join(together)} | {told} | {cells} |\n"


def _uses(framework: Framework, name: FormatName) -> Iterator[tuple[Kernel, tuple[Path, ...]]]:
    """Kernels that a contract can ask of a format, and in which paths of this framework."""
    gemms = tuple(path for path in PATHS if path not in ("rollout", "sync"))
    samples, trains = framework != "transformer_engine", framework != "sglang"
    multiplies: tuple[Path, ...] = (*(("rollout",) if samples else ()), *(gemms if trains else ()))
    match name:
        case "wide":
            yield "wide", multiplies
        case "kv_fp8_e4m3":
            if samples:
                yield "bytes", ("rollout",)
        case _:
            for kernel in ("decoded", "qdq", "codes"):
                yield kernel, multiplies
            yield "bytes", ("sync",)


def _by_model(
    framework: Framework, name: FormatName, kernel: Kernel, path: Path
) -> Iterator[tuple[tuple[ModelFamily, ...], Row]]:
    found: dict[Row, list[ModelFamily]] = {}
    for model in MODELS:
        rules = (lookup(framework, hardware, name, kernel, path, model) for hardware in HARDWARE)
        found.setdefault(tuple(RULES.index(rule) + 1 for rule in rules), []).append(model)
    for numbers, families in found.items():
        yield tuple(families), numbers


def _cell(number: int) -> str:
    rule = RULES[number - 1]
    how = "-" if rule.how == "none" else rule.how
    return f"{how}, {rule.evidence} ({number})"


if __name__ == "__main__":
    sys.stdout.write(page())
