"""The spec's table `transfer`: what cannot work is refused under its key; a process loads what its kind needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from transport_rig import JOB, KEY

from syncline.contract.spec_text import SpecError, parse_json
from syncline.transport.kinds import pulling

BASE = '{"name": "t", "model": {"name": "tiny-dense"}, "limits": {"activation_wait": 60}, "transfer": %s}'


def test_a_table_is_not_needed() -> None:
    spec = parse_json(BASE % "{}")
    assert (spec.transfer.kind, spec.transfer.deltas) == ("files", False)


@pytest.mark.parametrize(
    ("table", "path"),
    [
        ('{"kind": "objects", "timeout": 20}', "transfer.url"),
        ('{"kind": "objects", "timeout": 20, "url": "bucket/folder"}', "transfer.url"),
        ('{"kind": "http", "timeout": 20, "url": "http://x"}', "transfer.url"),
        ('{"url": "s3://bucket"}', "transfer.url"),
        ('{"deltas": true}', "transfer.deltas"),
        ('{"kind": "http", "timeout": 30}', "transfer.timeout"),
        ('{"kind": "group"}', "transfer.timeout"),
        ('{"kind": "torrent"}', "transfer.kind"),
        ('{"bucket_mb": 0}', "transfer.bucket_mb"),
        ('{"token": "x"}', "transfer.token"),
    ],
)
def test_a_contradiction_is_refused_by_its_key(table: str, path: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_json(BASE % table)
    assert [problem.path for problem in refused.value.problems] == [path]


def test_an_address_that_nothing_knows_is_refused_by_its_key(tmp_path: Path) -> None:
    spec = parse_json(BASE % '{"kind": "objects", "timeout": 20, "url": "nowhere://bucket"}')
    with pytest.raises(ValueError, match=r"transfer\.url 'nowhere://bucket'"):
        pulling(spec.transfer, tmp_path, tmp_path, JOB, "w0", KEY)


def loaded(table: str, folder: Path) -> set[str]:
    """Which of the large modules a process has that serves this table."""
    program = """
import sys
from pathlib import Path
from syncline.contract.job import TransferSpec
from syncline.transport.kinds import offering
offering(TransferSpec.model_validate_json(sys.argv[1]), Path(sys.argv[2]), "j0", b"k", "127.0.0.1").close()
print(*({"torch", "fsspec", "numpy"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, table, str(folder)], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("extra", "kind", "has", "lacks"),
    [
        ("", "files", set(), {"torch", "fsspec"}),
        ("", "http", set(), {"torch", "fsspec"}),
        ("", "group", {"torch"}, set()),
        (', "url": "memory://x"', "objects", {"fsspec"}, {"torch"}),
    ],
)
def test_a_process_loads_what_its_kind_needs(
    tmp_path: Path, extra: str, kind: str, has: set[str], lacks: set[str]
) -> None:
    table = f'{{"kind": "{kind}"{extra}}}'
    found = loaded(table, tmp_path)
    assert has <= found
    assert not lacks & found
