"""A short run of the fuzzer; the long one is `python tests/checkpoints/fuzz.py`."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path

import pytest


def fuzzer():
    spec = importlib.util.spec_from_file_location("fuzz", Path(__file__).with_name("fuzz.py"))
    module = importlib.util.module_from_spec(spec)
    # The seeds pickle a module class, which looks its own module up by name.
    sys.modules["fuzz"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "kind",
    ["torch", "legacy", "safetensors", "pickle", "module", "npz", "sb3", "tar", "distributed"],
)
def test_mutants_are_read_or_refused(tmp_path, kind):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcomes = fuzzer().run(kind, 150, 1, tmp_path, tell=lambda line: None)
    # Mutations must both pass and fail, or nothing was tested.
    assert outcomes["read"] > 0 and len(outcomes) > 2
    assert sum(outcomes.values()) == 150
