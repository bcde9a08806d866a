"""A process that converts one export and prints what memory it took: `python peak_memory.py FOLDER FORMAT THREADS`.

Counted is anonymous memory (`RssAnon`): what the process allocated, and not the files that it has mapped. A thread
reads it every millisecond, beginning after a first conversion of a small export has paid for code and kernels.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from exports import write
from shard_exports import config_of
from sharded import DENSE, model

from syncline.contract.precision import Family, PrecisionContract
from syncline.contract.schemes import SCHEMES
from syncline.runtime.store import BlobStore
from syncline.sync.convert import convert
from syncline.sync.export import Export
from syncline.sync.source import source_of

SMALL = model(DENSE, vocab=64, width=128, ffn=256, hidden=128)
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def contract_of(name: str) -> PrecisionContract:
    if name == "bf16":
        return PrecisionContract(name="wide")
    fuse = FUSED if name == "nvfp4" else ()
    family = Family(name="low", match=("*_proj.weight",), weight=SCHEMES[name], fuse=fuse)
    return PrecisionContract(name="low", families=(family,))


def anonymous() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


class Watch:
    """Highest value of `anonymous` while it is open."""

    def __enter__(self) -> Watch:
        self.start = self.peak = anonymous()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._over.wait(0.001):
            self.peak = max(self.peak, anonymous())

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def main(folder: Path, name: str, threads: int) -> None:
    contract = contract_of(name)
    with tempfile.TemporaryDirectory() as beside:
        small = {n: np.ones(shape, "<f4") for n, shape in SMALL.items()}
        files = write(Path(beside) / "e", dict(small), config_of(DENSE))
        convert(
            Export(Path(beside) / "e", files), contract, BlobStore(Path(beside) / "store"), threads=threads
        )
    files = json.loads((folder.parent / "files.json").read_text())
    export = Export(folder, files)
    with tempfile.TemporaryDirectory(dir=folder.parent) as store, Watch() as watch:
        source = source_of(export, contract)
        began = time.perf_counter()
        done = convert(source, contract, BlobStore(Path(store)), threads=threads)
        seconds = time.perf_counter() - began
    rows = [(t.name, t.digest) for t in done.tensors]
    sys.stdout.write(
        json.dumps(
            {
                "extra": watch.peak - watch.start,
                "largest": max(fact.nbytes for fact in source.facts().values()),
                "total": sum(fact.nbytes for fact in source.facts().values()),
                "seconds": seconds,
                "tensors": hashlib.sha256(json.dumps(rows).encode()).hexdigest(),
            }
        )
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
