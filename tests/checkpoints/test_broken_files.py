"""Each broken file is one line that names the cause; the others are analysed."""

from __future__ import annotations

import json
import struct
import tarfile
import zipfile

import pytest
import torch
from safetensors.torch import save_file

from plastiscope.checkpoints import Options, discover
from plastiscope.errors import UNREADABLE, UnreadableError

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 3146230\n" % (b"a" * 64)


def refused(path) -> str:
    with pytest.raises(UnreadableError) as raised:
        discover(path)
    assert raised.value.status == UNREADABLE
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_partial_last_checkpoints_are_listed_not_fatal(tmp_path, table, one_run):  # L06
    for step in (1, 2, 3, 4, 5):
        torch.save(table(step), tmp_path / f"step_{step}.pt")
    half = tmp_path / "step_4.pt"
    half.write_bytes(half.read_bytes()[: half.stat().st_size // 2])
    (tmp_path / "step_5.pt").write_bytes(b"")
    run = one_run(tmp_path)
    assert [c.step for c in run.checkpoints] == [1, 2, 3]
    reasons = {s.name: s.reason for s in run.skipped}
    assert set(reasons) == {"step_4.pt", "step_5.pt"}
    assert reasons["step_4.pt"].startswith("truncated")
    assert reasons["step_5.pt"].startswith("empty file (0 bytes)")
    assert all(s.unreadable for s in run.skipped)
    with pytest.raises(UnreadableError, match=r"step_4.pt: truncated"):
        discover(tmp_path, Options(strict=True))


def test_a_folder_of_broken_files_is_a_run_of_its_own(tmp_path, table):
    for folder in ("run1", "run10", "run2"):
        (tmp_path / folder).mkdir()
        torch.save(table(1), tmp_path / folder / "step_1.pt")
    (tmp_path / "run10" / "step_1.pt").write_bytes(b"")
    (tmp_path / "run10" / "step_2.pt").write_bytes(b"")
    runs = discover(tmp_path)
    assert [(r.name, len(r.checkpoints), len(r.skipped)) for r in runs] == [
        ("run1", 1, 0),
        ("run2", 1, 0),
        ("run10", 0, 2),
    ]
    assert runs[2].path == str(tmp_path / "run10")


@pytest.mark.parametrize("cut", [0.02, 0.3, 0.7, 0.99])
@pytest.mark.parametrize("new", [True, False])
def test_cut_files_say_truncated(tmp_path, table, cut, new):
    path = tmp_path / "a.pt"
    torch.save(table(), path, _use_new_zipfile_serialization=new)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * cut)])
    assert "truncated" in refused(path)


def test_broken_safetensors(tmp_path, table):  # L07
    good = tmp_path / "good.safetensors"
    save_file(table(), good)
    data = good.read_bytes()
    cases = {
        "cut": (data[:-4], "truncated"),
        "empty": (b"", "empty file"),
        "lfs": (LFS, "Git LFS pointer, 3146230 bytes expected"),
        "short": (data[:6], "not a checkpoint"),
        "header": (struct.pack("<Q", 1 << 40) + data[8:], "absurd header of 1099511627776 bytes"),
        "long": (struct.pack("<Q", 1 << 26) + data[8:], "truncated: the header alone needs"),
        "json": (data[:8] + b"[" * (len(data) - 8), "corrupt safetensors header"),
    }
    for name, (content, message) in cases.items():
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(content)
        assert message in refused(path), name


def test_pickle_under_a_safetensors_name_is_read(tmp_path, table, tensors):  # L07 (d)
    weights = table()
    torch.save(weights, tmp_path / "renamed.safetensors")
    save_file(weights, tmp_path / "renamed.pt")
    for name in ("renamed.safetensors", "renamed.pt"):
        found = tensors(tmp_path / name)
        assert all(torch.equal(found[n], weights[n]) for n in weights)


