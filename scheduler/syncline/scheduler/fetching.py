"""The files of an export, from a gateway to a folder here or to an object store. Each is checked by its sha256.

A folder appears under its name when it is whole. Until then its files lie in `.NAME.part` beside it, and the next try
goes on with what is there. In an object store `export.json` comes last: without it there is no export.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from syncline.contract.exported import RECORD
from syncline.scheduler.cli_session import Failure
from syncline.scheduler.client import Client

Shown = Callable[[int, int], None]
"""Bytes done, bytes in all."""


class Target(Protocol):
    """Where an export goes. `address`: as people name it."""

    address: str

    def refuse_taken(self) -> None:
        """Raises `ValueError` if something is there already."""
        ...

    def fetch(self, client: Client, path: str, record: dict[str, Any], shown: Shown) -> None:
        """Bring all files of the export at `path`, whose record is `record`. Raises `Failure` for wrong bytes."""
        ...


def target_of(output: str) -> Target:
    """The target that `output` names: an address with a scheme, or a folder."""
    return Objects(output) if "://" in output else Folder(Path(output))


def listed(record: dict[str, Any]) -> list[tuple[str, int, str]]:
    """(name, bytes, sha256) of each file that the record lists; the record itself is not among them."""
    return [(file["name"], file["nbytes"], file["sha256"]) for file in record["files"]]


class Folder:
    """A new folder on this machine."""

    def __init__(self, folder: Path) -> None:
        self.address = str(folder)
        self._folder = folder
        self._part = folder.with_name(f".{folder.name}.part")

    def refuse_taken(self) -> None:
        if self._folder.exists():
            raise ValueError(f"--output {self._folder} is there already: nothing is written over it")

    def fetch(self, client: Client, path: str, record: dict[str, Any], shown: Shown) -> None:
        self._part.mkdir(parents=True, exist_ok=True)
        files = listed(record)
        total, done = sum(nbytes for _, nbytes, _ in files), 0
        for name, nbytes, sha256 in files:
            self._file(client, f"{path}/files/{name}", name, nbytes, sha256)
            done += nbytes
            shown(done, total)
        (self._part / RECORD).write_bytes(b"".join(client.chunks(f"{path}/files/{RECORD}")))
        wanted = {RECORD, *(name for name, _, _ in files)}
        for stray in [p for p in self._part.rglob("*") if p.is_file()]:
            if stray.relative_to(self._part).as_posix() not in wanted:
                stray.unlink()  # of another try, at another export
        self.refuse_taken()
        self._part.rename(self._folder)

    def _file(self, client: Client, path: str, name: str, nbytes: int, sha256: str) -> None:
        place = self._part / name
        place.parent.mkdir(parents=True, exist_ok=True)
        have = place.stat().st_size if place.is_file() else 0
        if have > nbytes:
            place.unlink()
            have = 0
        if have < nbytes or not nbytes:
            with place.open("ab") as file:
                for chunk in client.chunks(path, have):
                    file.write(chunk)
        with place.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != sha256:
            place.unlink()  # so that the next try starts afresh
            raise Failure(f"{name} has sha256 {found}, the export's record says {sha256}; try again")


class Objects:
    """An address that fsspec knows, such as s3://bucket/name."""

    def __init__(self, address: str) -> None:
        self.address = address
        try:
            import fsspec
        except ImportError:
            raise ValueError(
                f"--output {address}: addresses need the extra `objects`: pip install 'syncline[objects]'"
            ) from None
        self._files, self._root = fsspec.core.url_to_fs(address)

    def refuse_taken(self) -> None:
        if self._files.exists(f"{self._root}/{RECORD}"):
            raise ValueError(f"--output {self.address} holds an export already: nothing is written over it")

    def fetch(self, client: Client, path: str, record: dict[str, Any], shown: Shown) -> None:
        files = listed(record)
        total, done = sum(nbytes for _, nbytes, _ in files), 0
        self._files.makedirs(self._root, exist_ok=True)
        for name, _, sha256 in files:
            digest = hashlib.sha256()
            self._files.makedirs(f"{self._root}/{name}".rpartition("/")[0], exist_ok=True)
            with self._files.open(f"{self._root}/{name}", "wb") as file:
                for chunk in client.chunks(f"{path}/files/{name}"):
                    digest.update(chunk)
                    file.write(chunk)
                    done += len(chunk)
                    shown(done, total)
            if digest.hexdigest() != sha256:
                raise Failure(f"{name} has sha256 {digest.hexdigest()}, the export's record says {sha256}")
        with self._files.open(f"{self._root}/{RECORD}", "wb") as file:
            file.write(b"".join(client.chunks(f"{path}/files/{RECORD}")))
