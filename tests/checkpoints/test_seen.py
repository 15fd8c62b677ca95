"""A further checkpoint doesn't open the earlier ones, and no change of a file goes unnoticed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from plastiscope.checkpoints import Options, Seen, discover, places
from tests.checkpoints.test_folders import zero_folder

fsspec = pytest.importorskip("fsspec", reason="fsspec isn't installed")


@pytest.fixture
def run(tmp_path, table, monkeypatch) -> Path:
    """Three checkpoints, old enough to be told from a change made now."""
    monkeypatch.setattr(places, "_SETTLED", 0)
    folder = tmp_path / "run"
    folder.mkdir()
    for step in (1, 2, 30):
        weights = table(step)
        weights["fc2.bias"] = weights["fc2.bias"].double()
        weights["tied"] = weights["fc1.weight"]
        optimizer = {"state": {0: {"step": torch.tensor(float(step))}}, "param_groups": []}
        content = {"model": weights, "optimizer": optimizer, "global_step": step}
        torch.save(content, folder / f"step_{step}.pt")
    return folder


@pytest.fixture
def opened(monkeypatch) -> list[str]:
    """The names of the files whose content is asked for, local or remote."""
    names: list[str] = []
    for kind in (places.LocalPlace, places.RemotePlace):

        def blob(self, path, real=kind.blob):
            names.append(Path(path).name)
            return real(self, path)

        monkeypatch.setattr(kind, "blob", blob)
    return names


def look(folder, file, **options):
    """The only run, with the memory of the looks before."""
    seen = Seen(file)
    (found,) = discover(folder, Options(**options), seen)
    seen.save([str(folder)])
    return found


def facts(run):
    """All that a run says of itself, without the functions that open it."""
    kept = [(c.name, c.path, c.format, c.step, c.step_source, c.size) for c in run.checkpoints]
    prints = [(c.fingerprint, c.task) for c in run.checkpoints]
    return kept, prints, run.skipped, run.breaks, run.notes


def test_second_look_opens_nothing_and_says_the_same(run, opened, tmp_path):
    first = look(run, tmp_path / "seen.parquet")
    assert set(opened) == {"step_1.pt", "step_2.pt", "step_30.pt"}
    opened.clear()
    second = look(run, tmp_path / "seen.parquet")
    assert opened == [] and facts(second) == facts(first)
    assert [c.step for c in second.checkpoints] == [1, 2, 30]
    one, other = (torch.load(run / "step_2.pt")["model"], second.checkpoints[1].open())
    assert all(torch.equal(other.read(name), one[name]) for name in one)
    assert other.tensors["tied"].alias_of == "fc1.weight"


def test_what_is_remembered_is_what_was_found(run, tmp_path):
    from plastiscope.checkpoints.members import Source
    from plastiscope.checkpoints.reading import examine
    from plastiscope.checkpoints.units import find_units

    source = Source(places.LocalPlace(), Options(), None)
    look(run, tmp_path / "seen.parquet")
    seen = Seen(tmp_path / "seen.parquet")
    for unit in find_units(source.place, str(run)).units:
        fresh = examine(source.place, unit, source.options, None, source.identity)
        kept = seen.recall(unit, unit.path, source.stamp(unit))
        assert kept is not None and torch.equal(kept.sample, fresh.sample)
        assert kept.sample.dtype == torch.float64 and len(kept.sample) > 30
        assert dict(kept.tensors) == dict(fresh.tensors)
        assert list(kept.tensors) == list(fresh.tensors)
        names = ("unit", "format", "numbers", "optimizer_step", "notes", "task", "fingerprint")
        assert [getattr(kept, n) for n in names] == [getattr(fresh, n) for n in names]
        assert kept.optimizer_step == int(unit.name[5:-3])


def test_only_the_new_checkpoint_is_opened(run, opened, tmp_path, table):
    look(run, tmp_path / "seen.parquet")
    opened.clear()
    torch.save({"model": table(9), "global_step": 40}, run / "step_40.pt")
    found = look(run, tmp_path / "seen.parquet")
    assert set(opened) == {"step_40.pt"} and [c.step for c in found.checkpoints][-1] == 40


def test_same_size_and_same_time_of_change_is_noticed(run, tmp_path):
    first = look(run, tmp_path / "seen.parquet")
    file = run / "step_2.pt"
    before = file.stat()
    content = torch.load(file)
    content["model"]["fc1.weight"][0, 0] += 1
    torch.save(content, file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    second = look(run, tmp_path / "seen.parquet")
    changed = [
        a.fingerprint != b.fingerprint
        for a, b in zip(first.checkpoints, second.checkpoints, strict=True)
    ]
    assert changed == [False, True, False]
    assert facts(second) == facts(look(run, None))


def test_file_written_a_moment_ago_is_looked_at_again(run, opened, tmp_path, monkeypatch):
    monkeypatch.setattr(places, "_SETTLED", 3_600_000_000_000)
    look(run, tmp_path / "seen.parquet")
    opened.clear()
    look(run, tmp_path / "seen.parquet")
    assert set(opened) == {"step_1.pt", "step_2.pt", "step_30.pt"}


def test_another_way_of_reading_is_not_answered_from_memory(run, tmp_path):
    look(run, tmp_path / "seen.parquet")
    found = look(run, tmp_path / "seen.parquet", rename=(("fc1.", "first."),))
    assert "first.weight" in found.checkpoints[0].open().tensors
    assert facts(found) == facts(look(run, None, rename=(("fc1.", "first."),)))


def test_file_beside_the_weights_counts(tmp_path, table, monkeypatch):
    monkeypatch.setattr(places, "_SETTLED", 0)
    folder = tmp_path / "run" / "checkpoint-1"
    folder.mkdir(parents=True)
    save_file(table(), folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 7}))
    assert look(tmp_path / "run", tmp_path / "seen.parquet").checkpoints[0].step == 7
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 8}))
    assert look(tmp_path / "run", tmp_path / "seen.parquet").checkpoints[0].step == 8


def test_gone_checkpoints_are_forgotten_and_other_folders_kept(run, tmp_path, table):
    file = tmp_path / "seen.parquet"
    (tmp_path / "run2").mkdir()
    torch.save(table(), tmp_path / "run2" / "step_5.pt")
    look(tmp_path / "run2", file)
    look(run, file)
    (run / "step_1.pt").unlink()
    look(run, file)
    names = [Path(path).name for path in pq.read_table(file)["path"].to_pylist()]
    assert sorted(names) == ["step_2.pt", "step_30.pt", "step_5.pt"]


@pytest.mark.parametrize("damage", ["text", "cut", "other table", "wrong values"])
def test_damaged_memory_is_no_memory(run, tmp_path, damage):
    file = tmp_path / "seen.parquet"
    first = look(run, file)
    table = pq.read_table(file)
    if damage == "text":
        file.write_text("not a table")
    elif damage == "cut":
        file.write_bytes(file.read_bytes()[:-40])
    elif damage == "other table":
        pq.write_table(table.drop_columns(["stamp"]), file)
    else:
        rows = table.to_pylist()
        spoilt = [{**row, "tensors": '[["w", [2], "save", "weight", null]]'} for row in rows]
        pq.write_table(type(table).from_pylist(spoilt, schema=table.schema), file)
    assert facts(look(run, file)) == facts(first)


def test_remote_objects_are_known_by_the_hash_of_the_store(opened, tmp_path, table, monkeypatch):
    system = fsspec.filesystem("memory")
    real = type(system).info
    etags = {"/seen/step_1.pt": "a", "/seen/step_2.pt": "b"}

    def info(self, path, **kwargs):
        return {**real(self, path, **kwargs), "ETag": etags.get(path)}

    monkeypatch.setattr(type(system), "info", info)
    for step in (1, 2):
        with system.open(f"/seen/step_{step}.pt", "wb") as file:
            torch.save({"model": table(step), "global_step": step}, file)
    try:
        first = look("memory://seen", tmp_path / "seen.parquet")
        opened.clear()
        assert facts(look("memory://seen", tmp_path / "seen.parquet")) == facts(first)
        assert opened == []
        etags["/seen/step_2.pt"] = "c"
        look("memory://seen", tmp_path / "seen.parquet")
        assert set(opened) == {"step_2.pt"}
    finally:
        system.rm("/seen", recursive=True)


def test_placeholder_beside_zero_shards_does_not_identify_them(tmp_path, table, one_run):
    # Under ZeRO-3 the file of the model's own name is the same at every step.
    for step in (40, 80):
        folder = tmp_path / f"checkpoint-{step}"
        zero_folder(folder / f"global_step{step}", table(step), 3)
        torch.save({n: torch.empty(0) for n in table()}, folder / "pytorch_model.bin")
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    first, second = one_run(tmp_path).checkpoints
    assert first.fingerprint != second.fingerprint


@pytest.mark.parametrize("name", ["config.json", "optimizer.pt"])
def test_file_beside_the_weights_identifies_them_too(tmp_path, table, one_run, name):
    folder = tmp_path / "run" / "checkpoint-1"
    folder.mkdir(parents=True)
    save_file(table(), folder / "model.safetensors")
    (folder / "config.json").write_text('{"hidden_act": "relu"}')
    torch.save({"state": {}, "param_groups": []}, folder / "optimizer.pt")
    (before,) = one_run(tmp_path / "run").checkpoints
    if name == "config.json":
        (folder / name).write_text('{"hidden_act": "gelu"}')
    else:
        torch.save({"state": {}, "param_groups": [{"lr": 0.1}]}, folder / name)
    (after,) = one_run(tmp_path / "run").checkpoints
    assert before.fingerprint != after.fingerprint


def test_flipped_bits_are_never_read_as_other_rows(run, tmp_path):
    file = tmp_path / "seen.parquet"
    first = facts(look(run, file))
    whole = file.read_bytes()
    for at in range(8, len(whole), 97):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        assert facts(look(run, file)) == first, at
