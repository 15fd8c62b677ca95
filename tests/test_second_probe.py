"""Sensitivity in pairs across two data sets, from the command line to the rows."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import plastiscope
from plastiscope import cli, sensitivity, store
from plastiscope.config import Settings
from plastiscope.errors import UsageError
from plastiscope.models.live import Inputs
from plastiscope.probe import find, find_second

FIRST, SECOND, PAIRS = 11, 9, 7
VIT = """
import timm

def build():
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=12, depth=2, num_heads=3,
        num_classes=4,
    )
"""


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A checkpoint, its labelled probe, and a second data set with labels of other classes."""
    folder = tmp_path / "run"
    folder.mkdir()
    torch.manual_seed(0)
    torch.save({"model_state_dict": network().state_dict(), "step": 0}, folder / "0.pt")
    random = np.random.default_rng(0)
    inputs = random.normal(size=(FIRST, 5)).astype(np.float32)
    np.savez(folder / "probe.npz", inputs=inputs, labels=random.integers(0, 3, FIRST))
    other = random.uniform(size=(SECOND, 5)).astype(np.float32)
    np.savez(tmp_path / "other.npz", inputs=other, labels=random.integers(90, 99, SECOND))
    return folder


def called(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str]:
    """The exit status of a command line and what it says of errors."""
    before, sys.argv = sys.argv, ["plastiscope", *map(str, words)]
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0), capsys.readouterr().err
    finally:
        sys.argv = before
    return 0, capsys.readouterr().err


def rates(table: pd.DataFrame, metric: str = "rate_of_change") -> pd.DataFrame:
    return table[(table["metric"] == metric) & table["value"].notna()].set_index("component")


@pytest.mark.parametrize("most", [None, PAIRS])
def test_the_command_line_pairs_two_data_sets(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], most: int | None
) -> None:
    out = tmp_path / "out"
    words = ["--second-probe", tmp_path / "other.npz", "--batch-size", 4, "--no-figures"]
    words += [] if most is None else ["--sensitivity-pairs", most]
    status, said = called(
        capsys, "analyze", run, "--out", out, "--only", "sensitivity", *map(str, words)
    )
    assert status == 0, said
    found = rates(store.read(out))
    net = network().double()
    state = torch.load(run / "0.pt", weights_only=True)["model_state_dict"]
    net.load_state_dict({k: v.double() for k, v in state.items()})
    pairs = most or SECOND
    x, y = (
        torch.from_numpy(np.load(file)["inputs"][:pairs]).double()
        for file in (run / "probe.npz", tmp_path / "other.npz")
    )
    for name, layer in zip(("fc", "activation", "head"), net, strict=True):
        fx, fy = layer(x), layer(y)
        ratios = (fx - fy).norm(dim=1) / (x - y).norm(dim=1)
        row = found.loc[name]
        assert row["value"] == pytest.approx(ratios.mean().item(), rel=1e-6)
        assert row["standard_error"] == pytest.approx((ratios.std() / pairs**0.5).item(), rel=1e-5)
        assert row["rows"] == pairs
        assert row["probe"].startswith("probe@")
        assert row["parameters"].startswith("second=other@")
        x, y = fx, fy
    facts = store.read_facts(store.metric_files(out)[0])
    assert facts["settings"]["second_probe"] == str(tmp_path / "other.npz")
    assert facts["failed"] == []


