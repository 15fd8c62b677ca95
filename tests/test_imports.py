"""The direction of imports: the torch half and the pandas half meet only in `store`."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import plastiscope

PACKAGE = Path(plastiscope.__file__).parent
TABLE_SIDE = (
    "store.py",
    "diagnosis.py",
    "show.py",
    "export.py",
    "errors.py",
    "config.py",
    "figures",
    "report",
    "check",
)
FILES = sorted(PACKAGE.rglob("*.py"))


def imported(file: Path) -> set[str]:
    """Absolute names of the modules that a file imports, at any depth, type-checking included."""
    package = ("plastiscope", *file.relative_to(PACKAGE).parent.parts)
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            home = ".".join((*base, *filter(None, [node.module])))
            names |= {home} | {f"{home}.{alias.name}" for alias in node.names}
    return names


def uses(file: Path, *modules: str) -> set[str]:
    return {n for n in imported(file) for m in modules if n == m or n.startswith(m + ".")}


def test_the_reader_of_imports_sees_them(tmp_path: Path) -> None:
    assert uses(PACKAGE / "replay.py", "torch") == {"torch"}
    assert "plastiscope.store.Row" in imported(PACKAGE / "replay.py")


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(PACKAGE)))
def test_direction(file: Path) -> None:
    home = file.relative_to(PACKAGE).parts[0]
    if home not in ("cli", "__main__.py"):
        assert not uses(file, "plastiscope.cli", "typer")
    if home in TABLE_SIDE:
        measuring = (
            "analysis",
            "session",
            "derivatives",
            "replay",
            "weigh",
            "network",
            "anatomy",
            "models",
            "checkpoints",
        )
        assert not uses(file, "torch", *(f"plastiscope.{m}" for m in measuring))
    if home in ("metrics", "observations.py", "observations", "anatomy", "checkpoints", "models"):
        assert not uses(file, "pandas", "matplotlib", "plastiscope.figures", "rich")
    if home != "figures":
        assert not uses(file, "matplotlib")


@pytest.mark.parametrize("module", ["plastiscope.cli", "plastiscope.store", "plastiscope.figures"])
def test_torch_stays_out(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
