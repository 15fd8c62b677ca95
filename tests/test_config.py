"""Settings from a file and the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from plastiscope.config import Settings, read_settings
from plastiscope.errors import UsageError


def test_no_file_gives_the_defaults(tmp_path: Path) -> None:
    assert read_settings(tmp_path) == Settings()


def test_options_win_over_the_file(tmp_path: Path) -> None:
    (tmp_path / "plastiscope.toml").write_text('out = "there"\nfolds = 4\nonly = ["loss"]\n')
    settings = read_settings(tmp_path, folds=6, probe=None)
    assert (settings.out, settings.folds, settings.only) == (Path("there"), 6, ("loss",))


def test_pyproject_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.plastiscope]\nprobe-rows = 128\n")
    assert read_settings(tmp_path).probe_rows == 128


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("probe_row = 3", "did you mean 'probe_rows'"),
        ("folds = 'x'", "takes a value of type int"),
        ("folds = true", "takes a value of type int"),
        ("kernel = ['logit']", "unknown kernel 'logit': did you mean 'logits'"),
        ("folds = 1", "folds must be at least 2"),
        ("gradient_inputs = 0", "gradient_inputs must be at least 2, not 0: change it"),
        ("gradient_inputs = 1", "gradient_inputs must be at least 2"),
        ("jacobian_inputs = 0", "jacobian_inputs must be at least 1"),
        ("jacobian_inputs = -1", "jacobian_inputs must be at least 1"),
        ("every = 0", "every must be at least 1"),
        ("families = ['nowhere.toml']", "no such table of tensor names: nowhere.toml"),
        ("only = [1]", "list of strings"),
        ("probe = 3", "takes a string"),
        ("folds =", "isn't valid TOML"),
    ],
)
def test_a_wrong_file_is_one_clear_line(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "plastiscope.toml").write_text(text)
    with pytest.raises(UsageError, match=said) as caught:
        read_settings(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["plastiscope.toml", "pyproject.toml"])
def test_a_folder_in_the_file_s_place_is_one_clear_line(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(UsageError, match=f"{name} can't be read: Is a directory"):
        read_settings(tmp_path)


def test_the_gate_has_its_own_table(tmp_path: Path) -> None:
    (tmp_path / "plastiscope.toml").write_text("[check]\nanything = 1\n")
    assert read_settings(tmp_path) == Settings()


PROFILES = """
folds = 4
[profiles.quick]
only = ["effective_rank"]
probe-rows = 256
[profiles.full]
extra = ["ntk", "jacobian"]
folds = 16
"""


def test_a_profile_lies_between_the_file_and_the_options(tmp_path: Path) -> None:
    (tmp_path / "plastiscope.toml").write_text(PROFILES)
    plain = read_settings(tmp_path)
    assert (plain.folds, plain.only, plain.extra) == (4, (), ())
    quick = read_settings(tmp_path, "quick", probe_rows=None)
    assert (quick.folds, quick.only, quick.probe_rows) == (4, ("effective_rank",), 256)
    full = read_settings(tmp_path, "full", folds=8)
    assert (full.folds, full.extra, full.probe_rows) == (8, ("ntk", "jacobian"), 4096)


def test_a_profile_of_pyproject(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.plastiscope.profiles.a]\nseed = 3\n")
    assert read_settings(tmp_path, "a").seed == 3 and read_settings(tmp_path).seed == 0


@pytest.mark.parametrize(
    ("text", "profile", "said"),
    [
        (PROFILES, "ful", "unknown profile 'ful': did you mean 'full'"),
        ("", "full", "unknown profile 'full': known: none"),
        ("[profiles.a]\nfold = 3", "a", "did you mean 'folds'"),
        ("[profiles.a]\nfold = 3", None, "did you mean 'folds'"),
        ("[profiles.a.check]\nx = 3", "a", "unknown configuration key 'check'"),
        ("[profiles.a.profiles.b]\nx = 3", "a", "unknown configuration key 'profiles'"),
        ("profiles = 3", None, r"\[profiles.NAME\]"),
        ("[profiles]\na = 3", None, r"\[profiles.NAME\]"),
    ],
)
def test_a_wrong_profile_is_one_clear_line(
    tmp_path: Path, text: str, profile: str | None, said: str
) -> None:
    (tmp_path / "plastiscope.toml").write_text(text)
    with pytest.raises(UsageError, match=said) as caught:
        read_settings(tmp_path, profile)
    assert "\n" not in str(caught.value)
