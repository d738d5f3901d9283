"""The embedded example over several seeds: losses before and after the repair, beside the baselines.

Run: python benchmarks/seeds.py [SEED ...]     (default: 0 1 2 3 4)
"""

from __future__ import annotations

import sys

from normalcy import checkup


def main(seeds: list[int]) -> None:
    """Print one row for each seed, in nats per character on held-out names."""
    print("| seed | uniform | bigram | before | after | bigram − after | before − bigram |")
    print("|---|---|---|---|---|---|---|")
    for seed in seeds:
        case, more = checkup.embedded(seed)
        found = checkup.run(case, fix=True, folding=False, **more)
        assert found.before.loss
        assert found.after
        assert found.after.loss
        uniform, bigram = more["baselines"]["uniform"], more["baselines"]["bigram"]
        before, after = found.before.loss.eval, found.after.loss.eval
        losses = f"{uniform:.4f} | {bigram:.4f} | {before:.4f} | {after:.4f}"
        print(f"| {seed} | {losses} | {bigram - after:.4f} | {before - bigram:.4f} |", flush=True)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or [0, 1, 2, 3, 4])
