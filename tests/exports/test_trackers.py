"""Publish report and findings: read back from the real clients' own files, offline."""

import json
import os
import subprocess
import sys

import pytest
from cached_runs import REHEARSED, SMALL, fixable_run
from commands import command
from wandb_offline import wandb_records

from verl_profiler.cli import export, report
from verl_profiler.errors import ReadingError
from verl_profiler.exports import trackers

FILES = ["findings.json", "findings.md", "report.html"]
# Of the recorded rehearsal, by hand: steps of 21.016081 and 20.106269 s, validation of 4.247865 s in one.
MEAN_S = (21.016081 + 20.106269) / 2
VALIDATION_S = 4.247865 / 2


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty working directory, and no settings of the clients."""
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith(("WANDB_", "MLFLOW_", "TENSORBOARD_")):
            monkeypatch.delenv(name)
    return tmp_path


@pytest.fixture
def quick(monkeypatch):
    """A file in the place of the report, which takes seconds."""

    def write(_runs, out, _steps, **_more):
        out.write_text("report")
        return out

    monkeypatch.setattr(report, "write", write)


run = command(export, "trackers")


def test_wandb_gets_an_artifact_a_table_and_summary_values(folder):
    """In a run of its own, in the training's project and group."""
    pytest.importorskip("wandb")
    done = subprocess.run(
        f"{sys.executable} -m verl_profiler export trackers {REHEARSED} --tracker wandb".split(),
        env={**os.environ, "WANDB_MODE": "offline"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (0, True) == (done.returncode, done.stdout.startswith("Published to wandb: "))

    records = list(wandb_records(folder))
    (started,) = (each.run for each in records if each.WhichOneof("record_type") == "run")
    assert ("rehearsal", "rehearsal-profile", "rehearsal", "profile") == (
        started.project,
        started.display_name,
        started.run_group,
        started.job_type,
    )
    published = {
        each.request.log_artifact.artifact.type: each.request.log_artifact.artifact
        for each in records
        if each.WhichOneof("record_type") == "request"
    }
    published |= {
        each.artifact.type: each.artifact
        for each in records
        if each.WhichOneof("record_type") == "artifact"
    }
    assert FILES == sorted(entry.path for entry in published["profile"].manifest.contents)
    summary = {}
    for record in records:
        if record.WhichOneof("record_type") == "summary":
            for item in record.summary.update:
                summary["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
    assert MEAN_S == pytest.approx(summary["profile/step_mean_s"])
    assert VALIDATION_S == pytest.approx(summary["profile/recoverable/validation_s"])
    (table,) = folder.glob("wandb/offline-run-*/files/media/table/profile/*.json")
    content = json.loads(table.read_text())
    assert ["finding", "message", "recoverable_s", "share", "who", "try"] == content["columns"]
    assert ["validation", "polling", "transfer", "tail", "work"] == [
        row[0] for row in content["data"]
    ]


@pytest.mark.parametrize("variable", [True, False])
def test_tensorboard_gets_text_and_scalars_beside_the_training(
    folder, capsys, monkeypatch, variable
):
    """In the directory that verl's own logger writes to; the files are in a folder inside."""
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    if variable:
        monkeypatch.setenv("TENSORBOARD_DIR", str(folder / "elsewhere"))

    assert 0 == run(fixable_run(folder / "run"), "--tracker", "tensorboard")

    place = folder / ("elsewhere" if variable else "tensorboard_log/rehearsal/rehearsal")
    assert f"Published to tensorboard: {place}\n" == capsys.readouterr().out
    events = reading.EventAccumulator(str(place)).Reload()
    (mean,) = events.Scalars("profile/step_mean_s")
    assert (0, pytest.approx(MEAN_S)) == (mean.step, mean.value)
    (found,) = events.Scalars("profile/finding_count")
    assert 5 == found.value
    (text,) = events.Tensors("profile/findings")
    shown = text.tensor_proto.string_val[0].decode()
    # A block of code, which Markdown leaves as it is.
    assert all(line.startswith("    ") for line in shown.splitlines() if line)
    assert ". Validation takes 2.12 s per step, 9.3 % of the time from step to step.\n" in shown
    assert " paste: trainer.test_freq=5\n" in shown
    assert " class FastPoll(ReplayBuffer):\n" in shown
    assert FILES == sorted(path.name for path in (place / "profile").iterdir())
    assert (place / "profile/report.html").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize("training", [True, False])
def test_mlflow_gets_artifacts_and_metrics_in_the_trainings_run(
    folder, monkeypatch, training, quick
):
    """The newest of that name, which keeps its status; without one, a run of its own."""
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
    client = mlflow.MlflowClient(tracking_uri=os.environ["MLFLOW_TRACKING_URI"])
    if training:
        experiment = client.create_experiment("rehearsal")
        for _ in range(2):
            made = client.create_run(experiment, run_name="rehearsal").info.run_id
        client.set_terminated(made, "FAILED")

    assert 0 == run(REHEARSED, "--tracker", "mlflow")

    experiment = client.get_experiment_by_name("rehearsal").experiment_id
    runs = {each.info.run_id: each for each in client.search_runs([experiment])}
    found = runs[made] if training else next(iter(runs.values()))
    name, status = ("rehearsal", "FAILED") if training else ("rehearsal-profile", "FINISHED")
    assert (name, status) == (found.info.run_name, found.info.status)
    assert (2 if training else 1) == len(runs)
    assert MEAN_S == pytest.approx(found.data.metrics["profile/step_mean_s"])
    listed = client.list_artifacts(found.info.run_id, "profile")
    assert [f"profile/{name}" for name in FILES] == sorted(each.path for each in listed)


def test_a_tracker_that_fails_does_not_stop_the_others(monkeypatch, capsys, quick):
    """Each has its line; the exit status shows that one failed."""
    calls = []

    def publish(profile, tracker):
        if tracker == "wandb":
            raise ConnectionError("no route\nto host")
        calls.append(profile)
        return "there"

    monkeypatch.setattr(trackers, "publish", publish)

    assert 1 == run(
        REHEARSED, "--tracker", "wandb", "mlflow", "--project", "p", "--experiment", "e"
    )

    assert (
        "Not published to wandb: ConnectionError: no route\nPublished to mlflow: there\n"
        == capsys.readouterr().out
    )
    assert ("p", "e") == (calls[0].project, calls[0].experiment)


def test_a_client_or_a_tracker_that_is_not_there_is_named(monkeypatch, capsys, quick):
    """With Python's own reason; run.json of another run has no tracker."""
    monkeypatch.setitem(sys.modules, "wandb", None)

    assert 1 == run(REHEARSED, "--tracker", "wandb")
    assert capsys.readouterr().out.startswith("Not published to wandb: import of wandb halted")
    with pytest.raises(
        ReadingError, match=r"no logger to publish to.*\n.*--tracker wandb"
    ) as raised:
        run(SMALL)
    assert "no-tracker" == raised.value.slug


def test_the_runs_own_logger_is_the_default(monkeypatch, tmp_path, capsys, quick):
    """As run.json has it."""
    folder = fixable_run(tmp_path / "run")
    launched = json.loads((folder / "run.json").read_text())
    launched["training"] |= {"logger": ["mlflow"], "project_name": "p", "experiment_name": "e"}
    (folder / "run.json").write_text(json.dumps(launched))
    monkeypatch.setattr(
        trackers, "publish", lambda given, name: f"{name} {given.project}/{given.experiment}"
    )

    assert 0 == run(folder)
    assert "Published to mlflow: mlflow p/e\n" == capsys.readouterr().out


@pytest.mark.parametrize("project", ["../elsewhere", "/elsewhere"])
def test_names_do_not_lead_out_of_tensorboards_folder(folder, capsys, project, quick):
    """A name of a run that somebody else made is no path to write to."""
    pytest.importorskip("tensorboard")

    assert 1 == run(SMALL, "--tracker", "tensorboard", "--project", f"{folder}/{project}")
    assert 1 == run(SMALL, "--tracker", "tensorboard", "--project", project, "--experiment", "e")
    assert 2 == capsys.readouterr().out.count("name another --project and --experiment")
    assert [] == list(folder.iterdir())
