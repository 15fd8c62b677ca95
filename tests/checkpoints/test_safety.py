"""What a file contains is never executed or imported, and can't take the memory or the time."""

from __future__ import annotations

import io
import os
import pickle
import struct
import sys
import time
import types
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from plastiscope.checkpoints import Options, discover
from plastiscope.errors import UnreadableError


class Marker:
    """Creates a file when it is unpickled by the ordinary machine."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def ghost(module: str, name: str, **attributes):
    """An instance of a class whose module is gone once the file is saved."""
    made = types.ModuleType(module)
    cls = type(name, (), {"__module__": module})
    setattr(made, name, cls)
    sys.modules[module] = made
    instance = cls()
    instance.__dict__.update(attributes)
    return instance


def test_unknown_class_is_stubbed_and_named(tmp_path, table, one_run):  # L01
    weights = table()
    cfg = ghost("ghostpkg", "Cfg", width=7)
    torch.save({"state_dict": weights, "hyper_parameters": {"cfg": cfg}}, tmp_path / "a_1.pt")
    del sys.modules["ghostpkg"]
    (checkpoint,) = one_run(tmp_path).checkpoints
    state = checkpoint.open()
    assert len(state.tensors) == 4
    for name, tensor in weights.items():
        assert torch.equal(state.read(name), tensor)
    assert state.stubs == ("ghostpkg.Cfg",)
    assert any("ghostpkg.Cfg" in note for note in state.notes)
    assert state.extras["hyper_parameters"]["cfg"] == {"__class__": "ghostpkg.Cfg", "width": 7}
    assert any("ghostpkg.Cfg" in note for note in one_run(tmp_path).notes)


@pytest.mark.parametrize("new", [True, False])
def test_nothing_is_executed(tmp_path, table, one_run, new):  # L01
    marker = tmp_path / "executed"
    path = tmp_path / "evil_1.pt"
    content = {"state_dict": table(), "x": Marker(marker)}
    torch.save(content, path, _use_new_zipfile_serialization=new)
    (checkpoint,) = one_run(tmp_path).checkpoints
    assert len(checkpoint.open().tensors) == 4
    assert not marker.exists()
    assert any("mkdir" in name for name in checkpoint.open().stubs)
    # The negative control: the file does execute where it is trusted.
    one_run(tmp_path, trust_pickle=True)
    assert marker.exists()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6))
        self.scale = torch.nn.Parameter(torch.full((1,), 3.0))
        self.register_buffer("hidden", torch.zeros(5), persistent=False)


@pytest.mark.parametrize("new", [True, False])
def test_pickled_module_of_another_repository(tmp_path, tensors, monkeypatch, new):  # L02
    module = types.ModuleType("models.net")
    module.Net = Net
    monkeypatch.setattr(Net, "__module__", "models.net")
    sys.modules["models"], sys.modules["models.net"] = types.ModuleType("models"), module
    model = Net()
    path = tmp_path / "model.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(model, path, _use_new_zipfile_serialization=new)
    del sys.modules["models"], sys.modules["models.net"]

    (tmp_path / "models").mkdir()
    for name in ("__init__.py", "net.py"):
        (tmp_path / "models" / name).write_text("open('imported', 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    found, expected = tensors(path), model.state_dict()
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)
    assert not (tmp_path / "imported").exists()
    state = discover(path)[0].checkpoints[0].open()
    assert "models.net.Net" in state.stubs
    assert state.tensors["body.1.running_mean"].kind == "buffer"


def numpy_one_scalar() -> bytes:
    """A pickle of {"w": array, "best_loss": float64(1.5)} under numpy 1's module path."""
    data = pickle.dumps({"weight": np.arange(6.0).reshape(2, 3), "best_loss": np.float64(1.5)}, 2)
    return data.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def test_numpy_scalars_of_both_module_paths(tmp_path, table):  # L03
    torch.save({"state_dict": table(), "best_loss": np.float64(1.0)}, tmp_path / "new.pt")
    (tmp_path / "old.pkl").write_bytes(numpy_one_scalar())
    new = discover(tmp_path / "new.pt")[0].checkpoints[0].open()
    assert new.extras["best_loss"] == 1.0 and new.stubs == ()
    old = discover(tmp_path / "old.pkl")[0].checkpoints[0].open()
    assert old.extras["best_loss"] == 1.5 and old.stubs == ()
    assert torch.equal(old.read("weight"), torch.arange(6.0).reshape(2, 3).double())


