"""Mutate good checkpoints and read them: no crash, no hang, no execution, bounded memory.

    python tests/checkpoints/fuzz.py --count 20000 --format safetensors

Each mutant is found, opened and read in this process, under a limit of address space; one that
takes longer than the limit, raises anything but UnreadableError, or leaves the marker file is a
failure and is kept.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import random
import resource
import signal
import struct
import sys
import tarfile
import tempfile
import time
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save as save_safetensors

from plastiscope.checkpoints import discover
from plastiscope.errors import UnreadableError

SECONDS = 20
EXTRA_BYTES = 4 << 30
TOKENS = (
    *(b"\xff" * 4, b"\x00" * 8, b"\xff" * 8, b"\x7f\xff\xff\xff", b"PK\x03\x04", b"PK\x01\x02"),
    *(
        b"PK\x05\x06",
        b"\x80\x04",
        b"R",
        b"b",
        b"\x81",
        b"Q",
        b".",
        b"cos\nsystem\n",
        b"r\xff\xff\xff\x7f",
    ),
    *(b"\x8e\xff\xff\xff\xff\x00\x00\x00\x00", b"\x96\xff\xff\xff\xff\xff\x00\x00\x00", b"t", b"("),
    *(b"{", b"}", b'"shape":[', b"[99999999999]", b"-1", b"\x8a\xff"),
)


class Weights(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(5, 6)
        self.norm = torch.nn.BatchNorm1d(6)


class Marks:
    """Leaves a folder behind where a pickle is executed."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (os.mkdir, (self.path,))


def seeds(marker: str) -> dict[str, list[tuple[str, bytes]]]:
    """Good files by format: (name, content)."""
    torch.manual_seed(0)
    model = Weights()
    optimizer = torch.optim.Adam(model.parameters())
    model.norm(model.body(torch.randn(4, 5))).sum().backward()
    optimizer.step()
    whole = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": 3,
        "lr": np.float64(0.1),
        "args": argparse.Namespace(width=6),
        "evil": Marks(marker),
    }
    plain = {n: t.numpy() for n, t in model.state_dict().items()}

    def saved(content: object, *, new: bool, protocol: int = 2) -> bytes:
        out = io.BytesIO()
        torch.save(content, out, _use_new_zipfile_serialization=new, pickle_protocol=protocol)
        return out.getvalue()

    npz, sb3 = io.BytesIO(), io.BytesIO()
    np.savez_compressed(npz, **plain)
    with zipfile.ZipFile(sb3, "w") as archive:
        archive.writestr("data", json.dumps({"num_timesteps": 5, "x": {":serialized:": "gASV"}}))
        archive.writestr("policy.pth", saved(model.state_dict(), new=True))
        archive.writestr("policy.optimizer.pth", saved(optimizer.state_dict(), new=True))
    adapter = {"l.q.lora_A.weight": torch.randn(2, 8), "l.q.lora_B.weight": torch.randn(4, 2)}
    return {
        "torch": [("a.pt", saved(whole, new=True)), ("b.pt", saved(model.state_dict(), new=True))],
        "legacy": [
            ("a.pt", saved(whole, new=False)),
            ("b.pt", saved(model.state_dict(), new=False, protocol=5)),
        ],
        "safetensors": [
            ("a.safetensors", save_safetensors(model.state_dict(), {"format": "pt"})),
            ("b.safetensors", save_safetensors(adapter)),
        ],
        "pickle": [("a.pkl", pickle.dumps(plain, 4)), ("b.pkl", pickle.dumps(plain, 2))],
        "module": [("a.pt", saved(model, new=True)), ("b.pt", saved(model, new=False))],
        "npz": [("a.npz", npz.getvalue())],
        "sb3": [("a.zip", sb3.getvalue())],
        "tar": [("a.tar", tarred())],
        "distributed": distributed_files(model),
    }


def tarred() -> bytes:
    """The tar layout of 2016 with one tensor."""
    storages = pickle.dumps(1, 2) + b"\x80\x02(U\x010U\x03cpuctorch\nFloatStorage\nt."
    storages += struct.pack("<q", 6) + np.arange(6, dtype="<f4").tobytes()
    tensor = (
        b"\x80\x02}(U\x08a.weightctorch._utils\n_rebuild_tensor\n((U\x07storagectorch\n"
        b"FloatStorage\nU\x010U\x03cpuK\x06tQK\x00K\x02K\x03\x86K\x03K\x01\x86tRu."
    )
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in (("sys_info", b""), ("pickle", tensor), ("storages", storages)):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return out.getvalue()