@pytest.fixture
def vit(tmp_path: Path) -> tuple[Any, Path, Settings]:
    """A small ViT in eval mode, its run, and settings with a second data set."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    options = {"img_size": 16, "patch_size": 8, "embed_dim": 12, "depth": 2, "num_heads": 3}
    net = timm.create_model("vit_tiny_patch16_224", num_classes=4, **options).eval()
    folder = tmp_path / "vit"
    folder.mkdir()
    torch.save({"model_state_dict": net.state_dict(), "step": 0}, folder / "0.pt")
    (tmp_path / "vit.py").write_text(VIT)
    np.savez(folder / "probe.npz", inputs=torch.randn(6, 3, 16, 16).numpy())
    np.savez(tmp_path / "other.npz", inputs=torch.rand(6, 3, 16, 16).numpy())
    settings = Settings(
        out=tmp_path / "out", model=f"{tmp_path / 'vit.py'}:build", only=("sensitivity",),
        batch_size=4, second_probe=str(tmp_path / "other.npz"),
    )  # fmt: skip
    return net, folder, settings


def test_the_embedding_protocol_pairs_them_too(vit: tuple[Any, Path, Settings]) -> None:
    net, folder, settings = vit
    table = plastiscope.analyze(folder, settings).table()
    net, fed = net.double(), {}
    with torch.no_grad():
        for name, file in (("probe", folder / "probe.npz"), ("other", settings.second_probe)):
            inputs = torch.from_numpy(np.load(file)["inputs"]).double()
            embedded = net._pos_embed(net.patch_embed(inputs))
            fed[name] = net.norm_pre(net.patch_drop(embedded))
        apart = (fed["probe"] - fed["other"]).flatten(1).norm(dim=1)
        for block, module in enumerate(net.blocks):
            parts = {"norm1": module.norm1, "attention": module.attn, "norm2": module.norm2,
                     "fc1": module.mlp.fc1}  # fmt: skip
            found = rates(table[table["block"] == block], "rate_of_change_embedding")
            for name, part in parts.items():
                moved = (part(fed["probe"]) - part(fed["other"])).flatten(1).norm(dim=1)
                expected = float((moved / apart).mean())
                assert found.loc[name, "value"] == pytest.approx(expected, rel=1e-5), name
                assert found.loc[name, "rows"] == 6
                assert found.loc[name, "parameters"].startswith("second=other@")


def test_too_little_memory_is_not_taken_for_what_does_not_fit(
    vit: tuple[Any, Path, Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one is tried again, the other is a null row for good."""
    _, folder, settings = vit
    said = {"failed": "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes",
            "embedding_does_not_fit": "shapes cannot be multiplied"}  # fmt: skip
    for status, words in said.items():

        def planted(*_: object, words: str = words) -> None:
            raise RuntimeError(words)

        with monkeypatch.context() as patched:
            patched.setattr(sensitivity, "observe_rate_of_change_embedding", planted)
            out = replace(settings, out=settings.out / status)
            table = plastiscope.analyze(folder, out).table()
        null = table[table["metric"] == "rate_of_change_embedding"]
        assert status in set(null["status"]) and null["value"].isna().all()
        again = plastiscope.analyze(folder, out)
        found = rates(again.table(), "rate_of_change_embedding")
        assert (again.runs[0].measured, len(found) > 0) == (status == "failed", status == "failed")


def test_pairs_are_part_of_what_rows_depend_on(run: Path, tmp_path: Path) -> None:
    settings = Settings(out=tmp_path / "out", only=("rate_of_change",))
    within = plastiscope.analyze(run, settings)
    assert set(within.table()["parameters"]) == {""}
    across = replace(settings, second_probe=str(tmp_path / "other.npz"))
    assert plastiscope.analyze(run, across).runs[0].measured == 1
    assert plastiscope.analyze(run, across).runs[0].measured == 0
    np.savez(tmp_path / "other.npz", inputs=np.ones((4, 5), np.float32))
    again = plastiscope.analyze(run, across)
    assert again.runs[0].measured == 1
    assert set(rates(again.table())["rows"]) == {4}


BAD = {
    "absent": ("nowhere.npz", "sensitivity", 2, "no such file"),
    "not asked for": ("other.npz", "srank", 2, "add --with sensitivity"),
    "another width": ("wide.npz", "sensitivity", 2, "the model takes 5 features an input"),
    "the probe itself": ("run/probe.npz", "sensitivity", 2, "give another data set"),
    "several": ("many", "sensitivity", 2, "give one data set, not a, b"),
    "no arrays": ("broken.npz", "sensitivity", 2, "can't be read"),
}


@pytest.mark.parametrize(("name", "only", "status", "words"), BAD.values(), ids=list(BAD))
def test_what_does_not_pair_is_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    name: str, only: str, status: int, words: str,
) -> None:  # fmt: skip
    np.savez(tmp_path / "wide.npz", inputs=np.ones((4, 6), np.float32))
    (tmp_path / "broken.npz").write_bytes(b"PK\x03\x04 broken")
    (tmp_path / "many").mkdir()
    for each in "ab":
        np.savez(tmp_path / "many" / f"{each}.npz", inputs=np.ones((4, 5), np.float32))
    second = tmp_path / name
    out = tmp_path / "out"
    found, said = called(
        capsys, "analyze", run, "-o", out, "--only", only, "--second-probe", second, "-q"
    )
    assert found == status and words in said
    assert said.startswith("plastiscope: ") and len(said.splitlines()) == 1
    assert "--second-probe" in said or name in said
    assert not store.metric_files(out)


def test_texts_of_other_lengths_do_not_pair(tmp_path: Path) -> None:
    """The model takes both, but a difference of theirs isn't defined."""
    inputs = Inputs("tokens", (), vocabulary=7, longest=8)
    first, second = (np.arange(2 * n).reshape(2, n) % 7 for n in (8, 6))
    np.savez(tmp_path / "probe.npz", inputs=first)
    np.savez(tmp_path / "other.npz", inputs=second)
    probes = find(tmp_path, inputs, None, 64, 0)
    with pytest.raises(UsageError, match=r"inputs of 6 don't pair with those of 8 of the probe"):
        find_second(tmp_path, inputs, str(tmp_path / "other.npz"), 64, 0, probes)


def test_one_pair_is_too_few(run: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", inputs=np.ones((1, 5), np.float32))
    settings = Settings(
        out=tmp_path / "out", only=("sensitivity",), second_probe=str(tmp_path / "other.npz")
    )
    with pytest.raises(UsageError, match="1 pair with the probe probe is too few"):
        plastiscope.analyze(run, settings)