@pytest.mark.parametrize("protocol", range(6))
def test_numpy_arrays_of_every_protocol(tmp_path, protocol):
    arrays = {
        "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
        "b.weight": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "c.bias": np.arange(3, dtype=">f4"),
    }
    path = tmp_path / "arrays.pkl"
    path.write_bytes(pickle.dumps(arrays, protocol))
    state = discover(path)[0].checkpoints[0].open()
    for name, array in arrays.items():
        expected = torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
        assert torch.equal(state.read(name), expected), name


def pickled(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts) + b"."


BOMBS = {
    # A memo index of two billion makes the C machine allocate 32 GB.
    "memo": pickled(b"N", b"r" + struct.pack("<I", 2**31 - 1)),
    "bytes": pickled(b"\x8e" + struct.pack("<Q", 2**40)),
    "bytearray": pickled(b"\x96" + struct.pack("<Q", 2**40)),
    "frame": pickled(b"\x95" + struct.pack("<Q", 2**40)),
    "long": pickled(b"\x8b" + struct.pack("<I", 2**31 - 1)),
    "deep": pickled(b"]" * 200_000 + b"a" * 199_999),
    "unhashed": pickled(b")" + b"\x940h\x00h\x00\x86\x94" + b"2\x86" * 100 + b"}h\x00"),
    "extension": pickled(b"\x82\x01"),
    "no_end": b"\x80\x04" + b"N" * 100,
    "call": pickled(b"cbuiltins\nbytes\n\x8a\x05\x00\x00\x00\x00\x10\x85R"),
    "list_of_int": pickled(b"cbuiltins\nlist\nK\x05\x85R"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_pickle_bombs_are_one_line(tmp_path, name):
    path = tmp_path / "bomb.pkl"
    path.write_bytes(BOMBS[name])
    before = time.perf_counter()
    with pytest.raises(UnreadableError) as raised:
        discover(path)
    assert time.perf_counter() - before < 5
    assert len(str(raised.value)) > len("bomb.pkl: ") and "\n" not in str(raised.value)


def test_key_of_nested_tuples_takes_no_exponential_time(tmp_path):
    key = pickled(b"}N", b"2\x86" * 120, b"K\x01s")
    path = tmp_path / "keys.pkl"
    path.write_bytes(key)
    before = time.perf_counter()
    with pytest.raises(UnreadableError, match="no weights"):
        discover(path)
    assert time.perf_counter() - before < 2


def test_laughs_are_bounded(tmp_path):
    level: object = np.zeros(3, np.float32)
    for _ in range(40):
        level = [level, level]
    path = tmp_path / "laughs.pkl"
    path.write_bytes(pickle.dumps({"state_dict": level}))
    before = time.perf_counter()
    assert len(discover(path)[0].checkpoints[0].open().tensors) <= 128
    assert time.perf_counter() - before < 5


def test_tensor_larger_than_its_storage_is_refused(tmp_path):
    path = tmp_path / "bomb.pt"
    torch.save({"w.weight": torch.zeros(1).expand(1 << 20, 1 << 20)}, path)
    with pytest.raises(UnreadableError, match="declares 1099511627776 elements over a storage"):
        discover(path)


def test_compressed_storage_bomb_is_refused(tmp_path):
    plain = io.BytesIO()
    torch.save({"w.weight": torch.zeros(1 << 22)}, plain)
    path = tmp_path / "bomb.pt"
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        for name in source.namelist():
            out.writestr(name, source.read(name))
    assert path.stat().st_size < 1 << 16
    with pytest.raises(UnreadableError, match="decompression bomb"):
        discover(path)


def test_compressed_archive_is_read(tmp_path, table, tensors):
    plain, weights = io.BytesIO(), table()
    torch.save(weights, plain)
    path = tmp_path / "packed.pt"
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as out:
        for name in source.namelist():
            out.writestr(name, source.read(name))
    found = tensors(path)
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_wrong_options_name_the_known_ones():
    from plastiscope.errors import UsageError

    with pytest.raises(UsageError, match="did you mean 'name'"):
        Options(order="nam")
    with pytest.raises(UsageError, match="known: ema, raw"):
        Options(weights="averaged")


def test_missing_path_is_a_usage_error(tmp_path):
    from plastiscope.errors import UsageError

    with pytest.raises(UsageError, match="no such file or directory"):
        discover(tmp_path / "nothing")
