"""Checkpoints: a folder that is whole, or is not a checkpoint.

`checkpoints/update-000010/` holds the engine's files and `MANIFEST.json`, which names each file's sha256 and
commits everything that must move together: weights, optimizer, random state, the number of updates, the
epoch, spec, contract, the ledger cursor and what comes next. It is written beside its place, fsynced,
and renamed; the manifest is its last file. Nothing in it is ever unpickled.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from syncline.contract.version_path import VersionId
from syncline.runtime.durable import sync_file, sync_folder, write_whole

MANIFEST = "MANIFEST.json"
_NAME = re.compile(r"update-(\d{6,})")


class WrongCheckpoint(ValueError):
    """A whole checkpoint of another job spec or precision contract. It is refused, never adapted."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a checkpoint commits together."""

    job: str
    version: VersionId  # the weights in it; `number` is the updates made
    spec_hash: str
    contract: str
    engine: str
    next_update: int  # the first update that it does not contain
    since: int  # updates that the previous checkpoint contained: records of later ones could be in the ledger
    cursor: str  # id of the newest entry of `trajectories` whose effect it contains; "0": none
    files: dict[str, str]  # name -> sha256 hex


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The newest whole checkpoint, and what was passed over on the way to it: folder name -> why."""

    path: Path | None
    manifest: Manifest | None
    skipped: dict[str, str]


class Checkpoints:
    """The checkpoints of one job, in `folder` (made if absent).

    require   raises if this process may not write any more; asked before a checkpoint is put into its place
    """

    def __init__(
        self,
        folder: Path,
        job: str,
        spec_hash: str,
        contract: str,
        keep: int,
        require: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder = folder
        self._require = require
        self._job, self._spec_hash, self._contract = job, spec_hash, contract
        self._keep = keep
        folder.mkdir(parents=True, exist_ok=True)

    def save(
        self, write: Callable[[Path], None], version: VersionId, engine: str, since: int, cursor: str
    ) -> Path:
        """Make the checkpoint of `version`; `write` puts the engine's files into the folder it is given.

        Returns its path once it is on disk. A whole one of the same update is left as it is.
        """
        final = self.folder / f"update-{version.number:06d}"
        if final.is_dir() and self._why_not(final) == "":
            return final
        for left in self.folder.glob(
            ".update-*.part"
        ):  # by a writer that died, or is frozen and has a successor
            shutil.rmtree(left, ignore_errors=True)
        part = self.folder / f".{final.name}.{secrets.token_hex(4)}.part"
        part.mkdir()
        write(part)
        manifest = Manifest(
            job=self._job,
            version=version,
            spec_hash=self._spec_hash,
            contract=self._contract,
            engine=engine,
            next_update=version.number + 1,
            since=since,
            cursor=cursor,
            files={path.name: sync_file(path) for path in sorted(part.iterdir())},
        )
        write_whole(part / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
        sync_folder(part)
        self._require()
        shutil.rmtree(final, ignore_errors=True)  # a broken one of the same update
        part.rename(final)
        sync_folder(self.folder)
        self._prune()
        return final

    def newest(self) -> Found:
        """The newest whole one. Raises `WrongCheckpoint` if that one is of another spec or contract."""
        skipped: dict[str, str] = {}
        for path in reversed(self._folders()):
            why = self._why_not(path)
            if why:
                skipped[path.name] = why
                continue
            manifest = _manifest(path)
            self._refuse_foreign(path, manifest)
            return Found(path=path, manifest=manifest, skipped=skipped)
        return Found(path=None, manifest=None, skipped=skipped)

    def _folders(self) -> list[Path]:
        found = [path for path in self.folder.iterdir() if _NAME.fullmatch(path.name)]
        return sorted(found, key=lambda path: int(path.name.split("-")[1]))

    def _why_not(self, path: Path) -> str:
        """Why `path` is no whole checkpoint, "" if it is one. Reads every byte."""
        if not (path / MANIFEST).is_file():
            return f"it has no {MANIFEST}"
        try:
            manifest = _manifest(path)
        except msgspec.MsgspecError as error:
            return f"{MANIFEST}: {error}"
        for name, digest in manifest.files.items():
            if not (path / name).is_file():
                return f"{name} is missing"
            with (path / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    return f"{name} is not the file that was saved"
        return ""

    def _refuse_foreign(self, path: Path, manifest: Manifest) -> None:
        for what, theirs, ours in (
            ("job", manifest.job, self._job),
            ("spec", manifest.spec_hash, self._spec_hash),
            ("precision contract", manifest.contract, self._contract),
        ):
            if theirs != ours:
                raise WrongCheckpoint(
                    f"{path.name} belongs to {what} {theirs[:12]}, this job has {ours[:12]}"
                )

    def _prune(self) -> None:
        """Drop what is older than the newest `keep` whole ones. A broken one counts for nothing."""
        whole = [path for path in reversed(self._folders()) if self._why_not(path) == ""]
        oldest_kept = whole[: self._keep][-1:]
        for path in self._folders():
            if oldest_kept and path.name < oldest_kept[0].name:
                shutil.rmtree(path)


def _manifest(path: Path) -> Manifest:
    return msgspec.json.decode((path / MANIFEST).read_bytes(), type=Manifest)


# ---- epochs ------------------------------------------------------------------------------------------------
class _Epoch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    epoch: int


def next_epoch(folder: Path, known: int) -> int:
    """Take the epoch of this start: one higher than any that was ever taken, 0 the first time. Durable.

    known   the highest epoch that anybody else remembers, -1 for none
    """
    path = folder / "epoch.json"
    taken = known
    if path.is_file():
        taken = max(taken, msgspec.json.decode(path.read_bytes(), type=_Epoch).epoch)
    write_whole(path, msgspec.json.encode(_Epoch(taken + 1)))
    return taken + 1
