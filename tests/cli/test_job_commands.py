"""What goes wrong is told in a line with the key or id; listings are JSON when asked."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import Here

from syncline.scheduler.cli_paths import why_not

SPEC = """
name = "words"
[model]
name = "tiny-dense"
[task]
environment = "characters"
[schedule]
updates = 3
"""


def write(folder: Path, text: str, name: str = "spec.toml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (SPEC + "updatez = 4\n", ("schedule.updatez", "updates")),
        (SPEC + "updates = 4\n", ("updates", "more than once")),
        (SPEC.replace("3", '"3"'), ("schedule.updates",)),
        (SPEC + "[batch]\ngroup_size = 1\n", ("batch.group_size", "at least 2")),
        (SPEC + "mode = 'disjoint'\nmax_lag = 0\n", ("schedule.max_lag",)),
        ("name = ", ("is not TOML",)),
    ],
)
def test_a_wrong_spec_is_refused_before_anything_starts(
    here: Here, tmp_path: Path, text: str, wanted: tuple[str, ...]
) -> None:
    for command in ("run", "submit"):
        said = here.fails(2, command, write(tmp_path, text))
        for part in wanted:
            assert part in said, said
    assert not (here.runs / "up.json").exists()


def test_files_that_are_no_spec(here: Here, tmp_path: Path) -> None:
    assert "No such file" in here.fails(2, "submit", str(tmp_path / "absent.toml"))
    assert ".toml or .json" in here.fails(2, "submit", write(tmp_path, SPEC, "spec.yaml"))


def test_a_spec_that_is_no_regular_file_is_refused_at_once(here: Here) -> None:
    folder, pipe, listening = (here.runs / f"{name}.toml" for name in ("folder", "pipe", "socket"))
    folder.mkdir()
    os.mkfifo(pipe)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(listening))
        for path, kind in ((folder, "a directory"), (pipe, "a pipe"), (listening, "a socket")):
            assert f"{path}: is {kind}; a spec is a regular file" in here.fails(2, "run", str(path))


def test_commands_without_an_installation_say_how_to_start_one(here: Here, tmp_path: Path) -> None:
    assert "syncline up" in here.fails(1, "submit", write(tmp_path, SPEC))
    assert "syncline up" in here.fails(1, "cancel", "latest")


def test_bad_ids_and_settings_are_named(here: Here) -> None:
    assert "JOB-GROUP-INDEX" in here.fails(2, "trace", "nonsense")
    assert "SYNCLINE_PORT 'many'" in here.fails(2, "list", SYNCLINE_PORT="many")
    assert "no gateway answers at http://127.0.0.1:9" in here.fails(1, "--url", "http://127.0.0.1:9", "list")
    assert here.cli("trace", "j0-0-0", "--token", "-1").returncode == 2
    assert here.cli("switch", "latest", "sideways").returncode == 2
    assert here.cli("nonsense").returncode == 2


def test_a_model_that_is_not_there_is_refused_by_the_gateway(here: Here, tmp_path: Path) -> None:
    here.up()
    said = here.fails(2, "submit", write(tmp_path, SPEC.replace("tiny-dense", "tiny-danse")))
    assert "model.name" in said


def test_a_submitted_job_is_listed_as_json(here: Here, tmp_path: Path) -> None:
    here.up()
    assert json.loads(here.cli("list", "--json").stdout) == []
    assert "no job yet" in here.fails(1, "status")
    long = SPEC.replace("updates = 3", "updates = 3000")  # still to be cancelled at the end of all this
    made = here.cli("submit", write(tmp_path, long), "--json")
    job = json.loads(made.stdout)["id"]
    listed = here.cli("list", "--json")
    assert [j["id"] for j in json.loads(listed.stdout)] == [job]
    assert listed.stderr == ""
    assert json.loads(here.cli("status", "--json").stdout)["spec"]["schedule"]["updates"] == 3000
    assert json.loads(here.cli("status", job, "--json").stdout)["id"] == job
    assert isinstance(json.loads(here.cli("versions", job, "--json").stdout), list)
    assert json.loads(here.cli("report", job, "--json").stdout)["updates"] in range(3001)
    assert job in here.cli("list").stdout
    assert "there is no such job" in here.fails(2, "status", "j0000000000")
    assert here.fails(2, "trace", f"{job}-99999-0").startswith("error: ")
    assert "cancel asked for" in here.cli("cancel", job).stdout


def test_reading_needs_no_running_installation(here: Here, tmp_path: Path) -> None:
    """A gateway comes up for the length of the command, without the scheduler that would wake the job."""
    here.up()
    job = here.cli("submit", write(tmp_path, SPEC)).stdout.strip()
    here.cli("cancel", job)
    here.cli("down")
    scheduler = here.runs / "logs" / "scheduler.log"
    before = scheduler.stat().st_size
    done = here.cli("list", "--json")
    assert [j["id"] for j in json.loads(done.stdout)] == [job], done.stderr
    assert not (here.runs / "up.json").exists()
    assert scheduler.stat().st_size == before


def test_the_command_imports_no_torch() -> None:
    """Not even with every command's own imports done."""
    code = (
        "import sys; from syncline.scheduler import cli, watch, client, stack, supervisor, cli_stack; "
        "import syncline.contract.spec_text; "
        "sys.exit(sorted({'torch', 'transformers', 'pyarrow', 'celery'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_version_that_was_never_active_says_why_and_what_workers_said() -> None:
    workers = {"w0": {"reason": "tensor a: bad"}, "w1": {"reason": "tensor a: bad"}, "w2": {"reason": ""}}
    assert why_not({"reason": "superseded", "workers": workers}) == "superseded; tensor a: bad"
    assert why_not({"reason": "late; w0: tensor a: bad", "workers": workers}) == "late; w0: tensor a: bad"
