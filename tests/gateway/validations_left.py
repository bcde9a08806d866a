"""A validation that ended before this gateway began."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from syncline.contract.validation import PAGE, REPORT, Check, Report, Result, ValidationRequest
from syncline.runtime import validations


def write_validation(job_folder: Path) -> str:
    """Its number. One figure is no number, which JSON has no word for."""
    request = validations.begin(
        job_folder,
        lambda number: ValidationRequest(
            job=job_folder.name, number=number, levels=(1,), why="asked", spec="{}", at=time.time()
        ),
    )
    check = Check(name="scores", found=float("inf"), bound=1.0, source="a test")
    report = Report(
        recipe="bf16",
        model="tiny",
        contract="c",
        seed=0,
        results=(Result(level=1, checks=(check,), seconds=0.1),),
    )
    place = validations.folder_of(job_folder, request.number)
    (place / PAGE).write_text("<!doctype html>")
    (place / REPORT).write_bytes(msgspec.json.encode(report))
    return str(request.number)
