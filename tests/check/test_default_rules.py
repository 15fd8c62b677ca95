"""The default rules end to end: ageing runs fail, healthy ones pass, planted defects are named."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from plastiscope import store
from plastiscope.analysis import analyze
from plastiscope.check import Result, check
from plastiscope.check.defaults import BASELINE_RULES, RUN_RULES
from plastiscope.config import Settings
from plastiscope.store import Row

SAMPLES = Path(__file__).parents[2] / "sample_checkpoints"
ONLY = tuple(sorted({rule.metric for rule in (*RUN_RULES, *BASELINE_RULES)}))
WIDTH = 40
SAVED = (0, 20, 50, 100, 200, 300)


def measured(run: Path, out: Path, probe: Path | None = None, every: int = 1) -> Path:
    settings = Settings(out=out, only=ONLY, probe=str(probe) if probe else None, every=every)
    analyze(run, settings)
    return out


def clusters(seed: int, rows: int) -> tuple[Tensor, Tensor]:
    """Points around the corners of a cube under eight labels: a task that stays the same."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(8, (rows,), generator=generator)
    centres = torch.randn(8, 16, generator=torch.Generator().manual_seed(99))
    return centres[labels] + 0.7 * torch.randn(rows, 16, generator=generator), labels


def train_healthy(run: Path, seed: int) -> Path:
    """An MLP that learns one task and stays on it."""
    torch.manual_seed(seed)
    run.mkdir(parents=True)
    network = nn.Sequential(
        nn.Linear(16, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8)
    )
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    inputs, labels = clusters(seed, 512)
    np.savez(run / "probe.npz", inputs=clusters(1000, 64)[0].numpy())
    for step in range(SAVED[-1] + 1):
        if step in SAVED:
            state = {f"net.{name}": tensor for name, tensor in network.state_dict().items()}
            torch.save({"model_state_dict": state, "step": step}, run / f"step_{step:04d}.pt")
        rows = torch.randint(len(inputs), (32,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(inputs[rows]), labels[rows]).backward()
        optimizer.step()
    return run


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Four healthy runs that differ by their seed."""
    folder = tmp_path_factory.mktemp("healthy")
    return [train_healthy(folder / f"seed-{seed}" / "run", seed) for seed in range(4)]


def test_twenty_probes_and_seeds_raise_no_false_alarm(healthy: list[Path], tmp_path: Path) -> None:
    verdicts = []
    for run in healthy:
        for seed in range(5):
            probe = tmp_path / f"probe-{seed}.npz"
            np.savez(probe, inputs=clusters(2000 + seed, 48)[0].numpy())
            out = measured(run, tmp_path / f"{run.parent.name}-{seed}", probe)
            verdicts.append(check(out))
    assert [v.status for v in verdicts] == [0] * 20, [v.findings for v in verdicts if v.findings]
    assert all(v.compared > 10 for v in verdicts)


def test_another_seed_passes_against_a_baseline(healthy: list[Path], tmp_path: Path) -> None:
    outs = [measured(run, tmp_path / run.parent.name) for run in healthy]
    for new in outs:
        for old in outs:
            result = check(new, old)
            assert result.passed and result.compared > 10, result.findings


def plant(source: Path, run: Path, change: dict[str, object]) -> Path:
    """A copy of a run whose last checkpoint's tensors are changed."""
    shutil.copytree(source, run)
    file = sorted(run.glob("step_*.pt"))[-1]
    content = torch.load(file, weights_only=True)
    for name, edit in change.items():
        edit(content["model_state_dict"][name])  # type: ignore[operator]
    torch.save(content, file)
    return run


def kill_a_fifth(of: Tensor) -> None:
    of[: WIDTH // 5] = 0 if of.ndim == 2 else -1


def blow_up(weight: Tensor) -> None:
    weight *= 6


DEFECTS = {
    "dead": (
        {"net.2.weight": kill_a_fifth, "net.2.bias": kill_a_fifth},
        ("dead_fraction", "block 1 activation"),
    ),
    "blown": ({"net.2.weight": blow_up}, ("weight_magnitude", "block 1 fc")),
}


def test_what_started_at_zero_has_not_blown_up(tmp_path: Path) -> None:
    def table(weight: float, bias: float) -> Path:
        out = tmp_path / f"{weight}-{bias}"
        for step, factor in ((0, 0.0), (100, 1.0)):
            rows = [
                Row("weight_magnitude", "weight", 0.1 if step == 0 else weight, "fc1", 0),
                Row("weight_magnitude", "weight", bias * factor, "attn.bo",
                    status="ok" if factor else "zero_matrix"),
                Row("dormant_fraction", "unit", 0.0, "activation", 0, parameters="tau=0.025"),
            ]  # fmt: skip
            common = {"run": "r", "checkpoint": str(step), "step": step, "task": None}
            common |= {"branch": "raw", "checkpoint_fingerprint": str(step)}
            store.write(store.checkpoint_file(out, "r", str(step)), rows, common, "k", {})
        return out

    rule = next(rule for rule in RUN_RULES if rule.name == "weights-blow-up")
    healthy = check(table(0.12, 0.0214), rules=[rule])
    assert healthy.passed and [f.kind for f in healthy.findings] == ["from_zero"]
    blown = check(table(0.5, 0.0214), rules=[rule])
    assert named(blown) == {("weight_magnitude", "block 0 fc1")}
    floor = [replace(rule, relative=0.0)]
    assert not check(table(0.1, 0.0214), rules=floor).passed


def named(result: Result) -> set[tuple[str, str]]:
    return {(f.series.metric, f.series.where) for f in result.regressions if f.series}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_is_named(healthy: list[Path], tmp_path: Path, defect: str) -> None:
    change, expected = DEFECTS[defect]
    bad = measured(plant(healthy[0], tmp_path / "run", dict(change)), tmp_path / "bad")
    good = measured(healthy[0], tmp_path / "good")
    for result in (check(bad), check(bad, good)):
        assert result.status == 1
        assert expected in named(result)
        finding = next(f for f in result.regressions if f.series and f.series.where == expected[1])
        assert finding.before is not None and finding.after is not None
        assert finding.tolerance is not None
        assert abs(finding.after - finding.before) > finding.tolerance.decisive
    assert check(good).passed and check(good, good).passed


def test_a_collapsed_query_head_is_named(tmp_path: Path) -> None:
    source = SAMPLES / "vit" / "checkpoint-300"
    run = tmp_path / "run"
    for step in (300, 600):
        shutil.copytree(source, run / f"checkpoint-{step}")
        (run / f"checkpoint-{step}" / "trainer_state.json").unlink(missing_ok=True)
        (run / f"checkpoint-{step}" / "optimizer.pt").unlink(missing_ok=True)
    shutil.copy(SAMPLES / "vit" / "probe.npz", run)
    good = measured(run, tmp_path / "good")
    file = run / "checkpoint-600" / "model.safetensors"
    state = load_file(file)
    query = state["vit.encoder.layer.2.attention.attention.query.weight"]
    query[8:16] = torch.outer(torch.linspace(-1, 1, 8), query[8])
    save_file(state, file, metadata={"format": "pt"})
    result = check(measured(run, tmp_path / "bad"), good)
    assert result.status == 1
    (finding,) = [f for f in result.regressions if f.rule == "weights-lose-rank"]
    assert finding.series is not None
    assert (finding.series.metric, finding.series.where) == ("effective_rank", "block 2 q head 1")
    assert finding.after == pytest.approx(1.0, abs=1e-4)
    within = check(tmp_path / "bad")
    assert ("effective_rank", "block 2 q head 1") in named(within)


AGED = {
    "mlp": {"units-go-dormant", "units-die", "features-lose-rank", "weights-blow-up"},
    "cnn": {"units-go-dormant", "units-die"},
    "vit": {"features-lose-rank", "attention-collapses"},
    "gpt": {"features-lose-rank"},
}


@pytest.mark.parametrize("sample", AGED)
def test_the_samples_that_aged_fail(sample: str, tmp_path: Path) -> None:
    result = check(measured(SAMPLES / sample, tmp_path / "out", every=2))
    assert result.status == 1
    assert AGED[sample] <= {f.rule for f in result.regressions}
    assert result.gaps == ()
