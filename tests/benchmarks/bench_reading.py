"""Memory and speed of reading: a generated sharded run, passed through one tensor at a time.

    python tests/benchmarks/bench_reading.py --gigabytes 4

Memory: the peak of a weights-only pass above the interpreter's own, in largest tensors.
Speed: bytes a second of that pass over those of a plain sequential read of the same files in the
same run, with the page cache emptied before each ("cold", the disk's speed) and filled ("warm").
Every page of every tensor is touched; checksums are verified where the format has them.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from plastiscope.checkpoints import discover

MEBIBYTE = 1 << 20
BUFFER = 16 * MEBIBYTE


def generate(folder: Path, size: int, largest: int, kind: str) -> int:
    """Write one checkpoint of about `size` bytes, sharded for safetensors; the bytes written."""
    folder.mkdir(parents=True)
    count = max(size // largest, 4)
    shards = 4 if kind == "safetensors" else 1
    table: dict[str, str] = {}
    for shard in range(shards):
        names = [f"layers.{at}.weight" for at in range(count) if at % shards == shard]
        generator = torch.Generator().manual_seed(shard)
        part = {n: torch.randn(largest // 4096, 1024, generator=generator) for n in names}
        if kind == "safetensors":
            name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
            save_file(part, folder / name)
            table.update(dict.fromkeys(names, name))
        else:
            torch.save(part, folder / "step_1.pt")
        del part
    if table:
        index = {"metadata": {}, "weight_map": table}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    os.sync()
    return sum(path.stat().st_size for path in files(folder))


def files(folder: Path) -> list[Path]:
    """The weight files of a folder."""
    return sorted(p for p in folder.rglob("*") if p.suffix in (".safetensors", ".pt"))


def forget(folder: Path) -> None:
    """Drop the folder's files from the page cache."""
    for path in files(folder):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_plainly(folder: Path) -> int:
    """Read every file from start to end into one buffer; the bytes read."""
    buffer = memoryview(bytearray(BUFFER))
    total = 0
    for path in files(folder):
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total += count
    return total


def read_tensors(folder: Path) -> int:
    """Open the run and touch every page of every tensor, one at a time; the bytes touched."""
    total = 0
    for run in discover(folder):
        for checkpoint in run.checkpoints:
            total += touch(checkpoint.open())
    return total


def touch(state) -> int:
    total = 0
    for name in state.tensors:
        flat = state.read(name).view(torch.uint8).reshape(-1)
        int(flat[::4096].sum())
        total += flat.numel()
    return total


def rate(action, folder: Path, *, cold: bool) -> float:
    """Bytes a second of one pass."""
    if cold:
        forget(folder)
    start = time.perf_counter()
    total = action(folder)
    return total / (time.perf_counter() - start)


def resident() -> int:
    """The peak of this process's resident memory since it was last forgotten, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def memory_pass(folder: Path) -> dict[str, int]:
    """Peak memory before and after a pass, for a process of its own."""
    runs = discover(folder)
    state = runs[0].checkpoints[0].open()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    base = resident()
    return {"bytes": touch(state), "base": base, "peak": resident()}


def measure(folder: Path, kind: str, size: int, largest: int, rounds: int) -> dict[str, object]:
    """Generate, pass, compare; one row of the benchmark."""
    written = generate(folder, size, largest, kind)
    child = [sys.executable, __file__, "--memory-pass", str(folder)]
    memory = json.loads(subprocess.run(child, check=True, capture_output=True).stdout)
    opened = discover(folder)[0].checkpoints[0]
    ratios: dict[str, list[float]] = {"cold": [], "warm": []}
    rates: dict[str, list[float]] = {"cold": [], "warm": []}
    for temperature in ("cold", "warm"):
        for _ in range(rounds):
            cold = temperature == "cold"
            plain = rate(read_plainly, folder, cold=cold)
            ours = rate(lambda _: touch(opened.open()), folder, cold=cold)
            ratios[temperature].append(ours / plain)
            rates[temperature].append(plain)
    return {
        "format": kind,
        "bytes": written,
        "largest_tensor": largest,
        "peak_above_base_in_largest_tensors": (memory["peak"] - memory["base"]) / largest,
        "plain_read_GB_per_s": {k: round(statistics.median(v) / 1e9, 2) for k, v in rates.items()},
        "ratio_to_plain_read": {k: round(statistics.median(v), 3) for k, v in ratios.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--largest", type=int, default=64, help="largest tensor, MiB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--memory-pass", type=Path, default=None, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.memory_pass is not None:
        print(json.dumps(memory_pass(chosen.memory_pass)))
        return 0
    size, largest = int(chosen.gigabytes * 1e9), chosen.largest * MEBIBYTE
    failed = False
    for kind in ("safetensors", "torch"):
        with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
            row = measure(Path(folder) / "run", kind, size, largest, chosen.rounds)
        print(json.dumps(row, indent=1))
        ratio = row["ratio_to_plain_read"]
        failed |= row["peak_above_base_in_largest_tensors"] > 3 or ratio["cold"] < 0.8
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
