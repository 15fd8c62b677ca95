"""The command as CI calls it: statuses, files written before it ends, pipes that close."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from plastiscope.check import command
from plastiscope.check.configuration import read_rules
from plastiscope.cli import main
from plastiscope.errors import UsageError
from plastiscope.store import Row

Maker = Callable[..., Path]
RANK = Row("effective_rank", "feature", 10.0, "fc1", 0, tokens="all", standard_error=0.1,
           rows=64, columns=32)  # fmt: skip
CLI = [sys.executable, "-c", "from plastiscope.cli import main; main()"]
RULES = """
[[rules]]
metric = "effective_rank"
bad = "down"
against = "%s"
absolute = 1.0
relative = 0.1
"""


def value(number: float | None) -> Row:
    return replace(RANK, value=number, status="ok" if number is not None else "non_finite")


@pytest.fixture
def outs(make: Maker, tmp_path: Path) -> Path:
    """good, bad, null and empty tables, and a rules file, side by side."""
    make("good", {0: [value(10.0)], 5: [value(10.1)]})
    make("bad", {0: [value(10.0)], 5: [value(4.0)]})
    make("null", {0: [value(10.0)], 5: [value(None)]})
    make("empty", {0: []})
    broken = make("broken", {0: [RANK]})
    (broken / "metrics" / "r" / "c000000.parquet").write_bytes(b"PAR1")
    (tmp_path / "rules.toml").write_text(RULES % "first", "utf-8")
    (tmp_path / "baseline.toml").write_text(RULES % "baseline", "utf-8")
    (tmp_path / "typo.toml").write_text(RULES.replace("metric", "metrik"), "utf-8")
    return tmp_path


@dataclass(frozen=True)
class Done:
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def run(outs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """run(*options) calls `plastiscope check` in the folder of the tables."""

    def run_one(*options: str) -> Done:
        monkeypatch.chdir(outs)
        monkeypatch.setattr(sys, "argv", ["plastiscope", "check", *options])
        with pytest.raises(SystemExit) as caught:
            main()
        said = capsys.readouterr()
        return Done(int(caught.value.code or 0), said.out, said.err)

    return run_one


STATUSES = [
    ("good", "rules.toml", 0),
    ("bad", "rules.toml", 1),
    ("good", "typo.toml", 2),
    ("nowhere", "rules.toml", 2),
    ("broken", "rules.toml", 3),
    ("good", "absent.toml", 3),
    ("null", "rules.toml", 4),
    ("empty", "rules.toml", 4),
]


@pytest.mark.parametrize(("out", "rules", "status"), STATUSES)
def test_every_status_is_reached(run: Run, out: str, rules: str, status: int) -> None:
    done = run(out, "--rules", rules)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    if status in (2, 3) and not done.stdout:
        assert done.stderr.startswith("plastiscope: ") and done.stderr.count("\n") == 1
    else:
        assert done.stdout


def test_the_same_table_twice_passes_and_a_fall_doesnt(run: Run) -> None:
    same = run("good", "--baseline", "good", "--rules", "baseline.toml")
    assert (same.returncode, same.stdout.splitlines()[0]) == (
        0, "passed (1 comparison by 1 rule)",
    )  # fmt: skip
    assert run("bad", "--baseline", "good", "--rules", "baseline.toml").returncode == 1
    absent = ("good", "--baseline", "absent", "--rules", "baseline.toml")
    assert run(*absent).returncode == 4
    allowed = run(*absent, "--allow-missing-baseline")
    assert allowed.returncode == 0 and "no baseline at absent" in allowed.stdout


def test_a_pipe_that_closes_doesnt_turn_red_into_green(outs: Path) -> None:
    many = [replace(value(4.0), component=f"c{i}") for i in range(3000)]
    from plastiscope import store

    for step, rows in {0: [replace(r, value=10.0) for r in many], 5: many}.items():
        shared = {"run": "r", "checkpoint": f"c{step}", "step": step, "task": None}
        shared |= {"branch": "raw", "checkpoint_fingerprint": f"{step}"}
        store.write(store.checkpoint_file(outs / "big", "r", f"c{step}"), rows, shared, "k", {})
    line = f"set -o pipefail; {shlex.join(CLI)} check big --rules rules.toml"
    for tail, expected in ((" | head -1", 1), (" | true", 1), (" > /dev/full", 2)):
        done = subprocess.run(
            ["bash", "-c", line + tail], cwd=outs, capture_output=True, text=True, check=False
        )
        assert done.returncode == expected, (tail, done.stderr)
        assert "Traceback" not in done.stderr


def test_several_reports_are_written_before_the_end(outs: Path, run: Run) -> None:
    done = run(
        "bad", "--rules", "rules.toml",
        "--format", "junit", "--output", "reports/junit.xml",
        "--format", "json", "--output", "reports/check.json",
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stdout.startswith("failed: 1 regression")
    content = json.loads((outs / "reports" / "check.json").read_text("utf-8"))
    assert content["status"] == 1
    assert "<failure" in (outs / "reports" / "junit.xml").read_text("utf-8")
    assert sorted(p.name for p in (outs / "reports").iterdir()) == ["check.json", "junit.xml"]


@pytest.mark.parametrize(("out", "status"), [("empty", 4), ("broken", 3)])
def test_a_report_says_so_when_nothing_could_be_checked(
    outs: Path, run: Run, out: str, status: int
) -> None:
    (outs / "junit.xml").write_text("stale: all green", "utf-8")
    done = run(out, "--rules", "rules.toml", "--format", "junit", "--output", "junit.xml")
    assert done.returncode == status
    assert "<error" in (outs / "junit.xml").read_text("utf-8")


def test_options_that_dont_fit_are_usage_errors(outs: Path, run: Run) -> None:
    out = outs / "good"
    with pytest.raises(UsageError, match="did you mean 'junit'"):
        command.run_check(out, formats=["junt"])
    with pytest.raises(UsageError, match="one --output for each"):
        command.run_check(out, formats=["junit", "json"], outputs=[outs / "a"])
    with pytest.raises(UsageError, match="can't write"):
        command.run_check(out, rules=outs / "rules.toml", outputs=[out])
    assert run("good", "--init", "--update-baseline").returncode == 2
    assert run("good", "--bsaeline", "x").returncode == 2


def test_update_baseline_then_check_against_it(run: Run) -> None:
    written = run("good", "--update-baseline", "--rules", "baseline.toml")
    assert written.stdout == "wrote plastiscope-baseline.jsonl: 1 values; commit it\n"
    options = ("--baseline", "plastiscope-baseline.jsonl", "--rules", "baseline.toml")
    assert run("good", *options).returncode == 0
    assert run("bad", *options).returncode == 1
    assert run("null", *options).returncode == 4
    folder = run("good", "--update-baseline", "--baseline", "good")
    assert folder.returncode == 2 and "is a folder" in folder.stderr


def test_init_writes_rules_that_are_read_back(
    outs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from plastiscope.check.defaults import BASELINE_RULES, RUN_RULES

    monkeypatch.chdir(outs)
    for baseline, expected in ((None, RUN_RULES), (Path("good"), BASELINE_RULES)):
        file = Path(f"start-{baseline}.toml")
        assert command.run_init(Path("bad"), baseline, file) == 0
        assert read_rules(file) == tuple(replace(rule, reason="") for rule in expected)
        text = file.read_text("utf-8")
        assert all(rule.reason.split()[0] in text for rule in expected)
    text = Path("start-None.toml").read_text("utf-8")
    assert "nearest to failing: block 0 fc1 10 -> 4" in text
    assert "Here: nothing to look at." in text
    with pytest.raises(UsageError, match="is there already"):
        command.run_init(Path("bad"), None, file)
    assert "wrote start-None.toml" in capsys.readouterr().out


def test_init_keeps_the_settings_that_are_there(
    outs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from plastiscope.config import read_settings

    monkeypatch.chdir(outs)
    project = outs / "pyproject.toml"
    project.write_text("[tool.plastiscope]\nfolds = 4\n", "utf-8")
    with pytest.raises(UsageError, match="would hide"):
        command.run_init(Path("good"))
    project.unlink()
    Path("plastiscope.toml").write_text("folds = 4", "utf-8")
    command.run_init(Path("good"))
    assert read_settings(outs).folds == 4
    assert len(read_rules(Path("plastiscope.toml"))) > 0
    with pytest.raises(UsageError, match="is there already"):
        command.run_init(Path("good"))


def test_the_gate_never_imports_torch_nor_pandas(outs: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from plastiscope.check import command\n"
        "status = command.run_check(Path('bad'), rules=Path('rules.toml'))\n"
        "heavy = {'torch', 'pandas', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(status + 10 * len(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=outs, capture_output=True, check=False)
    assert done.returncode == 1
