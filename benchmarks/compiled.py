"""Training under torch.compile: the composition that compilers see, against the two other ways.

    python benchmarks/compiled.py

For each case, forward and backward of norm and ReLU, interleaved, the least of many runs, as ratios to
PyTorch's own layer compiled:

    composition   this package's layer as it compiles: float64 operations that the compiler fuses
    opaque        the same layer kept out of the graph, so that it runs as it does without a compiler
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

import normalcy

CASES: list[tuple[str, Callable[[], nn.Module], Callable[[], nn.Module], tuple[int, ...]]] = [
    (
        "batch norm (32, 64, 28, 28)",
        lambda: normalcy.nn.BatchNorm2d(64),
        lambda: nn.BatchNorm2d(64),
        (32, 64, 28, 28),
    ),
    ("batch norm (64, 256)", lambda: normalcy.nn.BatchNorm1d(256), lambda: nn.BatchNorm1d(256), (64, 256)),
    ("layer norm (512, 1024)", lambda: normalcy.nn.LayerNorm(1024), lambda: nn.LayerNorm(1024), (512, 1024)),
    (
        "group norm (16, 32, 28, 28)",
        lambda: normalcy.nn.GroupNorm(8, 32),
        lambda: nn.GroupNorm(8, 32),
        (16, 32, 28, 28),
    ),
    ("RMS norm (512, 1024)", lambda: normalcy.nn.RMSNorm(1024), lambda: nn.RMSNorm(1024), (512, 1024)),
]
ROUNDS = 40


class Opaque(nn.Module):
    """A layer that compilers do not look into."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the norm."""
        return self.norm(x)


def step(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    """One forward and backward pass, to be timed."""

    def run() -> None:
        y = model(x)
        y.backward(torch.ones_like(y))

    return run


def least(runs: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Run all in turn, many times; the least seconds of each."""
    for run in runs.values():
        for _ in range(3):
            run()
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(ROUNDS):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def main() -> None:
    """Measure every case and print a line for each."""
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, one thread; times relative to PyTorch's own layer, compiled")
    print(f"{'case':32}{'composition':>14}{'opaque':>10}{'PyTorch':>12}")
    for name, ours, theirs, shape in CASES:
        torch.compiler.reset()
        x = (torch.randn(shape) + 3).requires_grad_()
        models = {
            "composition": nn.Sequential(ours(), nn.ReLU()),
            "opaque": nn.Sequential(Opaque(ours()), nn.ReLU()),
            "PyTorch": nn.Sequential(theirs(), nn.ReLU()),
        }
        best = least({key: step(torch.compile(model), x) for key, model in models.items()})
        ours_, opaque, own = (best[key] for key in models)
        print(f"{name:32}{ours_ / own:14.2f}{opaque / own:10.2f}{own * 1e3:9.2f} ms", flush=True)


if __name__ == "__main__":
    main()
