"""The page itself, without a browser: what it says, what it holds, how large it is."""

from __future__ import annotations

import base64
import gzip
import json
import re
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from plastiscope.errors import NotEnoughEvidenceError
from plastiscope.report import write
from plastiscope.report.payload import payload
from plastiscope.store import Row, checkpoint_file, read
from plastiscope.store import write as write_rows


def make_table(out: Path, run="vit", points=6, blocks=3, name="checkpoint") -> pd.DataFrame:
    """Ranks that fall, dormant units that grow; a null at checkpoint 2 of block 1's fc1."""
    for point in range(points):
        rows = []
        for block in range(blocks):
            for component in ("norm1", "fc1", "activation"):
                lost = (point, block, component) == (2, 1, "fc1")
                value = None if lost else 40.123456 - 3 * point - block
                status = "non_finite" if lost else "ok"
                rows.append(
                    Row("effective_rank", "feature", value, component, block, tokens="all",
                        standard_error=0.25, status=status)
                )  # fmt: skip
            rows += [
                Row("effective_rank", "feature", 8.0 - point, "q", block, head, "all")
                for head in range(2)
            ]
            rows.append(
                Row("dormant_fraction", "unit", 0.05 + 0.1 * point, "activation", block,
                    parameters="tau=0.025")
            )  # fmt: skip
        common = {"run": run, "checkpoint": f"{name}-{point}", "step": point * 100, "task": point}
        common |= {"branch": None, "probe": "p", "checkpoint_fingerprint": "f"}
        write_rows(checkpoint_file(out, run, common["checkpoint"]), rows, common, "k", {})
    return read(out)


def parts_of(page: Path) -> tuple[dict, list[dict]]:
    """The data that a browser would read."""
    text = page.read_text("utf-8")
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    packed = re.findall(r'<script type="text/plain" id="chunk-\d+">(.*?)</script>', text)
    chunks = [json.loads(gzip.decompress(base64.b64decode(chunk))) for chunk in packed]
    return json.loads(found[1], parse_constant=lambda name: pytest.fail(name)), chunks


def test_every_value_is_in_the_page(tmp_path):
    """O02: null and a reason; a strict parser reads it (NaN fails the test in `parts_of`)."""
    table = make_table(tmp_path / "t")
    head, chunks = parts_of(write(table, tmp_path / "r.html"))
    assert head["runs"][0]["steps"] == [0, 100, 200, 300, 400, 500]
    number = [(c["metric"], c["level"]) for c in head["chunks"]].index(("effective_rank", "whole"))
    series = [s for s in chunks[number]["series"] if s["b"] == 1 and s["c"] == "fc1"]
    assert series[0]["y"] == [39.123, 36.123, None, 30.123, 27.123, 24.123]
    assert series[0]["e"][0] == 0.25
    assert series[0]["s"] == {"2": "non_finite"}
    total = sum(len([y for y in s["y"] if y is not None]) for c in chunks for s in c["series"])
    assert total == int(table["value"].notna().sum())


def test_the_first_screen_needs_no_script(tmp_path):
    page = write(make_table(tmp_path / "t"), tmp_path / "r.html", warnings=["one gap"])
    text = page.read_text("utf-8").split("<script", 1)[0]
    assert "Losing plasticity" in text and "one gap" in text
    assert "1 without a value: non_finite" in text
    assert "(what was measured holds NaN or infinity)" in text
    assert (
        "<li>Units go dormant: 3 of 3 activation layers; most in block 0 activation, from 5\u00a0% "
        "at step 0 to 55\u00a0% at step 500 (+50 pts).</li>" in text
    )
    assert "A sign is present when 25 % of its series moved" in text
    row = r"block 2 fc1</a> <span>features lose rank</span></td>"
    assert re.search(row + r'<td class="n">38.1</td><td class="n">23.1</td>', text)
    assert '<div class="verdict bad">' in text


def test_good_news_and_thin_evidence_look_different_from_bad(tmp_path):
    table = make_table(tmp_path / "t")
    steady = table.assign(value=table.groupby(["metric"], observed=True)["value"].transform("max"))
    text = write(steady, tmp_path / "a.html").read_text("utf-8").split("<script", 1)[0]
    assert '<div class="verdict good">' in text and "No sign of plasticity loss" in text
    assert "Nothing moved in the direction of plasticity loss." in text
    short = write(table[table["step"] < 200], tmp_path / "b.html").read_text("utf-8")
    assert '<div class="verdict unsure">' in short and "Not enough evidence: 2" in short


def test_the_explorer_opens_with_what_moved_most(tmp_path):
    start = parts_of(write(make_table(tmp_path / "t"), tmp_path / "r.html"))[0]["start"]
    expected = {"run": 0, "metric": "dormant_fraction", "level": "whole", "subject": "unit"}
    expected |= {"tokens": "", "parameters": "tau=0.025", "row": "0|activation||"}
    assert start == expected


