"""How much longer `import normalcy` takes than `import torch`: fresh interpreters in turn, the best of each.

    python benchmarks/import_time.py [ROUNDS]

Not a test: the numbers are those of this machine at this moment.
"""

from __future__ import annotations

import subprocess
import sys

CODE = "import time; start = time.perf_counter(); import {name}; print(time.perf_counter() - start)"
NAMES = ("torch", "normalcy")


def seconds(name: str) -> float:
    """Import time of one module in a fresh interpreter."""
    words = [sys.executable, "-c", CODE.format(name=name)]
    said = subprocess.run(words, capture_output=True, text=True, check=True)  # noqa: S603 - our own words
    return float(said.stdout)


def main(rounds: int = 7) -> None:
    """Measure in turn, so that what else the machine does falls on both alike."""
    for name in NAMES:
        seconds(name)  # the first run fills caches
    taken: dict[str, list[float]] = {name: [] for name in NAMES}
    for _ in range(rounds):
        for name in NAMES:
            taken[name].append(seconds(name))
    best = {name: min(times) for name, times in taken.items()}
    for name in NAMES:
        print(f"import {name:<9} {best[name]:.3f} s (best of {rounds})")
    print(f"difference       {best['normalcy'] - best['torch']:.3f} s")


if __name__ == "__main__":
    main(*(int(word) for word in sys.argv[1:]))