def distributed_files(model: torch.nn.Module) -> list[tuple[str, bytes]]:
    """The two files of a distributed checkpoint, written by the library itself."""
    import torch.distributed.checkpoint as dcp

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": model.state_dict(), "step": 3}, checkpoint_id=folder)
        names = (".metadata", "__0_0.distcp")
        return [(f"step-3/{n}", (Path(folder) / n).read_bytes()) for n in names]


def mutate(data: bytes, chance: random.Random) -> bytes:
    """One to eight random changes; half of them near the start, where the structure is."""
    made = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 4, 8))):
        if not made:
            break
        reach = len(made) if chance.random() < 0.5 else min(len(made), 600)
        at = chance.randrange(reach)
        kind = chance.randrange(7)
        if kind == 0:
            made[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            made[at] = chance.randrange(256)
        elif kind == 2:
            del made[at : at + chance.choice((1, 4, 64, len(made)))]
        elif kind == 3:
            token = chance.choice(TOKENS)
            made[at : at + len(token)] = token
        elif kind == 4:
            made[at:at] = chance.choice(TOKENS)
        elif kind == 5:
            other = chance.randrange(len(made))
            made[at:at] = made[other : other + chance.choice((1, 8, 100))]
        else:
            made[at : at + 8] = chance.choice((0, 1, 1 << 31, 1 << 40, (1 << 63) - 1)).to_bytes(
                8, "little"
            )
    return bytes(made)


def repaired(data: bytes) -> bytes:
    """A mutated zip with its checksums made right again, so that the mutation is reached."""
    if data[:4] != b"PK\x03\x04":
        return data
    out = io.BytesIO()
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(out, "w") as target:
            for info in source.infolist():
                start = info.header_offset + 30 + len(info.filename)
                start += int.from_bytes(
                    data[info.header_offset + 28 : info.header_offset + 30], "little"
                )
                target.writestr(info.filename, data[start : start + info.file_size])
    except Exception:
        return data
    return out.getvalue()


def read(path: Path) -> str:
    """Find, open and read everything at the path; "read" or the first words of the reason."""
    try:
        for run in discover(path):
            for checkpoint in run.checkpoints:
                state = checkpoint.open()
                for name in state.tensors:
                    state.read(name)
                state.optimizer()
    except UnreadableError as error:
        line = str(error)
        if "\n" in line or not line.strip():
            raise AssertionError(f"not one line: {line!r}") from error
        return line.split(": ", 1)[-1][:24]
    return "read"


def run(
    kind: str, count: int, seed: int, folder: Path, tell: Callable[[str], None] = print
) -> Counter[str]:
    """Read `count` mutants of one format; the outcomes, counted.

    Raises:
        AssertionError: the first mutant that crashed, hung or executed; kept in the folder.
    """
    chance = random.Random(f"{kind} {seed}")
    marker = folder / "executed"
    originals = seeds(str(marker))[kind]
    outcomes: Counter[str] = Counter()
    signal.signal(signal.SIGALRM, _too_slow)
    slowest = 0.0
    for at in range(count):
        name, data = originals[at % len(originals)]
        mutant = mutate(data, chance)
        if chance.random() < 0.5:
            mutant = repaired(mutant)
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        for other, intact in originals:
            if "/" in other and other != name:
                (folder / other).write_bytes(intact)
        path.write_bytes(mutant)
        signal.alarm(SECONDS)
        start = time.perf_counter()
        try:
            outcomes[read(path.parent if "/" in name else path)] += 1
        except BaseException as error:
            kept = folder / f"failure_{kind}_{seed}_{at}{path.suffix}"
            kept.write_bytes(mutant)
            raise AssertionError(f"{kept}: {type(error).__name__} {error}") from error
        finally:
            signal.alarm(0)
        slowest = max(slowest, time.perf_counter() - start)
        assert not marker.exists(), f"mutant {at} of {kind} was executed"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    tell(
        f"{kind}: {count} mutants, slowest {slowest:.2f} s, peak {peak} MiB, "
        f"{len(outcomes)} outcomes"
    )
    return outcomes


def _too_slow(*_: object) -> None:
    raise TimeoutError(f"longer than {SECONDS} s")


def limit_memory() -> None:
    """Let this process grow by a few GiB of address space at most."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    size = pages * resource.getpagesize() + EXTRA_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (size, size))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--format", choices=[*seeds("x"), "all"], default="all")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    limit_memory()
    kinds = list(seeds("x")) if chosen.format == "all" else [chosen.format]
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds:
            outcomes = run(kind, chosen.count, chosen.seed, Path(folder))
            for line, times in outcomes.most_common(6):
                print(f"    {times:7d}  {line}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
