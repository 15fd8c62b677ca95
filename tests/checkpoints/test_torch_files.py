"""Every way torch has written tensors, read to the same values."""

from __future__ import annotations

import io
import pickle
import struct
import tarfile
import warnings
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from plastiscope.checkpoints import discover
from plastiscope.errors import UnreadableError


def same(found, expected) -> bool:
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    if found.dtype.itemsize == 1:
        found, expected = found.view(torch.uint8), expected.view(torch.uint8)
    return torch.equal(found, expected)


DTYPES = [
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool),
]


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("new", [True, False])
def test_every_protocol_in_zip_and_legacy(tmp_path, table, tensors, protocol, new):
    weights = {**table(), "steps.weight": torch.arange(6.0).reshape(2, 3).t()}
    path = tmp_path / "a.pt"
    torch.save(weights, path, pickle_protocol=protocol, _use_new_zipfile_serialization=new)
    found = tensors(path)
    assert list(found) == list(weights)
    assert all(same(found[name], weights[name]) for name in weights)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_element_type(tmp_path, tensors, dtype):
    values = (torch.arange(24) % 5).reshape(4, 6).to(dtype)
    torch.save({"w.weight": values, "v.weight": values[1:3]}, tmp_path / "zip.pt")
    torch.save({"w.weight": values}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    save_file({"w.weight": values}, tmp_path / "safe.safetensors")
    for name in ("zip.pt", "old.pt", "safe.safetensors"):
        assert same(tensors(tmp_path / name)["w.weight"], values), name
    assert same(tensors(tmp_path / "zip.pt")["v.weight"], values[1:3])


def test_tensors_are_mapped_and_writing_to_them_changes_no_file(tmp_path, table, tensors):
    path = tmp_path / "a.pt"
    torch.save(table(), path)
    before = path.read_bytes()
    found = tensors(path)["fc1.weight"]
    found.zero_()
    assert path.read_bytes() == before


def test_gpu_locations_are_ignored(tmp_path, table, tensors):  # L33
    plain = io.BytesIO()
    torch.save(table(), plain)
    path = tmp_path / "gpu.pt"
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(path, "w") as out:
        for name in source.namelist():
            data = source.read(name)
            if name.endswith("data.pkl"):
                data = data.replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:7")
                assert b"cuda:7" in data
            out.writestr(name, data)
    found = tensors(path)
    assert all(same(found[n], t) and found[n].device.type == "cpu" for n, t in table().items())


def test_big_endian_file(tmp_path, tensors):
    plain, values = io.BytesIO(), torch.arange(6.0).reshape(2, 3)
    torch.save({"w.weight": values}, plain)
    path = tmp_path / "big.pt"
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(path, "w") as out:
        for name in source.namelist():
            data = source.read(name)
            if name.endswith("byteorder"):
                data = b"big"
            if name.endswith("data/0"):
                data = values.numpy().astype(">f4").tobytes()
            out.writestr(name, data)
    assert same(tensors(path)["w.weight"], values)


def test_view_drags_its_storage(tmp_path, one_run):  # L11
    base = torch.randn(1000, 1000)
    torch.save({"rows.weight": base[:2]}, tmp_path / "step_1.pt")
    assert (tmp_path / "step_1.pt").stat().st_size > 4_000_000
    state = one_run(tmp_path).checkpoints[0].open()
    assert state.tensors["rows.weight"].shape == (2, 1000)
    assert torch.equal(state.read("rows.weight"), base[:2])
    assert any(
        "rows.weight: a view of 8000 bytes that drags a storage of 4000000" in n
        for n in state.notes
    )


def test_bf16_equals_its_float32_copy(tmp_path, tensors):  # L29
    values = torch.randn(16, 16).bfloat16()
    torch.save({"w.weight": values}, tmp_path / "half.pt")
    torch.save({"w.weight": values.float()}, tmp_path / "full.pt")
    half, full = (tensors(tmp_path / n)["w.weight"] for n in ("half.pt", "full.pt"))
    assert half.dtype == torch.bfloat16 and torch.equal(half.double(), full.double())


def test_meta_tensor_has_no_data(tmp_path, one_run):  # L28
    torch.save(
        {"a.weight": torch.empty(3, 4, device="meta"), "b.weight": torch.ones(2, 2)},
        tmp_path / "step_1.pt",
    )
    state = one_run(tmp_path).checkpoints[0].open()
    assert {n: i.kind for n, i in state.tensors.items()} == {
        "a.weight": "no_data",
        "b.weight": "weight",
    }
    assert torch.equal(state.read("b.weight"), torch.ones(2, 2))
    with pytest.raises(UnreadableError, match="no data"):
        state.read("a.weight")


def test_quantised_and_sparse_tensors(tmp_path, one_run):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = torch.randn(4, 5)
        whole = torch.quantize_per_tensor(values, 0.1, 3, torch.qint8)
        rows = torch.quantize_per_channel(
            values, torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0, 1, 2, 3]), 0, torch.quint8
        )
        sparse = torch.tensor([[0.0, 2.0], [3.0, 0.0]]).to_sparse()
        torch.save(
            {"q.weight": whole, "r.weight": rows, "s.weight": sparse}, tmp_path / "step_1.pt"
        )
        state = one_run(tmp_path).checkpoints[0].open()
        torch.testing.assert_close(state.read("q.weight"), whole.dequantize())
        torch.testing.assert_close(state.read("r.weight"), rows.dequantize())
        torch.testing.assert_close(state.read("s.weight"), sparse.to_dense())
    assert any("dequantised from torch.int8" in note for note in state.notes)


