"""Following a live run: whole files only, each once, through deletion, renaming and kill -9."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from plastiscope import store
from plastiscope.analysis import analyze
from plastiscope.check import Rule
from plastiscope.config import Settings
from plastiscope.errors import UsageError
from plastiscope.watch import Watch, _Watcher, follow, take_look, unsettled

GROWS = Rule("grows", "weight_magnitude", "weight", "", components=("!*.bias",), bad="up",
             absolute=0.01, relative=0.5)  # fmt: skip
ONLY = ("weight_magnitude", "weight_drift", "dormant_fraction", "effective_rank")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A forked child must not wait for the parent's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def save(run: Path, step: int, scale: float = 1.0, seed: int = 0) -> Path:
    """A tiny MLP's checkpoint; its weights move a little with the step."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {"net.0": (12, 8), "net.2": (10, 12), "net.4": (4, 10)}
    state = {}
    for name, (rows, columns) in shapes.items():
        noise = torch.randn(rows, columns, generator=generator)
        state[f"{name}.weight"] = scale * noise * (1 + 0.001 * step)
        state[f"{name}.bias"] = 0.1 * torch.ones(rows)
    run.mkdir(parents=True, exist_ok=True)
    file = run / f"step_{step:05d}.pt"
    torch.save({"model_state_dict": state, "step": step}, file)
    return file


def start(run: Path, checkpoints: int = 0) -> Settings:
    """A run with a probe and some checkpoints; the settings to follow it with."""
    run.mkdir(parents=True, exist_ok=True)
    inputs = np.random.default_rng(0).normal(size=(32, 8)).astype("float32")
    np.savez(run / "probe.npz", inputs=inputs)
    for at in range(checkpoints):
        save(run, 10 * at)
    return Settings(out=run.parent / "out", only=ONLY)


def steps(out: Path) -> list[int]:
    return sorted(store.read(out)["step"].unique())


def looks(watcher: _Watcher, times: int = 2) -> None:
    for _ in range(times):
        watcher.look()


def watcher_of(run: Path, settings: Settings, said: list[str], **options: object) -> _Watcher:
    return _Watcher(Watch(run, settings, rules=(GROWS,), say=said.append, **options))  # type: ignore[arg-type]


