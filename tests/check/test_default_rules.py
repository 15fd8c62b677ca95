"""The default rules end to end: ageing runs fail, healthy ones pass, planted defects are named."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from plastiscope.analysis import analyze
from plastiscope.check import Result, check
from plastiscope.check.defaults import BASELINE_RULES, RUN_RULES
from plastiscope.config import Settings
from plastiscope.store import Row

SAMPLES = Path(__file__).parents[2] / "sample_checkpoints"
Maker = Callable[..., Path]
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


BLOW_UP = next(rule for rule in RUN_RULES if rule.name == "weights-blow-up")
QUIET = Row("dormant_fraction", "unit", 0.0, "activation", 0, parameters="tau=0.025")


def weight(number: float, component: str, block: int | None = 0, **changes: Any) -> Row:
    """Of a matrix, unless the sides say otherwise."""
    status = "ok" if number else "zero_matrix"
    row = Row("weight_magnitude", "weight", number, component, block, rows=8, columns=4)
    return replace(row, status=status, **changes)


def test_a_gain_may_grow_from_little_and_a_matrix_may_not(make: Maker) -> None:
    """LayerScale starts at 1e-5 and reaches 0.1 in healthy runs."""
    gain = {"rows": 8, "columns": None}
    out = make("healthy", {
        0: [weight(1e-5, "ls1.gamma", **gain), weight(0.1, "fc1"), QUIET],
        9: [weight(0.1, "ls1.gamma", **gain), weight(0.2, "fc1"), QUIET],
    })  # fmt: skip
    result = check(out, rules=[BLOW_UP])
    assert result.passed and result.compared == 1 and not result.findings
    everything = replace(BLOW_UP, matrices=False)
    assert named(check(out, rules=[everything])) == {("weight_magnitude", "block 0 ls1.gamma")}
    out = make("blown", {0: [weight(0.1, "fc1")], 9: [weight(0.5, "fc1")]})
    assert named(check(out, rules=[BLOW_UP])) == {("weight_magnitude", "block 0 fc1")}


@pytest.mark.parametrize("against", ["first", "baseline"])
@pytest.mark.parametrize(("grown", "kinds"), [
    (0.07, ["from_zero"]),  # a LoRA factor, a last layer: as large as its siblings
    (0.39, ["from_zero"]),  # below four times their median, 0.1
    (0.45, ["regression"]),
    (0.01, []),  # within the absolute tolerance
])  # fmt: skip
def test_a_matrix_from_zero_is_held_against_its_siblings(
    make: Maker, grown: float, kinds: list[str], against: str
) -> None:
    others = [weight(0.05, "q"), weight(0.1, "fc1"), weight(0.12, "fc2"), weight(9.0, "fc1", 1)]
    head = [weight(0.1, "fc2", head=1)]  # another kind of place
    first = make("first", {0: [weight(0.0, "lora_b"), *others, *head, QUIET]})
    rule = replace(BLOW_UP, against=against)
    if against == "baseline":
        result = check(make("now", {0: [weight(grown, "lora_b"), *others, *head]}), first, [rule])
    else:
        make("first", {9: [weight(grown, "lora_b"), *others, *head, QUIET]})
        result = check(first, rules=[rule])
    assert [f.kind for f in result.findings] == kinds
    assert result.passed == ("regression" not in kinds)
    for finding in result.findings:
        assert finding.series is not None and finding.series.where == "block 0 lora_b"
        assert finding.message.startswith("block 0 lora_b weight weight_magnitude 0 -> ")
        assert "its siblings 0.1" in finding.message
        assert finding.kind != "regression" or finding.excess == pytest.approx(0.35 / 0.3)


def test_a_matrix_from_zero_alone_in_its_block_is_held_against_the_network(make: Maker) -> None:
    rest = [weight(0.1, "fc1"), weight(0.2, "fc1", 1), weight(0.3, "fc1", 2)]
    out = make("out", {0: [weight(0.0, "head", None), *rest, QUIET],
                       9: [weight(2.0, "head", None), *rest, QUIET]})  # fmt: skip
    (finding,) = check(out, rules=[BLOW_UP]).regressions
    assert "head weight weight_magnitude 0 -> 2, its siblings 0.2" in finding.message
    alone = make("alone", {0: [weight(0.0, "a")], 9: [weight(2.0, "a")]})
    result = check(alone, rules=[BLOW_UP])
    assert [f.kind for f in result.findings] == ["from_zero"] and result.passed


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
