"""A device that isn't here is named in one line, which says what is."""

from __future__ import annotations

import pytest
import torch

from plastiscope.cli import main
from plastiscope.errors import UsageError
from plastiscope.network import usable_device
from tests.devices.present import DEVICES

ABSENT = f"cuda:{torch.cuda.device_count()}" if torch.cuda.is_available() else "cuda"


@pytest.mark.parametrize("name", [ABSENT, "cuda:99", "cuds", "meta", "xpu:7", ""])
def test_what_cannot_be_used_is_said_in_one_line(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        usable_device(name)
    line = str(caught.value)
    assert line.startswith(f"--device {name}") and "give cpu" in line
    assert "\n" not in line and len(line) < 200


def test_a_device_without_float64_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apple's says so itself, when the first float64 tensor is put there."""

    def zeros(*_: object, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert dtype == torch.float64
        raise TypeError(
            "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support "
            "float64. Please use float32 instead."
        )

    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(UsageError, match=r"--device mps .* doesn't support float64: give cpu"):
        usable_device("mps")


def test_the_exit_status_is_two(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["plastiscope", "analyze", ".", "--device", ABSENT])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("name", ["cpu", *DEVICES])
def test_what_is_here_can_be_used(name: str) -> None:
    assert usable_device(name).type == name
