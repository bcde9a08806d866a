"""`docs/keys.md` from the table in `streams.py`: `python -m syncline.contract.keys_page > docs/keys.md`."""

from __future__ import annotations

import sys

from syncline.contract.streams import KEYS

_HEAD = """# Redis keys

Generated from `contract/streams.py` by `python -m syncline.contract.keys_page`. Job keys carry the job id as a hash
tag; when a job ends, all of them get the spec's `retention.hours` to live.

| key | kind | written by | read by | ends | what it is |
|---|---|---|---|---|---|
"""


def page() -> str:
    """The whole page. Ids stand as `ID`, job ids as `JOB`."""
    ids = {"global": "", "job": "JOB", "id": "ID"}
    rows = (
        f"| `{key.at(ids[key.scope])}` | {key.kind} | {', '.join(key.writers)} | {', '.join(key.readers)} "
        f"| {key.ends} | {key.says} |\n"
        for key in KEYS
    )
    return _HEAD + "".join(rows)


if __name__ == "__main__":
    sys.stdout.write(page())