def test_each_checkpoint_is_measured_once_it_is_whole(tmp_path: Path) -> None:
    run, said = tmp_path / "run", []
    watcher = watcher_of(run, start(run), said)
    looks(watcher)
    assert [line.endswith("no checkpoint in it") for line in said] == [True]
    content = save(run, 0).read_bytes()
    save(run, 0).write_bytes(content[: len(content) // 2])
    watcher.look()
    assert not (tmp_path / "out").exists()
    save(run, 0)  # rewritten between two looks: still moving
    watcher.look()
    assert not (tmp_path / "out").exists()
    watcher.look()
    assert steps(tmp_path / "out") == [0]
    save(run, 10)
    looks(watcher)
    looks(watcher, 3)
    lines = [line for line in said if line.startswith("run step")]
    assert [line.split(":")[0] for line in lines] == [
        "run step 0 step_00000.pt", "run step 10 step_00010.pt",
    ]  # fmt: skip
    assert "passed (3 comparisons by 1 rule)" in lines[1]


def test_a_writer_that_stalls_halfway_is_waited_for(tmp_path: Path) -> None:
    run, said = tmp_path / "run", []
    watcher = watcher_of(run, start(run, 1), said)
    looks(watcher)
    whole = save(run, 10).read_bytes()
    (run / "step_00010.pt").write_bytes(whole[: len(whole) // 2])
    looks(watcher, 4)
    assert steps(tmp_path / "out") == [0]
    (run / "step_00010.pt").write_bytes(whole)
    looks(watcher)
    assert steps(tmp_path / "out") == [0, 10]


def test_a_folder_with_a_moving_file_is_no_whole_checkpoint() -> None:
    before = {"checkpoint-1/a.bin": (1, 10, 0), "checkpoint-1/b.bin": (2, 10, 0)}
    now = before | {"checkpoint-1/b.bin": (2, 20, 1), "x[1].pt": (3, 1, 1)}
    assert unsettled(before, now) == ["checkpoint-1", "checkpoint-1/b.bin", "x[[]1].pt"]
    assert unsettled(now, now) == []


def test_a_look_passes_over_what_is_hidden_temporary_or_ours(tmp_path: Path) -> None:
    for name in ("a.pt", ".b.pt", "c.pt.tmp", "sub/d.pt", ".git/e.pt", "out/metrics/f.parquet"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    assert sorted(take_look(tmp_path, tmp_path / "out")) == ["a.pt", "sub/d.pt"]


def test_deleted_renamed_and_replaced_checkpoints_are_survived(tmp_path: Path) -> None:
    run, said = tmp_path / "run", []
    settings = replace(start(run, 3), only=("weight_magnitude", "effective_rank"))
    watcher = watcher_of(run, settings, said)
    looks(watcher)
    assert steps(settings.out) == [0, 10, 20]
    (run / "step_00000.pt").unlink()
    (run / "step_00010.pt").rename(run / "step_0010.pt")
    save(run, 20, seed=5)
    save(run, 30)
    looks(watcher, 3)
    table = store.read(settings.out)
    assert sorted(table["checkpoint"].unique()) == [
        "step_00000.pt", "step_00020.pt", "step_00030.pt", "step_0010.pt",
    ]  # fmt: skip
    chosen = table[(table["metric"] == "weight_magnitude") & (table["step"] == 20)]
    values = chosen[chosen["component"] != "network"]["value"]
    fresh = tmp_path / "fresh"
    save(fresh / "run", 20, seed=5)
    shutil.copy(run / "probe.npz", fresh / "run")
    expected = analyze(fresh / "run", replace(settings, out=fresh / "out")).table()
    same = expected[expected["metric"].eq("weight_magnitude")]
    same = same[same["component"] != "network"]["value"]
    np.testing.assert_array_equal(values.to_numpy(), same.to_numpy())


def test_a_restart_goes_on_and_measures_nothing_twice(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = start(run, 2)
    said: list[str] = []
    watch = Watch(run, settings, rules=(GROWS,), interval=0.01, once=True, say=said.append)
    assert follow(watch) == 0
    before = {f: f.stat().st_mtime_ns for f in store.metric_files(settings.out)}
    assert follow(watch) == 0
    assert {f: f.stat().st_mtime_ns for f in store.metric_files(settings.out)} == before
    save(run, 20)
    assert follow(watch) == 0
    assert len(store.metric_files(settings.out)) == 3
    assert sum(line.startswith("run step 20") for line in said) == 1


def test_the_first_failure_ends_the_watch(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = start(run, 2)
    save(run, 20, scale=3.0)
    save(run, 30, scale=3.0)
    said: list[str] = []
    watch = Watch(run, settings, rules=(GROWS,), interval=0.01, most=4, say=said.append)
    assert follow(watch) == 1
    assert steps(settings.out) == [0, 10, 20]
    assert any("run step 20" in line and "FAILED grows" in line for line in said)
    assert any("weight_magnitude" in line and "->" in line for line in said)


def test_a_command_is_called_and_the_watch_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = start(run, 2)
    save(run, 20, scale=3.0)
    save(run, 30, scale=3.0)
    log = tmp_path / "log"
    command = (
        f'echo "$PLASTISCOPE_RUN $PLASTISCOPE_STEP $PLASTISCOPE_CHECKPOINT" >> {log}; '
        f'echo "$PLASTISCOPE_FINDINGS" | head -1 >> {log}; false'
    )
    said: list[str] = []
    watch = Watch(
        run, settings, rules=(GROWS,), interval=0.01, on_fail=command, most=4, say=said.append
    )
    assert follow(watch) == 1
    called = log.read_text("utf-8").splitlines()
    assert called[::2] == ["run 20 step_00020.pt", "run 30 step_00030.pt"]
    assert all("weight_magnitude" in line for line in called[1::2])
    assert steps(settings.out) == [0, 10, 20, 30]
    assert any("--on-fail ended with 1" in line for line in said)


def test_a_weight_that_is_no_number_ends_the_watch(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = start(run, 2)
    save(run, 20, scale=float("nan"))
    said: list[str] = []
    watch = Watch(run, settings, rules=(GROWS,), interval=0.01, once=True, say=said.append)
    assert follow(watch) == 4
    assert any("no value (non_finite)" in line for line in said)


def test_nothing_to_follow_is_no_success(tmp_path: Path) -> None:
    watch = Watch(tmp_path / "absent", Settings(out=tmp_path / "out"), interval=0.01, once=True)
    assert follow(watch) == 4


def test_what_cannot_be_followed_is_a_usage_error(tmp_path: Path) -> None:
    file = save(tmp_path, 0)
    for run, options in (
        (Path("s3://bucket/run"), {}),
        (file, {}),
        (tmp_path, {"interval": 0.0}),
        (tmp_path, {"most": 0}),
    ):
        with pytest.raises(UsageError):
            Watch(run, Settings(), **options)  # type: ignore[arg-type]


# --- kill -9 ------------------------------------------------------------------------------------


def killed(work: Callable[[], object], after: float) -> bool:
    """Run in a child that is killed after so many seconds; whether it ended before."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    time.sleep(after)
    ended = os.waitpid(child, os.WNOHANG)[0] == child
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return ended


@pytest.mark.parametrize("command", ["analyze", "watch"])
def test_killed_at_random_points_then_resumed_gives_the_same_tables(
    tmp_path: Path, command: str
) -> None:
    run = tmp_path / "run"
    settings = start(run, 8)
    clean = replace(settings, out=tmp_path / "clean")
    began = time.perf_counter()
    expected = analyze(run, clean).table()
    took = time.perf_counter() - began

    def work() -> object:
        if command == "analyze":
            return analyze(run, settings)
        return follow(
            Watch(run, settings, rules=(GROWS,), interval=0.001, once=True, say=lambda _: None)
        )

    delays = random.Random(7)
    interrupted = sum(not killed(work, delays.uniform(0.02, 0.6) * took) for _ in range(12))
    assert interrupted > 0
    work()
    pd.testing.assert_frame_equal(store.read(settings.out), expected)


def test_the_command_line_follows_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from plastiscope.cli import main

    start(tmp_path / "run", 2)
    save(tmp_path / "run", 20, scale=3.0)
    (tmp_path / "plastiscope.toml").write_text(
        'only = ["weight_magnitude"]\n[[check.rules]]\nmetric = "weight_magnitude"\n'
        'components = "!*.bias"\nbad = "up"\nabsolute = 0.01\nrelative = 0.5\n',
        "utf-8",
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["plastiscope", "watch", "run", "--interval", "0.01"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("run step 10")] == [
        "run step 10 step_00010.pt: passed (5 comparisons by 1 rule)"
    ]
    assert any("step_00020.pt: FAILED weight_magnitude" in line for line in lines)
