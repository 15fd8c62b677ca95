"""The settings of an analysis: one frozen object, from the command line over a configuration file.

The file is `plastiscope.toml`, or the table [tool.plastiscope] of `pyproject.toml`, in the working
folder. Its tables [profiles.NAME] hold further settings, laid over the file's own where a profile
is chosen by name. An unknown key is an error that names the nearest known one.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from .errors import UsageError, unknown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

KERNELS = ("mean_logit", "loss", "logits")
LEAST = {
    "folds": 2,
    "probe_inputs": 2,
    "probe_rows": 2,
    "batch_size": 1,
    "gradient_inputs": 2,
    "jacobian_inputs": 1,
    "sensitivity_pairs": 2,
    "every": 1,
    "seed": 0,
}
"""The counts among the settings; one input has neither a kernel nor an error."""
OTHER_TABLES = ("check", "profiles")


@dataclass(frozen=True)
class Settings:
    """What to read, what to replay and what to measure. Every field is also a configuration key.

    `folds` parts of the probe give the jackknife standard errors; `probe_inputs` is the size of a
    synthetic probe; `probe_rows` bounds the rows of a feature matrix, spread evenly over the
    inputs; `batch_size` inputs go through the network at once. `gradient_inputs` of the probe are
    used for the tangent kernel and the sensitivity, `jacobian_inputs` for Jacobians. With a
    `second_probe` the sensitivity pairs each input of the probe with the one of the same index
    there, `sensitivity_pairs` of them at most. `kernel` names the functions whose gradients make
    the tangent kernel: mean_logit, loss, logits (each logit by itself, or 16 seeded projections of
    more).
    """

    out: Path = Path("plastiscope-out")
    probe: str | None = None
    model: str | None = None
    assume: Mapping[str, str] = field(default_factory=dict)
    device: str = "cpu"
    only: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    probe_inputs: int = 64
    probe_rows: int = 4096
    batch_size: int = 32
    gradient_inputs: int = 32
    jacobian_inputs: int = 4
    second_probe: str | None = None
    sensitivity_pairs: int = 1024
    kernel: tuple[str, ...] = ("mean_logit",)
    folds: int = 8
    seed: int = 0
    weights: str = "raw"
    prefix: str | None = None
    steps: str | None = None
    every: int = 1
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    order: str = "auto"
    base: str | None = None
    rename: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    allow_partial: bool = False
    trust_pickle: bool = False
    strict: bool = False
    figures: bool = True

    def __post_init__(self) -> None:
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise UsageError(
                    f"setting {name} must be at least {least}, not {getattr(self, name)}: change "
                    "it in plastiscope.toml, pyproject.toml or on the command line"
                )
        for function in self.kernel:
            if function not in KERNELS:
                raise unknown("kernel", function, KERNELS)
        for file in self.families:
            if not Path(file).is_file():
                raise UsageError(f"no such table of tensor names: {file}: give --family a file")


def read_settings(
    folder: Path | None = None, profile: str | None = None, **options: Any
) -> Settings:
    """Settings from the configuration file of `folder` (the working folder), with those of a
    profile, then the options that aren't None, laid over them."""
    table = read_table(folder or Path.cwd())
    values = _checked(table)
    profiles = _profiles(table.get("profiles", {}))
    if profile is not None:
        if profile not in profiles:
            raise unknown("profile", profile, profiles)
        values |= profiles[profile]
    return replace(Settings(**values), **{k: v for k, v in options.items() if v is not None})


def read_table(folder: Path) -> dict[str, Any]:
    """The raw configuration table of a folder; empty when there is no file."""
    file = folder / "plastiscope.toml"
    if file.exists():
        return parse_toml(file)
    project = folder / "pyproject.toml"
    table: dict[str, Any] = {}
    if project.exists():
        table = parse_toml(project).get("tool", {}).get("plastiscope", {})
    return table


def parse_toml(file: Path) -> dict[str, Any]:
    """A file's content. Raises UsageError when it isn't TOML."""
    try:
        table: dict[str, Any] = tomllib.loads(file.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} isn't valid TOML: {error}") from error
    except OSError as error:
        raise UsageError(
            f"{file} can't be read: {error.strerror}: put a readable file there or remove it"
        ) from error
    return table


def _profiles(tables: Any) -> dict[str, dict[str, Any]]:
    """Every profile's checked settings: a wrong key is an error though its profile isn't chosen."""
    if not isinstance(tables, dict) or not all(isinstance(t, dict) for t in tables.values()):
        raise UsageError("configuration key 'profiles' takes tables: [profiles.NAME]")
    return {name: _checked(table, nested=True) for name, table in tables.items()}


def _checked(table: Mapping[str, Any], nested: bool = False) -> dict[str, Any]:
    kinds = {f.name: f for f in fields(Settings)}
    defaults = Settings()
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = key.replace("-", "_")
        if name in OTHER_TABLES and not nested:
            continue
        if name not in kinds:
            raise unknown("configuration key", key, kinds)
        values[name] = _coerced(key, value, getattr(defaults, name))
    return values


def _coerced(key: str, value: Any, default: Any) -> Any:
    """The value in the field's type; TOML knows no tuples and no paths."""
    if isinstance(default, tuple):
        if isinstance(value, str):
            value = [value]
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise UsageError(f"configuration key {key!r} takes a list of strings, not {value!r}")
    if isinstance(default, Path) or default is None:
        if not isinstance(value, str):
            raise UsageError(f"configuration key {key!r} takes a string, not {value!r}")
        return Path(value) if isinstance(default, Path) else value
    if type(value) is not type(default):
        want = type(default).__name__
        raise UsageError(f"configuration key {key!r} takes a value of type {want}, not {value!r}")
    return value
