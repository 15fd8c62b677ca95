"""The tables in the files of experiment trackers, written by the trackers' own writers.

A series is one tag, "metric (parameters)/component/block 3/head 1/tokens/subject", and the probe's
name where a run has several; its values keep their steps. Rows without a value or a step are left
out: trackers know no reasons.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from .errors import NotEnoughEvidenceError, UsageError

OURS = ".plastiscope"
COLUMNS = ("metric", "parameters", "component", "block", "head", "tokens", "subject", "index")


def to_tensorboard(table: pd.DataFrame, folder: Path) -> list[Path]:
    """Event files, one folder a run, in place of those of an earlier export.

    Raises UsageError without the tensorboard package.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as error:
        raise _missing("tensorboard", "tensorboard") from error
    _make(folder)
    written = []
    for run, frame in _runs(table):
        for earlier in (folder / run).glob(f"events.out.tfevents.*{OURS}"):
            earlier.unlink()
        writer = EventFileWriter(str(folder / run), filename_suffix=OURS)
        for step, values in _steps(frame):
            summary = Summary(
                value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values]
            )
            writer.add_event(Event(step=step, wall_time=float(step), summary=summary))
        writer.close()
        written.append(folder / run)
    return written


def to_mlflow(table: pd.DataFrame, folder: Path) -> list[Path]:
    """An MLflow database in the folder, a run for each run, in place of an earlier export's.

    Raises UsageError without mlflow.
    """
    try:
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient
    except ImportError as error:
        raise _missing("mlflow", "mlflow") from error
    _make(folder)
    client = MlflowClient(tracking_uri=f"sqlite:///{(folder / 'mlflow.db').resolve()}")
    known = client.get_experiment_by_name("plastiscope")
    experiment = known.experiment_id if known else client.create_experiment("plastiscope")
    for run, frame in _runs(table):
        for earlier in client.search_runs([experiment]):
            if earlier.info.run_name == run:
                client.delete_run(earlier.info.run_id)
        to = client.create_run(experiment, run_name=run).info.run_id
        for step, values in _steps(frame):
            metrics = [Metric(_plain(tag), value, step, step) for tag, value in values]
            for start in range(0, len(metrics), 1000):
                client.log_batch(to, metrics=metrics[start : start + 1000])
        client.set_terminated(to)
    return [folder]


def to_wandb(table: pd.DataFrame, folder: Path) -> list[Path]:
    """Offline runs for Weights & Biases, in FOLDER/wandb; `wandb sync` sends them, nothing else.

    Neither the host nor its hardware, packages or code are recorded. Raises UsageError without the
    wandb package.
    """
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    try:
        import wandb
    except ImportError as error:
        raise _missing("wandb", "wandb") from error
    _make(folder)
    settings = wandb.Settings(
        console="off", disable_code=True, disable_git=True, host="", save_code=False, silent=True,
        x_disable_machine_info=True, x_disable_meta=True, x_disable_stats=True,
        x_save_requirements=False,
    )  # fmt: skip
    written = []
    for run, frame in _runs(table):
        to = wandb.init(
            project="plastiscope", name=run, dir=str(folder), mode="offline", settings=settings,
            reinit="finish_previous",
        )  # fmt: skip
        for step, values in _steps(frame):
            to.log(dict(values), step=step)
        written.append(Path(to.dir).parent)
        to.finish()
    return written


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = error.strerror
        raise UsageError(f"can't write in {folder}: {why}: name another folder") from error


def _runs(table: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    known = table[table["value"].notna() & table["step"].notna()]
    if known.empty:
        raise NotEnoughEvidenceError("no value to export")
    for run, frame in known.groupby("run", observed=True, sort=False):
        yield str(run).replace("/", "_"), frame


def _steps(frame: pd.DataFrame) -> Iterator[tuple[int, list[tuple[str, float]]]]:
    """Each step with its tags and values, steps ascending."""
    several = frame["probe"].nunique() > 1
    columns = [*COLUMNS, "probe"] if several else list(COLUMNS)
    tags = frame[columns].astype(object).apply(_tag, axis=1)
    named = frame.assign(tag=tags).sort_values("step", kind="stable")
    for step, rows in named.groupby("step", sort=True):
        yield (
            int(step),
            [(str(t), float(v)) for t, v in zip(rows["tag"], rows["value"], strict=True)],
        )


def _tag(row: Any) -> str:
    parts = [f"{row['metric']} ({row['parameters']})" if row["parameters"] else row["metric"]]
    for column, form in (
        ("component", "{}"), ("block", "block {}"), ("head", "head {}"), ("tokens", "{}"),
        ("subject", "{}"), ("index", "{}"), ("probe", "{}"),
    ):  # fmt: skip
        if column in row and not pd.isna(row[column]):
            parts.append(form.format(row[column]))
    return "/".join(str(p) for p in parts)


def _plain(tag: str) -> str:
    """MLflow allows letters, digits, and a few signs in the name of a metric."""
    return "".join(c if c.isalnum() or c in "_-. :/" else "_" for c in tag)


def _missing(name: str, extra: str) -> UsageError:
    return UsageError(f"{name} isn't installed: python -m pip install 'plastiscope[{extra}]'")
