"""`python -m tests.benchmarks [NAME ...]`: the table of all benchmarks, or of some.

From a checkout, with the test extra installed. NAME is a bench module without its `bench_`. All of
them take a quarter of an hour on two cores. BENCH_THREADS sets another number of threads (2).
BENCH_WHOLE=1 runs `features` on 12 blocks instead of 3, and all of `ntk` instead of one
part in 12 of its largest: half an hour more, and 15 GB.

`bench_reading` is a command of its own, since it empties the page cache:
`python tests/benchmarks/bench_reading.py`.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from tests.benchmarks.harness import HEADER


def main(names: list[str]) -> None:
    """Print one Markdown row for each comparison as it's done."""
    every = sorted(p.stem.removeprefix("bench_") for p in Path(__file__).parent.glob("bench_*.py"))
    print(HEADER, flush=True)
    for name in names or [each for each in every if each != "reading"]:
        module = importlib.import_module(f"tests.benchmarks.bench_{name}")
        for found in module.comparisons():
            print(found.line(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
