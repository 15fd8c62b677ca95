"""The plugin, as another project's tests use it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from plastiscope.store import Row

Maker = Callable[..., Path]
RANK = Row("effective_rank", "feature", 10.0, "fc1", 0, tokens="all", rows=64, columns=32)
TESTS = """
import pytest
from plastiscope.check import Rule

RULE = Rule("falls", "effective_rank", bad="down", absolute=1.0, relative=0.1)

def test_good(plasticity_check):
    assert plasticity_check("good", rules=[RULE]).compared == 1

def test_bad(plasticity_check):
    plasticity_check("bad", rules=[RULE])

def test_null_is_no_pass(plasticity_check):
    plasticity_check("null", rules=[RULE])

def test_configured(plasticity_check):
    plasticity_check("bad")

def test_same(plasticity_check):
    plasticity_check("good")
"""
RULES = """
[[check.rules]]
name = "against-the-baseline"
metric = "effective_rank"
bad = "down"
against = "baseline"
relative = 0.2
absolute = 1.0
"""


def pytest_run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    arguments = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    return subprocess.run(arguments, cwd=folder, capture_output=True, text=True, check=False)


def test_the_fixture_fails_the_right_tests(make: Maker, tmp_path: Path) -> None:
    for name, last in {"good": 10.0, "bad": 4.0, "null": None}.items():
        status = "ok" if last is not None else "non_finite"
        make(name, {0: [RANK], 5: [replace(RANK, value=last, status=status)]})
    (tmp_path / "test_it.py").write_text(TESTS, "utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\n", "utf-8")
    (tmp_path / "plastiscope.toml").write_text(RULES, "utf-8")
    done = pytest_run(tmp_path, "--plastiscope-baseline", "good")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "3 failed, 2 passed" in done.stdout
    for name in ("test_bad", "test_null_is_no_pass", "test_configured"):
        assert f"FAILED test_it.py::{name}" in done.stdout
    assert "block 0 fc1 feature effective_rank 10 -> 4, -60 %" in done.stdout
    assert "no value (non_finite)" in done.stdout
    assert "rule against-the-baseline" in done.stdout


def test_a_session_without_the_fixture_imports_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "test_light.py").write_text(
        "import sys\n\n"
        "def test_light():\n"
        "    assert 'plastiscope.pytest_plugin' in sys.modules\n"
        "    assert not {'torch', 'pandas', 'pyarrow', 'numpy'} & set(sys.modules)\n",
        "utf-8",
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\n", "utf-8")
    plugins = ("-p", "no:hypothesispytest")
    done = pytest_run(tmp_path, *plugins)
    assert done.returncode == 0, done.stdout
