"""The pytest plugin: gate a run inside a test.

    def test_training_keeps_its_plasticity(plasticity_check):
        plasticity_check("runs/nightly")

`pytest --plastiscope-baseline FILE` compares with a baseline instead of the run's own past;
`--plastiscope-rules FILE` names the rules. It is loaded in every pytest session, so it imports
nothing before the fixture is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .check import Result, Rule

PlasticityCheck = Callable[..., "Result"]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("plastiscope", "gate training runs on their plasticity")
    group.addoption(
        "--plastiscope-baseline",
        metavar="PATH",
        help="OUT folder or baseline file that plasticity_check compares with",
    )
    group.addoption(
        "--plastiscope-rules", metavar="FILE", help="rules file that plasticity_check applies"
    )


@pytest.fixture
def plasticity_check(request: pytest.FixtureRequest, tmp_path: Path) -> PlasticityCheck:
    """plasticity_check(run, rules=None, baseline=None, **options) -> Result.

    `run`: an OUT folder, a folder of checkpoints (measured first, with the project's settings), a
    table or an Analysis. `rules` and `baseline` come before the command line's, those before the
    configuration file's. Options go to `plastiscope.check`. The test fails with the report when
    the gate doesn't pass, missing evidence included; else the Result is returned.
    """

    def check_run(
        run: Any,
        rules: Sequence[Rule] | str | Path | None = None,
        baseline: Any = None,
        **options: Any,
    ) -> Result:
        __tracebackhide__ = True
        from .check import check
        from .check.formats import FORMATS

        rules = rules or request.config.getoption("--plastiscope-rules")
        if baseline is None and _look_at_a_baseline(rules):
            baseline = request.config.getoption("--plastiscope-baseline")
            baseline, rules = _configured(baseline, rules, request.config.rootpath)
        elif rules is None:
            rules = _configured(baseline, None, request.config.rootpath)[1]
        result = check(_measured(run, tmp_path), baseline, rules, **options)
        if not result.passed:
            pytest.fail(FORMATS["text"](result), pytrace=False)
        return result

    return check_run


def _look_at_a_baseline(rules: Any) -> bool:
    """Whether a test's own rules want the baseline that the session was given."""
    if rules is None or isinstance(rules, (str, Path)):
        return True
    return any(rule.against == "baseline" for rule in rules)


def _configured(baseline: Any, rules: Any, folder: Path) -> tuple[Any, Any]:
    """What the project's configuration says where the caller says nothing."""
    from .check.configuration import read_check_settings

    settings = read_check_settings(folder=folder)
    baseline = settings.baseline if baseline is None else baseline
    return baseline, settings.chosen(baseline is not None) if rules is None else rules


def _measured(run: Any, folder: Path) -> Any:
    """The tables of a run; measures a folder of checkpoints first."""
    if not isinstance(run, (str, Path)) or (Path(run) / "metrics").is_dir():
        return run
    from .analysis import analyze
    from .config import read_settings

    return analyze(run, read_settings(out=folder / "plastiscope-out"))
