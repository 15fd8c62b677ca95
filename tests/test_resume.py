"""What is kept between two analyses: rows of another version are measured again, a family that
failed is tried again by itself, and nothing is lost meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import plastiscope
from plastiscope import anatomy, derivatives, keys, replay, requested, store
from plastiscope.analysis import choose_metrics
from plastiscope.config import Settings
from plastiscope.errors import UsageError
from plastiscope.metrics import metric_versions
from plastiscope.watch import Watch, _Watcher

STEPS = (0, 100)


class Lines:
    """The reporter that keeps what is said, and which checkpoints were measured."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.measured: list[int] = []

    def say(self, line: str) -> None:
        self.said.append(line)

    def start(self, run: str, total: int) -> None: ...

    def advance(self, checkpoint: str, step: int, resumed: bool) -> None:
        self.measured += [] if resumed else [step]

    def telling(self, words: str) -> list[str]:
        return [line for line in self.said if words in line]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    for step in STEPS:
        torch.save({"model_state_dict": net.state_dict(), "step": step}, folder / f"{step}.pt")
        with torch.no_grad():
            for p in net.parameters():
                p += 0.1 * torch.randn_like(p)
    random = np.random.default_rng(0)
    for name in ("probe_a", "probe_b"):
        inputs = random.normal(size=(12, 5)).astype(np.float32)
        np.savez(folder / f"{name}.npz", inputs=inputs, labels=random.integers(0, 3, 12))
    return folder


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(out=tmp_path / "out", only=("dead_fraction", "loss", "effective_rank"))


WITH = ("ntk", "jacobian", "sensitivity", "optimizer")


def analyzed(run: Path, settings: Settings, **options: Any) -> tuple[pd.DataFrame, Lines]:
    lines = Lines()
    return plastiscope.analyze(run, settings, lines, **options).table(), lines


def content(settings: Settings) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in store.metric_files(settings.out)}


def same(one: pd.DataFrame, other: pd.DataFrame) -> None:
    """The same rows, in any order."""
    by = [c for c in one.columns if c not in ("value", "standard_error")]
    ordered = [
        t.astype(object).sort_values(by, key=lambda c: c.astype(str)).reset_index(drop=True)
        for t in (one, other)
    ]
    pd.testing.assert_frame_equal(*ordered)


# --- versions ---


@pytest.mark.parametrize("module", [anatomy, replay], ids=lambda m: m.__name__)
def test_rows_of_an_earlier_version_are_measured_again(
    run: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch, module: Any
) -> None:
    before, first = analyzed(run, settings)
    assert first.measured == [*STEPS] and not first.telling("version")
    monkeypatch.setattr(module, "VERSION", module.VERSION + 1)
    after, second = analyzed(run, settings)
    assert second.measured == [*STEPS]
    name = module.__name__.rpartition(".")[2]
    (line,) = second.telling("version")
    assert line == f"run: measured by an earlier version ({name}); measuring again"
    same(before, after)
    assert analyzed(run, settings)[1].measured == []


