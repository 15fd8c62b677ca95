"""One tensor at a time: a pass over a large file keeps little of it resident."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

MEBIBYTE = 1 << 20
PASS = """
import sys
from pathlib import Path
import torch
from plastiscope.checkpoints import discover

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10

(run,) = discover(sys.argv[1])
state = run.checkpoints[0].open()
Path("/proc/self/clear_refs").write_text("5")
base, total = peak(), 0
for name in state.tensors:
    flat = state.read(name).view(torch.uint8).reshape(-1)
    total += flat.numel() + int(flat[::4096].sum())
print(total, peak() - base)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's peak of resident memory")
def test_twenty_tensors_of_fifty_megabytes(tmp_path):  # L11
    count, each = 20, 50 * MEBIBYTE
    header = json.dumps(
        {
            f"l{at}.weight": {
                "dtype": "F32",
                "shape": [each // 4],
                "data_offsets": [at * each, (at + 1) * each],
            }
            for at in range(count)
        }
    ).encode()
    path = tmp_path / "large.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        # A file with a hole: a gigabyte to read that takes no room on the disk.
        file.truncate(8 + len(header) + count * each)
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", PASS, str(path)],
        check=True,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
    )
    total, growth = map(int, done.stdout.split())
    assert total == count * each
    assert growth < 200 * MEBIBYTE
