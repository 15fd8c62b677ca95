"""The command line: exit statuses, one clear line for what a user can mend, 80 columns."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from plastiscope import cli
from plastiscope.config import Settings

MODEL = """
from torch import nn

class Turned(nn.Sequential):
    def forward(self, x):
        return super().forward(x[:, :5])

def build():
    return Turned(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))

class Short(nn.Sequential):
    def forward(self, x):
        return super().forward(x)[:, :2]

def small():
    return Short(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
"""
COMMAND = [sys.executable, "-m", "plastiscope"]


def plastiscope(*words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "80", "OMP_NUM_THREADS": "1", **environment},
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five checkpoints of a network whose first layer loses rank and whose weights grow."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    folder.mkdir()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    u, _, v = torch.linalg.svd(net[0].weight.detach(), full_matrices=False)
    for step in range(5):
        sigma = torch.logspace(0, -step, 8)
        net[0].weight.data = (step + 1) * u @ torch.diag(sigma) @ v
        net[2].weight.data *= 1.5
        torch.save({"model": net.state_dict(), "step": 10 * step}, folder / f"step_{10 * step}.pt")
    random = np.random.default_rng(0)
    inputs = random.normal(size=(64, 8)).astype(np.float32)
    np.savez(folder / "probe.npz", inputs=inputs, labels=random.integers(0, 3, 64))
    return folder


@pytest.fixture(scope="module")
def out(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out")
    done = plastiscope("analyze", run, "--out", folder)
    assert done.returncode == 0, done.stderr
    assert "Losing plasticity" in done.stdout and "weights grow" in done.stdout
    assert str(folder / "metrics") in done.stdout and str(folder / "figures") in done.stdout
    assert max(len(line) for line in done.stdout.splitlines() if str(folder) not in line) <= 80
    assert "--with ntk,jacobian,sensitivity would add about 1 s, 1 s and 1 s" in done.stdout
    assert "5/5 step 40 step_40.pt" in done.stderr and "relu" in done.stderr
    return folder


def test_help_says_the_defaults_that_hold() -> None:
    said = " ".join(CliRunner().invoke(cli.app, ["analyze", "--help"]).output.split())
    said = " ".join(said.replace("│", " ").split())
    settings = Settings()
    for name in ("out", "device", "probe_rows", "probe_inputs", "batch_size", "seed", "weights",
                 "order", "sensitivity_pairs"):  # fmt: skip
        option = f"--{name.replace('_', '-')}"
        told = said[said.index(f"{option} ") :].split(" --", 2)[0]
        assert f"(default: {getattr(settings, name)})" in told, option


def test_figures_are_drawn_in_three_formats(out: Path) -> None:
    drawn = {f.name for f in (out / "figures" / "run").iterdir()}
    for ending in ("png", "pdf", "svg", "csv"):
        assert f"component-rank.{ending}" in drawn


def test_a_second_analysis_is_quiet_about_what_it_did_not_do(run: Path, out: Path) -> None:
    again = plastiscope("analyze", run, "--out", out, "--no-figures")
    assert again.returncode == 0 and "step_40.pt" not in again.stderr
    silent = plastiscope("analyze", run, "--out", out, "--no-figures", "--quiet")
    assert (silent.returncode, silent.stdout, silent.stderr) == (0, "", "")


def test_inspect_in_json_is_strict_and_names_everything(run: Path) -> None:
    done = plastiscope("inspect", run, "--format", "json")

    def refuse(word: str) -> None:
        raise AssertionError(word)

    found = json.loads(done.stdout, parse_constant=refuse)
    (one,) = found["runs"]
    assert [c["step"] for c in one["checkpoints"]] == [0, 10, 20, 30, 40]
    (network,) = one["architectures"].values()
    parts = {(c["component"], c["block"]): c for c in network["components"]}
    assert parts["fc", 0]["tensors"] == ["0.weight"] and parts["activation", 0]["replayed"]
    assert one["checkpoints"][0]["parameters"] == 8 * 16 + 16 + 16 * 3 + 3


def test_show_report_and_explain(out: Path) -> None:
    shown = plastiscope("show", out, "--metric", "srank", "--subject", "weight", "--pivot", "step")
    assert shown.returncode == 0 and re.search(r"0\s+10\s+20\s+30\s+40", shown.stdout)
    written = plastiscope("report", out)
    assert written.returncode == 0 and (out / "report.html").read_text().startswith("<!")
    explained = plastiscope("explain", "stable_rank")
    assert explained.returncode == 0 and "sigma" in explained.stdout


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["analyze", "nowhere"], 2, "nowhere"),
        (["analyze", "EMPTY"], 3, "no checkpoint"),
        (["analyze", "BROKEN"], 3, "a.pt"),
        (["analyze", "RUN", "--only", "srnk"], 2, "did you mean 'srank'"),
        (["analyze", "RUN", "--probe", "nothing.npz"], 2, "nothing.npz"),
        (["analyze", "RUN", "--model", "nothing.py:build"], 2, "nothing.py"),
        (["analyze", "RUN", "--assume", "stride"], 2, "KEY=VALUE"),
        (["analyze", "RUN", "--only", ","], 2, "empty"),
        (["analyze", "RUN", "--assume", "activatoin=tanh"], 2, "did you mean 'activation'"),
        (["analyze", "RUN", "--assume", "activation=blah"], 2, "blah"),
        (["analyze", "RUN", "--model", "MODEL:build"], 2, "can't run on probe.npz"),
        (["analyze", "RUN", "--model", "MODEL:small"], 2, "label 2 is beyond"),
        (["report", "OUT", "--to", "FILE/x.html"], 2, "can't write"),
        (["analyze", "RUN", "--steps", "a"], 2, "--steps"),
        (["analyze", "RUN", "--device", "cuda:99"], 2, "--device cuda:99"),
        (["analyze", "RUN", "--profile", "full"], 2, "unknown profile 'full'"),
        (["analyze", "RUN", "--steps", "7"], 2, "the steps are 0, 10"),
        (["figures", "EMPTY"], 2, "no tables"),
        (["figures", "OUT", "--figure", "heads"], 2, "head-rank"),
        (["show", "OUT", "--metric", "srnk"], 2, "did you mean 'srank'"),
        (["show", "OUT", "--format", "xml"], 2, "unknown format 'xml'"),
        (["explain", "srnk"], 2, "did you mean 'srank'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_one_line_and_a_status(
    words: list[str], status: int, said: str, run: Path, out: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "a.pt").write_bytes(b"\x80\x02broken")
    (tmp_path / "file").write_text("")
    (tmp_path / "model.py").write_text(MODEL)
    words = [w.replace("MODEL", str(tmp_path / "model.py")) for w in words]
    words = [w.replace("FILE", str(tmp_path / "file")) for w in words]
    places = {"RUN": run, "OUT": out, "EMPTY": tmp_path / "empty", "BROKEN": tmp_path / "broken"}
    extra = ["--out", str(tmp_path / "out")] if words[0] == "analyze" else []
    done = plastiscope(*(places.get(w, w) for w in words), *extra)
    assert done.returncode == status, done.stderr
    assert said in done.stderr and "Traceback" not in done.stderr
    last = [line for line in done.stderr.splitlines() if line.strip()]
    assert last[-1].startswith("plastiscope: ")


def test_a_broken_checkpoint_is_status_3_and_the_others_are_kept(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    copy.mkdir()
    for file in run.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "step_50.pt").write_bytes((run / "step_40.pt").read_bytes()[:1000])
    done = plastiscope("analyze", copy, "--out", tmp_path / "out", "--no-figures")
    assert done.returncode == 3
    assert "step_50.pt" in done.stdout and "Losing plasticity" in done.stdout
    assert len(list((tmp_path / "out" / "metrics").rglob("*.parquet"))) == 5


def test_the_reader_that_hangs_up_gets_no_traceback(out: Path) -> None:
    command = " ".join([*COMMAND, "show", str(out), "--format", "csv"])
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{command} | head -1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr and done.stdout.startswith("run,")