def test_given_verdicts_and_names_are_escaped(tmp_path):
    evil = "<script>alert(1)</script>"
    table = make_table(tmp_path / "t", run=evil, name=evil)
    page = write(table, tmp_path / "r.html", [f"{evil} is fine"], title=evil, warnings=[evil])
    text = page.read_text("utf-8")
    assert text.count("alert(1)") > 3
    assert evil not in text
    assert parts_of(page)[0]["runs"][0]["name"] == evil


def test_nothing_is_loaded_from_elsewhere(tmp_path):
    text = write(make_table(tmp_path / "t"), tmp_path / "r.html").read_text("utf-8")
    markup = re.sub(r"<(script|style)\b.*?</\1>", "", text, flags=re.S)
    assert not re.findall(r"""(?:src|href)\s*=\s*["']?(?!#|data:)[^"'>]+""", markup)
    assert "default-src 'none'" in markup


def test_explanations_are_the_metrics_own(tmp_path):
    head, _ = parts_of(write(make_table(tmp_path / "t"), tmp_path / "r.html"))
    assert set(head["explanations"]) == {"effective_rank", "dormant_fraction"}
    assert "tau" in head["explanations"]["dormant_fraction"]["Formula"]


def test_too_little_room_drops_whole_metrics_and_says_so(tmp_path):
    table = make_table(tmp_path / "t")
    packed = payload(table, 300)
    assert packed.left_out
    assert sum(map(len, packed.chunks)) <= 300
    page = write(table, tmp_path / "r.html", budget=300)
    assert f"only in the tables: {', '.join(packed.left_out)}" in page.read_text("utf-8")


def test_a_run_without_steps_is_shown_but_not_diagnosed(tmp_path):
    table = make_table(tmp_path / "t", points=3).assign(step=pd.array([pd.NA], dtype="Int64")[0])
    table["step"] = table["step"].astype("Int64")
    page = write(table, tmp_path / "r.html")
    assert "vit: its checkpoints name no step" in page.read_text("utf-8")
    head, _ = parts_of(page)
    assert head["runs"][0]["steps"] == [None] * 3
    assert head["runs"][0]["checkpoints"] == [f"checkpoint-{n}" for n in range(3)]


def test_an_empty_table_is_refused(tmp_path):
    with pytest.raises(NotEnoughEvidenceError, match="nothing to report"):
        write(make_table(tmp_path / "t").iloc[:0], tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


def test_two_hundred_checkpoints_of_a_12_block_vit_stay_under_8_mb(tmp_path):
    rng = np.random.default_rng(0)
    parts = ["norm1", "attention_output", "residual1", "norm2", "fc1", "activation", "fc2"]
    parts += ["residual2", "q", "k", "v"]
    places = [(b, c, np.nan) for b in range(12) for c in parts]
    places += [(b, c, h) for b in range(12) for c in "qkv" for h in range(12)]
    metrics = ["effective_rank", *(f"metric{n}" for n in range(5))]
    block, component, head = (np.array(x, object) for x in zip(*places, strict=True))
    count, points = len(places) * len(metrics), 200
    table = pd.DataFrame(
        {
            "run": "vit",
            "step": np.repeat(np.arange(points) * 500, count),
            "block": np.tile(block, points * len(metrics)),
            "component": np.tile(component, points * len(metrics)),
            "head": np.tile(head, points * len(metrics)),
            "metric": np.tile(np.repeat(metrics, len(places)), points),
            "value": rng.random(points * count) * 100,
            "standard_error": rng.random(points * count),
        }
    )
    table["checkpoint"] = table["step"].astype(str)
    for name in ("block", "head"):
        table[name] = pd.array(table[name], dtype="Int64")
    constant = {"subject": "feature", "tokens": "all", "parameters": "", "probe": "p"}
    constant |= {"status": "ok", "branch": None, "index": pd.NA, "task": pd.NA, "segment": 0}
    table = table.assign(**constant)
    for name in ("run", "checkpoint", "component", "metric", "subject", "tokens", "status"):
        table[name] = table[name].astype("category")
    started = time.process_time()
    page = write(table, tmp_path / "r.html")
    assert page.stat().st_size < 8_000_000
    assert time.process_time() - started < 60
    head, _ = parts_of(page)
    kept = {(c["metric"], c["level"]) for c in head["chunks"]}
    assert {("effective_rank", "whole"), ("effective_rank", "heads")} <= kept
    assert {(name, "whole") for name in metrics} <= kept
    assert len(kept) == 12 or "so only in the tables" in page.read_text("utf-8")
