"""Settings come from the environment, whole or with the variable that is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from syncline.runtime.settings import Settings


def test_defaults() -> None:
    settings = Settings.read({"SYNCLINE_JOB": ""})
    assert settings.redis_url == "redis://127.0.0.1:6379/0"
    assert (settings.runs, settings.models) == (Path.cwd() / "runs", Path.cwd() / "examples/models")
    assert (settings.job, settings.worker, settings.port, settings.otlp) == (None, None, None, None)


def test_a_child_reads_what_its_parent_had(tmp_path: Path) -> None:
    given = {
        "SYNCLINE_REDIS_URL": "unix:///tmp/s",
        "SYNCLINE_RUNS": str(tmp_path / "r"),
        "SYNCLINE_MODELS": str(tmp_path / "m"),
        "SYNCLINE_JOB": "j0123456789",
        "SYNCLINE_WORKER": "w1",
        "SYNCLINE_PORT": "0",
        "SYNCLINE_CACHE": str(tmp_path / "c"),
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://localhost:4318",
    }
    settings = Settings.read(given)
    assert settings.port == 0
    assert Settings.read(settings.environ()) == settings
    assert settings.job_dir("j0123456789") == tmp_path / "r" / "j0123456789"
    assert settings.own_dir("j0123456789", "w1") == tmp_path / "c" / "j0123456789" / "w1"
    assert settings.traces == tmp_path / "r" / "traces.sqlite"


@pytest.mark.parametrize("job", ["../x", "", "j/../..", "a b", "ü1"])
def test_a_job_id_never_leads_out_of_the_run_root(tmp_path: Path, job: str) -> None:
    with pytest.raises(ValueError, match="job id"):
        Settings(runs=tmp_path, models=tmp_path).job_dir(job)


def test_a_workers_own_folder_never_leads_out_of_its_jobs(tmp_path: Path) -> None:
    settings = Settings(runs=tmp_path, models=tmp_path)
    assert settings.own_dir("j1", "w0") == tmp_path / "j1" / "workers" / "w0"
    for job, worker in (("j1", "../w0"), ("j1", ""), ("../j", "w0")):
        with pytest.raises(ValueError, match=r"worker|job id"):
            settings.own_dir(job, worker)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SYNCLINE_PORT", "-1"),
        ("SYNCLINE_PORT", "65536"),
        ("SYNCLINE_REDIS_URL", "localhost:6379"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "localhost:4318"),
    ],
)
def test_a_wrong_value_names_its_variable(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=name):
        Settings.read({name: value})
