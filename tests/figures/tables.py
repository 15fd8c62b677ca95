"""Made-up tables with known numbers, written and read through the store like real ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from plastiscope.store import Row, checkpoint_file, read, write

BLOCK = ["norm1", "attention_output", "residual1", "norm2", "fc1", "activation", "fc2", "residual2"]


def features(rng, tokens, block, names, steps):
    return [
        Row("effective_rank", "feature", 40 - 2.0 * steps + rng.random(), name, block,
            tokens=tokens, standard_error=0.5, maximum=64.0)
        for name in names
    ]  # fmt: skip


def transformer(step, seed=0, blocks=4, heads=4, cls=True):
    rng = np.random.default_rng([seed, step])
    rows = []
    for name in ("embedding", "final_norm", "head"):
        rows += features(rng, "all", None, [name], step)
        rows += features(rng, "cls", None, [name], step) if cls else []
    for block in range(blocks):
        rows += features(rng, "all", block, BLOCK, step * (block + 1) / blocks)
        rows += features(rng, "cls", block, BLOCK, step * (block + 1) / blocks) if cls else []
        for name in BLOCK:
            rows.append(Row("stable_rank", "feature", 3 + rng.random(), name, block, tokens="all"))
        for name in ("q", "k", "v", "attention_output", "fc1", "fc2"):
            for metric, value in (
                ("weight_magnitude", 0.02 + 0.002 * step),
                ("effective_rank", 50 - step),
            ):
                rows.append(
                    Row(metric, "weight", value + 0.001 * block + 0.01 * rng.random(), name, block)
                )
        for name in "qkv":
            for head in range(heads):
                rows.append(
                    Row(
                        "effective_rank",
                        "feature",
                        9 - 0.3 * step + rng.random(),
                        name,
                        block,
                        head,
                        "all",
                    )
                )
                rows.append(
                    Row(
                        "effective_rank",
                        "weight",
                        14 - 0.3 * step + rng.random(),
                        name,
                        block,
                        head,
                    )
                )
                rows.append(
                    Row(
                        "weight_magnitude",
                        "weight",
                        0.02 + 0.003 * step + 0.01 * rng.random(),
                        name,
                        block,
                        head,
                    )
                )
        for tau, value in (("0", 0.01), ("0.01", 0.05), ("0.025", 0.1), ("0.1", 0.2)):
            rows.append(
                Row(
                    "dormant_fraction",
                    "unit",
                    value + 0.02 * step * block / blocks,
                    "activation",
                    block,
                    tokens="all",
                    parameters=f"tau={tau}",
                )
            )
        rows.append(
            Row("active_fraction", "unit", 0.5 - 0.02 * step, "activation", block, tokens="all")
        )
    return rows


def layers(step, seed=0, count=3, kind="fc"):
    rng = np.random.default_rng([seed, step, 7])
    rows = []
    for block in range(count):
        for name in (kind, "activation"):
            rows += features(rng, "all", block, [name], step)
        rows.append(
            Row("weight_magnitude", "weight", 0.02 * (block + 1) + 0.002 * step, kind, block)
        )
        rows.append(Row("effective_rank", "weight", 50 - step * block, kind, block))
        rows.append(
            Row(
                "dormant_fraction", "unit", 0.03 * step, "activation", block, parameters="tau=0.025"
            )
        )
        rows.append(Row("active_fraction", "unit", 0.5 - 0.03 * step, "activation", block))
    rows += features(rng, "all", None, ["head"], step)
    return rows


def table(
    out: Path, make=transformer, run="vit", points=8, every=1000, change=None, **options
) -> pd.DataFrame:
    """A run of `points` checkpoints, through files; `change(point, rows)` may edit the rows."""
    for point in range(points):
        rows = make(point, **options)
        rows = change(point, rows) if change else rows
        common = {
            "run": run,
            "checkpoint": f"checkpoint-{point * every:06d}",
            "step": point * every,
            "task": point,
        }
        common |= {"branch": None, "probe": "digits", "checkpoint_fingerprint": str(point)}
        write(checkpoint_file(out, run, common["checkpoint"]), rows, common, "key", {})
    return read(out)


def jacobian(metric, value, name, block, more=""):
    method = "lanczos" if name == "attention_output" else "exact"
    parameters = f"mean, method={method}{more}"
    return Row(metric, "jacobian", value, name, block, parameters=parameters)


def study(step, seed=0, blocks=3, inputs=6):
    """Rows of the other studies: spectra, Jacobians, tangent kernel, probing loss, rates."""
    rng = np.random.default_rng([seed, step, 3])
    rows = []
    for block in range(blocks):
        for name in ("q", "k", "v", "fc1", "fc2"):
            spectral, condition = 1 + 0.1 * step, 10.0 ** (1 + 0.3 * step + 0.2 * rng.random())
            for metric, value in (
                ("condition_number", condition),
                ("effective_rank", 20.0 - step),
            ):
                rows.append(Row(metric, "weight", value, name, block, rows=16, columns=24))
            for part, value in (("max", spectral**2), ("min", spectral / condition), ("mean", 0.4)):
                rows.append(
                    Row("squared_singular_value", "weight", value, name, block, parameters=part)
                )
        for name in ("norm1", "attention_output", "norm2", "fc1", "fc2"):
            rate = 1 + block + step / 4 + rng.random()
            rows.append(Row("rate_of_change", "sensitivity", rate, name, block, standard_error=0.1))
            rows.append(
                Row("rate_of_change_bound", "sensitivity", 40 * rate, name, block, parameters=name)
            )
            rows.append(jacobian("jacobian_sigma_min", 0.01 / (step + 1), name, block))
            rows.append(jacobian("jacobian_sigma_max", 3.0 + step, name, block))
            rows += [
                jacobian("jacobian_sigma", q / 50, name, block, f", sigma quantile={q}")
                for q in (5, 25, 50, 75, 95)
            ]
        for head in range(2):
            rows.append(Row("lazy_head", "attention", float(step > 4), "attention", block, head))
            rows.append(Row("collapsed_head", "attention", 0.0, "attention", block, head))
    for place in range(inputs):
        value = 10.0 ** (-place - 0.1 * step)
        rows.append(Row("ntk_spectrum", "ntk", value, "network", index=place))
    rows.append(Row("ntk_condition_number", "ntk", 10.0 ** (5 + 0.1 * step), "network"))
    rows.append(Row("ntk_effective_rank", "ntk", 4 - 0.2 * step, "network"))
    rows.append(Row("accuracy", "task", 0.9 - 0.05 * step))
    rows.append(
        Row("weight_magnitude", "weight", 0.02 + 0.01 * step, "network", parameters="pooled")
    )
    rows.append(
        Row("dormant_fraction", "unit", step / 99, "network", parameters="pooled, tau=0.025")
    )
    rows.append(Row("probe_auc", "network", float((step - 2.0 - seed) ** 2), "network"))
    rows.append(Row("parameter_count", "network", 1e6 * (seed + 1), "network"))
    return rows