class Twice(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(x))


def test_torchscript_archive(tmp_path, tensors):
    model = Twice().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(model).save(str(tmp_path / "m.pt"))
    found = tensors(tmp_path / "m.pt")
    expected = model.state_dict()
    assert set(expected) <= set(found)
    assert all(same(found[n], t) for n, t in expected.items())
    assert discover(tmp_path / "m.pt")[0].checkpoints[0].format == "torchscript"


def test_tar_archive_of_2016(tmp_path, tensors):
    values = torch.arange(6.0)
    head = struct.pack("<q", 6)
    storage = pickle.dumps(1, 2) + _global_triple() + head + values.numpy().tobytes()
    obj = (
        b"\x80\x02}(U\x08a.weightctorch._utils\n_rebuild_tensor\n((U\x07storagectorch\nFloatStorage\n"
        b"U\x010U\x03cpuK\x06tQK\x00K\x02K\x03\x86K\x03K\x01\x86tRu."
    )
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, data in (("sys_info", b""), ("pickle", obj), ("storages", storage)):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    assert torch.equal(tensors(tmp_path / "a.tar")["a.weight"], values.reshape(2, 3))


def _global_triple() -> bytes:
    return b"\x80\x02(U\x010U\x03cpuctorch\nFloatStorage\nt."


def test_npz(tmp_path, one_run):
    arrays = {
        "a.weight": np.arange(6.0).reshape(2, 3),
        "f.weight": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
        "b.bias": np.arange(3, dtype=">f8"),
    }
    np.savez(tmp_path / "step_1.npz", **arrays, names=np.array([object()], dtype=object))
    np.savez_compressed(tmp_path / "step_2.npz", **arrays)
    run = one_run(tmp_path)
    assert [c.format for c in run.checkpoints] == ["npz", "npz"]
    for checkpoint in run.checkpoints:
        state = checkpoint.open()
        for name, array in arrays.items():
            expected = torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
            assert torch.equal(state.read(name), expected), (checkpoint.name, name)
    assert any("array of Python objects" in note for note in run.notes)


def test_fingerprint_is_of_the_content(tmp_path, table):
    def print_of(name: str) -> str:
        return discover(tmp_path / name)[0].checkpoints[0].fingerprint

    torch.save(table(1), tmp_path / "a.pt")
    torch.save(table(1), tmp_path / "renamed.pt")
    save_file(table(1), tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes())
    assert print_of("a.pt") == print_of("renamed.pt")
    assert print_of("a.safetensors") == print_of("b.safetensors")
    first, safe = print_of("a.pt"), print_of("a.safetensors")
    changed = table(1)
    changed["fc2.bias"][1] += 1e-6
    torch.save(changed, tmp_path / "a.pt")
    save_file(changed, tmp_path / "a.safetensors")
    assert print_of("a.pt") != first and print_of("a.safetensors") != safe