def test_header_that_lies(tmp_path):
    def write(entry) -> str:
        header = json.dumps({"w": entry}).encode()
        path = tmp_path / "lie.safetensors"
        path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 16)
        return refused(path)

    good = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
    assert "doesn't fit its shape" in write({**good, "shape": [3, 2]})
    assert "truncated" in write({**good, "data_offsets": [16, 32]})
    assert "range" in write({**good, "data_offsets": [16, 0]})
    assert "proper shape" in write({**good, "shape": [-2, -2]})
    assert "proper shape" in write({**good, "shape": "4"})


@pytest.mark.parametrize("name", ["a.pt", "a.bin", "a.safetensors", "a.zip", "a.ckpt"])
def test_lfs_pointer_under_any_name(tmp_path, name):  # L08
    (tmp_path / name).write_bytes(LFS)
    assert "Git LFS pointer, 3146230 bytes expected: git lfs pull" in refused(tmp_path)


def test_text_files_in_place_of_weights(tmp_path):
    cases = {
        b"<!DOCTYPE html><html><body>Sign in</body></html>": "HTML",
        b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>": "HTML or XML",
        b"../step_10/model.pt": "text of a symbolic link to ../step_10/model.pt",
        b"abc": "text, not weights: 'abc'",
        b"\0" * 4096: "nothing but zero bytes",
        b"\x1f\x8b" + b"\x07" * 100: "a gzip archive",
        bytes(range(256)) * 20: "not a checkpoint",
    }
    for content, message in cases.items():
        path = tmp_path / "weights.pt"
        path.write_bytes(content)
        assert message in refused(path), content[:20]


def test_bit_flip_is_found_by_the_checksum(tmp_path, one_run):
    weights = {"w.weight": torch.arange(4096.0)}
    path = tmp_path / "step_1.pt"
    torch.save(weights, path)
    data = bytearray(path.read_bytes())
    at = data.find(torch.arange(100.0, 104.0).numpy().tobytes())
    data[at] ^= 1
    path.write_bytes(data)
    state = one_run(tmp_path).checkpoints[0].open()
    with pytest.raises(UnreadableError, match=r"damaged.*checksum"):
        state.read("w.weight")


def test_flip_in_the_pickle_is_found(tmp_path, table):
    path = tmp_path / "step_1.pt"
    torch.save(table(), path)
    data = bytearray(path.read_bytes())
    at = data.find(b"fc1.weight")
    data[at] ^= 1
    path.write_bytes(data)
    assert "data.pkl fails its checksum" in refused(path)


def test_file_saved_without_checksums_is_read(tmp_path, table, tensors):
    old = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(table(1), tmp_path / "a.pt")
        torch.save(table(2), tmp_path / "b.pt")
    finally:
        torch.serialization.set_crc32_options(old)
    assert torch.equal(tensors(tmp_path / "a.pt")["fc1.weight"], table(1)["fc1.weight"])
    prints = [discover(tmp_path / n)[0].checkpoints[0].fingerprint for n in ("a.pt", "b.pt")]
    assert prints[0] != prints[1]


def test_other_archives(tmp_path, table):
    with zipfile.ZipFile(tmp_path / "notes.zip", "w") as archive:
        archive.writestr("notes.txt", "hello")
    assert "without a known checkpoint in it (holds notes.txt)" in refused(tmp_path / "notes.zip")
    (tmp_path / "x").write_text("x")
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        archive.add(tmp_path / "x", "x")
    assert "torch didn't write" in refused(tmp_path / "x.tar")


def test_formats_of_other_worlds_are_named(tmp_path):
    (tmp_path / "model.h5").write_bytes(b"\x89HDF")
    assert "model.h5: an HDF5 (Keras) file: save the weights" in refused(tmp_path)


def test_folder_without_checkpoints(tmp_path):
    assert "no checkpoint in it" in refused(tmp_path)
    (tmp_path / "notes.txt").write_text("hello")
    assert "no checkpoint in it" in refused(tmp_path)
