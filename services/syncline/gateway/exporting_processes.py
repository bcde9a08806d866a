"""Exports of a job as processes and folders: one is begun, looked at, and taken away.

What state an export is in is read from the disk, so that a gateway which replaces another one knows it too; only the
processes that this gateway started are held here, and they end with it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Literal

import msgspec

from syncline.contract.exported import (
    RECORD,
    ExportFailure,
    ExportProgress,
    ExportRecord,
    ExportRequest,
    parse_export_name,
)
from syncline.exporting.held import FOLDER
from syncline.runtime.durable import locked, write_whole
from syncline.runtime.settings import Settings

LOG = "export.log"


class ExportView(msgspec.Struct, frozen=True, kw_only=True):
    """An export of a job. `progress`: while it is made; `record`: once it is there; `reason`: why it is not."""

    name: str
    state: Literal["running", "ready", "failed", "interrupted"]
    progress: ExportProgress | None = None
    record: ExportRecord | None = None
    reason: str = ""


class Exporting:
    """The exports of this run root."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._running: dict[tuple[str, str], subprocess.Popen[bytes]] = {}

    def begin(self, request: ExportRequest) -> ExportView:
        """Start to make it, unless it is there or being made."""
        place = self._place(request.job)
        place.mkdir(parents=True, exist_ok=True)
        with self._lock:
            view = self.look(request.job, request.name)
            if view is not None and view.state in ("running", "ready"):
                return view
            write_whole(place / f"{request.name}.request.json", msgspec.json.encode(request))
            (place / f"{request.name}.failed.json").unlink(missing_ok=True)
            log = self._settings.job_dir(request.job) / "logs" / LOG
            log.parent.mkdir(exist_ok=True)
            with log.open("ab") as out:
                self._running[request.job, request.name] = subprocess.Popen(
                    [sys.executable, "-m", "syncline.exporting", request.job, request.name],
                    stdin=subprocess.PIPE,  # it ends when we do
                    stdout=out,
                    stderr=out,
                    env=self._settings.inherited(os.environ),
                )
        return ExportView(name=request.name, state="running", progress=ExportProgress(done=0, total=0))

    def look(self, job: str, name: str) -> ExportView | None:
        """How it stands with `name`, None: nobody asked for it."""
        place = self._place(job)
        process = self._running.get((job, name))
        alive = process is not None and process.poll() is None
        if not alive and process is not None:
            self._running.pop((job, name), None)
        record = place / name / RECORD
        if record.is_file():
            return ExportView(
                name=name,
                state="ready",
                record=msgspec.json.decode(record.read_bytes(), type=ExportRecord),
            )
        if alive or locked(place / f"{name}.lock"):
            return ExportView(name=name, state="running", progress=_progress(place / f"{name}.progress.json"))
        failed = place / f"{name}.failed.json"
        if failed.is_file():
            told = msgspec.json.decode(failed.read_bytes(), type=ExportFailure)
            return ExportView(name=name, state="failed", reason=told.reason)
        if (place / f"{name}.request.json").is_file():
            reason = f"the export did not come to its end; logs/{LOG} in the job's folder may say why"
            return ExportView(name=name, state="interrupted", reason=reason)
        return None

    def all(self, job: str) -> list[ExportView]:
        """All of `job`, by name."""
        place = self._place(job)
        names = sorted(p.name.removesuffix(".request.json") for p in place.glob("*.request.json"))
        found = [self.look(job, name) for name in names if parse_export_name(name) is not None]
        return [view for view in found if view is not None]

    def file(self, job: str, name: str, file: str) -> Path | None:
        """Where `file` of the whole export `name` lies, None: it has no such file."""
        view = self.look(job, name)
        if view is None or view.record is None:
            return None
        listed = {RECORD, *(one.name for one in view.record.files)}
        return self._place(job) / name / file if file in listed else None

    def remove(self, job: str, name: str) -> bool:
        """Take a whole export, or what is known of a failed one, away. False: there is none, or it is being made."""
        with self._lock:
            view = self.look(job, name)
            if view is None or view.state == "running":
                return False
            place = self._place(job)
            going = place / f".{name}.going"
            if (place / name).is_dir():
                shutil.rmtree(going, ignore_errors=True)
                (place / name).rename(going)  # at once, so that nobody reads half of it
                shutil.rmtree(going)
            for rest in ("request.json", "failed.json", "progress.json"):
                (place / f"{name}.{rest}").unlink(missing_ok=True)
        return True

    def _place(self, job: str) -> Path:
        return self._settings.job_dir(job) / FOLDER


def _progress(path: Path) -> ExportProgress:
    try:
        return msgspec.json.decode(path.read_bytes(), type=ExportProgress)
    except FileNotFoundError:  # nothing was written yet
        return ExportProgress(done=0, total=0)