def test_a_metric_and_a_family_ask_only_for_what_was_chosen(
    run: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    analyzed(run, settings)
    monkeypatch.setattr(derivatives, "VERSION", derivatives.VERSION + 1)
    raised = metric_versions() | {"srank": 99}
    monkeypatch.setattr("plastiscope.metrics.metric_versions", lambda: raised)
    assert analyzed(run, settings)[1].measured == []  # neither was measured
    raised["loss"] += 1
    lines = analyzed(run, settings)[1]
    assert lines.measured == [*STEPS] and len(lines.telling("version (loss)")) == 1
    chosen = choose_metrics(replace(settings, extra=("jacobian",)))
    assert keys.versions(chosen)["derivatives"] == derivatives.VERSION
    assert "derivatives" not in keys.versions(choose_metrics(settings))


def test_tables_from_before_versions_were_kept_are_measured_again(
    run: Path, settings: Settings
) -> None:
    before, _ = analyzed(run, settings)
    for file in store.metric_files(settings.out):
        table = pq.ParquetFile(file).read()
        metadata = {k: v for k, v in table.schema.metadata.items() if b"versions" not in k}
        pq.write_table(table.replace_schema_metadata(metadata), file)
    after, lines = analyzed(run, settings)
    assert lines.measured == [*STEPS] and len(lines.telling("earlier version")) == 1
    same(before, after)


def test_nothing_measured_is_lost_while_the_new_is_not_written(
    run: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, _ = analyzed(run, settings)
    kept = content(settings)

    def broken(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(anatomy, "VERSION", anatomy.VERSION + 1)
        patched.setattr("plastiscope.replay.Replay.run", broken)
        with pytest.raises(MemoryError):
            analyzed(run, settings)
    assert content(settings) == kept
    after, lines = analyzed(run, settings)
    assert lines.measured == []
    same(before, after)


# --- families that failed ---


def plant(
    monkeypatch: pytest.MonkeyPatch, name: str, fails: Callable[[int], Exception | None]
) -> list[int]:
    """Make a family's function fail at those of its calls for which `fails` gives an error; the
    list grows by one a call."""
    whole, calls = getattr(requested, name), list[int]()

    def planted(*given: Any) -> Any:
        calls.append(len(calls))
        error = fails(calls[-1])
        if error is not None:
            raise error
        return whole(*given)

    def lazily(*given: Any) -> Any:
        yield from planted(*given)

    monkeypatch.setattr(requested, name, planted if name == "kernels" else lazily)
    return calls


@pytest.mark.parametrize(
    ("name", "family", "call"),
    [("jacobian_rows", "jacobian", 2), ("sensitivity_rows", "sensitivity", 2),
     ("optimizer_rows", "optimizer", 1)],
)  # fmt: skip
def test_a_failure_that_passes_is_measured_again_alone(
    run: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch,
    name: str, family: str, call: int,
) -> None:  # fmt: skip
    """It failed on one of two probes (if it needs one), at one of two checkpoints."""
    settings = replace(settings, extra=WITH)
    undisturbed, _ = analyzed(run, replace(settings, out=settings.out / "undisturbed"))
    errors = {call: torch.cuda.OutOfMemoryError("out of memory")}
    with monkeypatch.context() as patched:
        plant(patched, name, errors.get)
        table, lines = analyzed(run, settings)
    failed = table[table["status"] == "failed"]
    assert set(failed["step"]) == {100}
    assert {p[0] for p in failed["probe"].dropna()} == ({"a"} if family != "optimizer" else set())
    assert set(failed["metric"]) == derivatives.family(family) and failed["value"].isna().all()
    assert len(lines.telling(f"{family} not measured: out of memory")) == 1
    with monkeypatch.context() as patched:
        # Only what failed is measured: nothing is replayed, no other family runs.
        patched.setattr("plastiscope.replay.Replay.run", None)
        patched.setattr(requested, "kernels", None)
        calls = plant(patched, name, lambda _: None)
        again, lines = analyzed(run, settings)
    assert calls == [0] and lines.measured == [100]
    same(again, undisturbed)
    assert analyzed(run, settings)[1].measured == []


def test_what_fails_again_keeps_its_rows_beside_what_passes(
    run: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(settings, extra=("jacobian", "sensitivity"), steps="0")
    undisturbed, _ = analyzed(run, replace(settings, out=settings.out / "undisturbed"))
    with monkeypatch.context() as patched:
        jacobians = plant(patched, "jacobian_rows", lambda _: OSError("disk"))
        plant(patched, "sensitivity_rows", {0: OSError("disk")}.get)
        analyzed(run, settings)
        table, lines = analyzed(run, settings)
        assert len(jacobians) == 4 and lines.measured == [0]
    failed = table[table["status"] == "failed"]
    assert set(failed["metric"]) == derivatives.family("jacobian")
    facts = store.read_facts(store.metric_files(settings.out)[0])
    assert [name for name, _ in facts["failed"]] == ["jacobian", "jacobian"]
    same(analyzed(run, settings)[0], undisturbed)


def test_an_earlier_kernel_that_failed_is_a_row_until_it_is_there(
    run: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first checkpoint's kernel costs the second one its drift, which says so."""
    (run / "probe_b.npz").unlink()
    settings = replace(settings, extra=("ntk",))
    undisturbed, _ = analyzed(run, replace(settings, out=settings.out / "undisturbed"))
    with monkeypatch.context() as patched:
        # The first checkpoint's own kernel, the second's, then the first's for the drift.
        errors = {0: OSError("disk"), 2: OSError("disk"), 3: OSError("disk")}
        plant(patched, "kernels", errors.get)
        table, _ = analyzed(run, settings)
    drift = table[(table["metric"] == "ntk_drift") & (table["step"] == 100)]
    assert set(drift["status"]) == {"failed"} and "network" in set(drift["component"])
    assert (table[(table["metric"] == "ntk_trace") & (table["step"] == 100)]["value"] > 0).all()
    again, lines = analyzed(run, settings)
    assert lines.measured == [*STEPS]
    same(again, undisturbed)


def test_a_failure_that_stays_is_tried_once_an_analysis_and_changes_nothing(
    run: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(settings, extra=("jacobian",))
    calls = plant(monkeypatch, "jacobian_rows", lambda _: OSError("disk"))
    analyzed(run, settings)
    kept = content(settings)
    assert len(calls) == 4  # two checkpoints, two probes
    _, lines = analyzed(run, settings)
    assert len(calls) == 8 and lines.measured == [] and content(settings) == kept
    _, lines = analyzed(run, settings, retry=False)
    assert len(calls) == 8 and lines.measured == [] and content(settings) == kept


def test_what_was_refused_is_not_tried_again(
    run: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network or the settings don't allow it: both are in the key."""
    settings = replace(settings, extra=("jacobian",))
    calls = plant(monkeypatch, "jacobian_rows", lambda _: UsageError("not defined"))
    table, _ = analyzed(run, settings)
    null = table[table["metric"] == "isometry_score"]
    assert set(null["status"]) == {"refused"} and null["value"].isna().all()
    analyzed(run, settings)
    assert len(calls) == 4


def test_the_watch_tries_a_failure_again_once(
    run: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(settings, extra=("jacobian",))
    (run / "probe_b.npz").unlink()
    calls = plant(monkeypatch, "jacobian_rows", lambda _: OSError("disk"))
    analyzed(run, settings)
    assert len(calls) == 2

    def watcher() -> _Watcher:
        return _Watcher(Watch(run, settings, say=lambda _: None))

    first = watcher()
    for _ in range(4):
        first.look()
    assert len(calls) == 4  # once for each checkpoint, when the watch began
    state = torch.load(run / "100.pt", weights_only=True)
    moved = {k: v + 0.1 * torch.randn_like(v) for k, v in state["model_state_dict"].items()}
    torch.save({"model_state_dict": moved, "step": 200}, run / "200.pt")
    for _ in range(4):
        first.look()
    assert len(calls) == 5  # the new checkpoint's own
    state["model_state_dict"]["0.weight"] += 0.01
    torch.save(state, run / "100.pt")
    for _ in range(3):
        first.look()
    assert len(calls) == 6  # the one whose file changed
    second = watcher()
    for _ in range(3):
        second.look()
    assert len(calls) == 9  # a restart tries all three again


def test_modules_near_the_model_decide_too(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("from parts import Layer\n")
    (tmp_path / "parts.py").write_text("class Layer: ...\n")
    settings = Settings(model=f"{tmp_path / 'net.py'}:Net")
    before = keys.sources(tmp_path, settings)
    assert keys.sources(tmp_path, settings) == before
    (tmp_path / "parts.py").write_text("class Layer: pass\n")
    assert keys.sources(tmp_path, settings) != before


def test_folder_restored_under_the_same_times_is_another(tmp_path: Path) -> None:
    folder = tmp_path / "probe"
    folder.mkdir()
    (folder / "a.png").write_bytes(b"one")
    settings = Settings(probe=str(folder))
    before, status = keys.sources(tmp_path, settings), (folder / "a.png").stat()
    (folder / "a.png").write_bytes(b"two")
    os.utime(folder / "a.png", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert keys.sources(tmp_path, settings) != before
