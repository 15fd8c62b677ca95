"""The action's steps, run here as the runner would; the examples by their schemas."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from check_jsonschema import main as check_jsonschema
from click.testing import CliRunner

from plastiscope.store import Row

Maker = Callable[..., Path]
ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"]}
RANK = Row("effective_rank", "feature", 10.0, "fc1", 0, tokens="all", rows=64, columns=32)


@pytest.mark.parametrize(
    ("schema", "file"),
    [
        ("vendor.github-actions", "action.yml"),
        ("vendor.github-workflows", "examples/github-workflow.yml"),
        ("vendor.gitlab-ci", "examples/gitlab-ci.yml"),
    ],
)
def test_the_files_are_what_the_servers_read(schema: str, file: str) -> None:
    done = CliRunner().invoke(check_jsonschema, ["--builtin-schema", schema, str(ROOT / file)])
    assert done.exit_code == 0, done.output


def test_the_schema_of_an_action_can_fail(tmp_path: Path) -> None:
    wrong = tmp_path / "action.yml"
    wrong.write_text(yaml.safe_dump(ACTION | {"inputs": 3}), "utf-8")
    arguments = ["--builtin-schema", "vendor.github-actions", str(wrong)]
    assert CliRunner().invoke(check_jsonschema, arguments).exit_code == 1


@pytest.fixture
def runner(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """runner(step, **inputs) runs a step's script with the inputs in its environment.

    The measuring command is a stand-in on the PATH that copies finished tables: analysis has its
    own tests. The gate is the real one.
    """
    commands = tmp_path / "bin"
    commands.mkdir()
    gate = "from plastiscope.cli import main; main()"
    script = (
        "#!/usr/bin/env bash\n"
        'if [ "$1" = analyze ]; then printf "%s\\n" "$@" > analyzed; cp -r "$2" "$4"; exit; fi\n'
        f'exec {sys.executable} -c "{gate}" "$@"\n'
    )
    (commands / "plastiscope").write_text(script, "utf-8")
    (commands / "plastiscope").chmod(0o755)

    def run(step: str, **inputs: str) -> subprocess.CompletedProcess[str]:
        defaults = {k: str(v.get("default", "")) for k, v in ACTION["inputs"].items()}
        values = defaults | {k.replace("_", "-"): v for k, v in inputs.items()}
        environment = {
            name: _expanded(text, values) for name, text in STEPS[step].get("env", {}).items()
        }
        environment |= {
            "PATH": f"{commands}:{os.environ['PATH']}",
            "GITHUB_STEP_SUMMARY": str(tmp_path / "summary"),
            "GITHUB_OUTPUT": str(tmp_path / "output"),
        }
        # As the runner calls a composite action's bash steps.
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", STEPS[step]["run"]]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    return run


def _expanded(text: str, inputs: dict[str, str]) -> str:
    assert text.startswith("${{ inputs.") and text.endswith(" }}")
    return inputs[text.removeprefix("${{ inputs.").removesuffix(" }}")]


def test_the_steps_gate_a_run(
    make: Maker, tmp_path: Path, runner: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    wide = [replace(RANK, component=f"c{i}") for i in range(4)]
    make("run", {5: wide})
    make("good", {5: wide})
    make("worse", {5: [replace(row, value=3.0) for row in wide]})
    options = {"run": "run", "out": "out", "analyze_options": "--probe some.npz"}
    assert runner("Analyze", **options).returncode == 0
    words = (tmp_path / "analyzed").read_text("utf-8").split()
    assert words == ["analyze", "run", "--out", "out", "--probe", "some.npz"]

    fresh = runner("Check", out="out", baseline="kept.jsonl")
    assert fresh.returncode == 4 and "no baseline at kept.jsonl" in fresh.stdout
    allowed = runner("Check", out="out", baseline="kept.jsonl", allow_missing_baseline="true")
    assert allowed.returncode == 0, allowed.stdout + allowed.stderr
    assert runner("Update the baseline", out="good", baseline="kept.jsonl").returncode == 0
    passed = runner("Check", out="out", baseline="kept.jsonl")
    assert passed.returncode == 0, passed.stdout + passed.stderr
    failed = runner("Check", out="worse", baseline="kept.jsonl")
    assert failed.returncode == 1
    assert "::error title=plastiscope%3A features-lose-rank::" in failed.stdout
    output = (tmp_path / "output").read_text("utf-8").split()
    assert output == ["status=4", "status=0", "status=0", "status=1"]
    summary = (tmp_path / "summary").read_text("utf-8")
    assert summary.count("### ") == 4 and "c0 | feature effective\\_rank | 10 | 3 |" in summary
    reports = {p.name for p in (tmp_path / "worse" / "check").iterdir()}
    assert reports == {"junit.xml", "check.json", "check.sarif", "annotations.txt", "summary.md"}


def test_a_wrong_rules_file_is_red_with_its_own_status(
    make: Maker, tmp_path: Path, runner: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    make("out", {5: [RANK]})
    (tmp_path / "rules.toml").write_text("[check]\nruls = []\n", "utf-8")
    done = runner("Check", out="out", rules="rules.toml")
    assert done.returncode == 2 and "did you mean 'rules'" in done.stderr
    assert (tmp_path / "output").read_text("utf-8") == "status=2\n"


def test_every_input_is_used_and_no_expression_reaches_a_shell() -> None:
    text = (ROOT / "action.yml").read_text("utf-8")
    for name in ACTION["inputs"]:
        assert f"inputs.{name}" in text
    for step in STEPS.values():
        assert "${{" not in step.get("run", "")


def test_the_report_is_uploaded_even_after_a_failure() -> None:
    upload: dict[str, Any] = STEPS["Upload the report"]
    assert upload["if"] == "always()"
    assert STEPS["Check"]["run"].rstrip().endswith('exit "$status"')


def test_the_examples_call_commands_that_exist() -> None:
    hook = yaml.safe_load((ROOT / "examples" / "pre-commit-config.yaml").read_text("utf-8"))
    (entry,) = [h["entry"] for repo in hook["repos"] for h in repo["hooks"]]
    gitlab = yaml.safe_load((ROOT / "examples" / "gitlab-ci.yml").read_text("utf-8"))
    commands = [entry, *gitlab["plasticity"]["script"]]
    from plastiscope.cli import app

    known = {c.name or c.callback.__name__ for c in app.registered_commands if c.callback}
    called = [c.split()[1] for c in commands if c.startswith("plastiscope ")]
    assert called == ["check", "analyze", "check"] and set(called) <= known
