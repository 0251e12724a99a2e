"""Publish the report and the findings of a run to W&B, TensorBoard and MLflow.

Each client is imported only if it is published to.  Names and places are those that verl's own
`trainer.logger` uses, so that the profile is found beside the training's curves.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Profile:
    """What is published of a run.

    Args:
        project: `trainer.project_name`.
        experiment: `trainer.experiment_name`.
        files: The report, and the findings as Markdown and JSON.
        markdown: The findings as text.
        columns: Of the table of findings.
        rows: Its rows, a value per column.
        scalars: Numbers by name; times in seconds.
    """

    project: str
    experiment: str
    files: Sequence[Path]
    markdown: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    scalars: Mapping[str, float]


def publish(profile: Profile, tracker: str) -> str:
    """Publish to one tracker; return where it is.

    Args:
        profile: What to publish.
        tracker: wandb, tensorboard or mlflow.

    Raises:
        ImportError: The client is not installed.
        Exception: Whatever the client raises.
    """
    return {"wandb": _wandb, "tensorboard": _tensorboard, "mlflow": _mlflow}[tracker](profile)


def _wandb(profile: Profile) -> str:
    """Log an artifact, a table and summary values in a run of its own in the training's group.

    The training's run has ended, and its id is not known here, except where WANDB_RUN_ID set it: that
    run is continued.
    """
    wandb: Any = importlib.import_module("wandb")

    known = os.environ.get("WANDB_RUN_ID")
    name = f"{profile.experiment}-profile"
    with wandb.init(
        project=profile.project,
        name=None if known else name,
        group=None if known else profile.experiment,
        job_type=None if known else "profile",
        id=known,
        resume="allow" if known else None,
        settings=wandb.Settings(console="off", silent=True),
    ) as run:
        artifact = wandb.Artifact(re.sub(r"[^\w.-]", "-", name)[:128], type="profile")
        for path in profile.files:
            artifact.add_file(str(path))
        run.log_artifact(artifact)
        table = wandb.Table(columns=list(profile.columns), data=[list(row) for row in profile.rows])
        run.log({"profile/findings": table})
        summary: Any = run.summary
        summary.update(dict(profile.scalars))
        return run.url or f"{run.dir} (offline; upload it with wandb sync)"


def _tensorboard(profile: Profile) -> str:
    """Add a file of events to the training's directory, and the report beside it."""
    # Modules without types.
    event: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
    protobuf: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
    texts: Any = importlib.import_module("tensorboard.plugins.text.summary_v2")
    writers: Any = importlib.import_module("tensorboard.summary.writer.event_file_writer")
    folder = _tensorboard_folder(profile)
    folder.mkdir(parents=True, exist_ok=True)
    writer = writers.EventFileWriter(str(folder), filename_suffix=".profile")
    try:
        value = protobuf.Summary.Value
        scalars = [value(tag=tag, simple_value=n) for tag, n in profile.scalars.items()]
        text = texts.text_pb("profile/findings", profile.markdown)
        for summary in (protobuf.Summary(value=scalars), text):
            writer.add_event(event.Event(wall_time=time.time(), step=0, summary=summary))
    finally:
        writer.close()
    beside = folder / "profile"
    beside.mkdir(exist_ok=True)
    for path in profile.files:
        shutil.copyfile(path, beside / path.name)
    return str(folder)


def _tensorboard_folder(profile: Profile) -> Path:
    """Return the folder that verl's TensorBoard logger uses, which these names may not lead out of.

    Raises:
        ValueError: They do.
    """
    if named := os.environ.get("TENSORBOARD_DIR"):
        return Path(named).absolute()
    parent = Path("tensorboard_log").resolve()
    folder = (parent / profile.project / profile.experiment).resolve()
    if not folder.is_relative_to(parent):
        raise ValueError(
            f"{profile.project}/{profile.experiment} is outside of {parent}: "
            "name another --project and --experiment"
        )
    return folder


def _mlflow(profile: Profile) -> str:
    """Add artifacts and metrics to the training's run, which keeps its status; else to a new one."""
    mlflow: Any = importlib.import_module("mlflow")
    # verl's default.
    uri = os.environ.get("MLFLOW_TRACKING_URI", "sqlite:////tmp/mlruns.db")
    client = mlflow.MlflowClient(tracking_uri=uri)
    made = None
    run_id = os.environ.get("MLFLOW_RUN_ID")
    if not run_id:
        found = client.get_experiment_by_name(profile.project)
        experiment = found.experiment_id if found else client.create_experiment(profile.project)
        escaped = profile.experiment.replace("'", "\\'")
        runs = client.search_runs(
            [experiment],
            f"attributes.run_name = '{escaped}'",
            max_results=1,
            order_by=["attributes.start_time DESC"],
        )
        if not runs:
            made = client.create_run(experiment, run_name=f"{profile.experiment}-profile")
        run_id = (made or runs[0]).info.run_id
    for path in profile.files:
        client.log_artifact(run_id, str(path), "profile")
    for name, value in profile.scalars.items():
        client.log_metric(run_id, name, value)
    if made is not None:
        client.set_terminated(run_id)
    return f"run {run_id} of {uri}"
