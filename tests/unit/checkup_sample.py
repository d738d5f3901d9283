"""Builds checkups as the doctor prints them, with every number computed from activations drawn here."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

EPS = 1e-5
UNIFORM = math.log(27)


def moments(values: np.ndarray) -> tuple[float, float]:
    """Skewness and kurtosis, E[x̂³] and E[x̂⁴] with the population variance."""
    xhat = (values - values.mean()) / values.std()
    return float((xhat**3).mean()), float((xhat**4).mean())


def curve(momentum: float) -> list[dict[str, Any]]:
    """The weight of the initial state after k updates, (1−m)^k, until it is past one percent."""
    end = math.ceil(math.log(0.009) / math.log1p(-momentum))
    ks = sorted({round(end * i / 60) for i in range(61)})
    return [{"updates": k, "weight_left": (1 - momentum) ** k} for k in ks]


def site(
    where: str,
    seed: int,
    *,
    momentum: float = 0.001,
    updates: int = 300,
    repaired: bool = False,
    channels: int = 96,
    channel: int | None = None,
) -> dict[str, Any]:
    """One batch-norm site whose running statistics moved `updates` times from (0, 1) towards the data."""
    rng = np.random.default_rng(seed)
    skew = rng.uniform(0.2, 0.9, channels)  # half the skewness of the gamma distribution drawn below
    offset, spread = rng.normal(0, 1.1, channels), np.exp(rng.normal(0.5, 0.35, channels))
    x = offset + spread * (rng.gamma(1 / skew**2, skew, (2000, channels)) - 1 / skew)
    mean, var = x.mean(0), x.var(0)
    left = 0.0 if repaired else (1 - momentum) ** updates
    stored_mean, stored_var = (1 - left) * mean, left * 1.0 + (1 - left) * var * 2000 / 1999
    batch = (x - mean) / np.sqrt(var + EPS)
    stored = (x - stored_mean) / np.sqrt(stored_var + EPS)
    gaps = np.sqrt(((stored - batch) ** 2).mean(0))
    worst = int(gaps.argmax()) if channel is None else channel
    of = {"before": x[:, worst], "stored": stored[:, worst], "batch": batch[:, worst]}
    shapes = {name: moments(values) for name, values in of.items()}
    return {
        "where": where,
        "kind": "batch",
        "class": "BatchNorm1d",
        "channels": channels,
        "mode": "eval",
        "momentum": momentum,
        "eps": EPS,
        "updates": updates,
        "weight_left": left,
        "calls": 1,
        "values": 64,
        "gap": {"rms": float(np.sqrt((gaps**2).mean())), "worst": float(gaps[worst]), "channel": worst},
        "sample": {
            "channel": worst,
            **{name: [float(v) for v in values[:600]] for name, values in of.items()},
            "skewness": {name: shape[0] for name, shape in shapes.items()},
            "kurtosis": {name: shape[1] for name, shape in shapes.items()},
        },
        "warmup": curve(momentum),
    }


def unwarmed(found: dict[str, Any]) -> dict[str, Any]:
    return {
        "code": "unwarmed-statistics",
        "title": "Running statistics are not warmed up",
        "severity": "error",
        "where": found["where"],
        "evidence": {
            "updates": found["updates"],
            "momentum": found["momentum"],
            "weight left": found["weight_left"],
            "gap": found["gap"]["rms"],
            "worst channel": found["gap"]["channel"],
        },
        "cause": "With momentum 0.001 the initial mean 0 and variance 1 fade over thousands of updates; "
        "the training stopped long before.",
        "remedy": "Call surgery.recalibrate(model, batches), or train on with a momentum of 0.1.",
    }


def dead_bias(where: str, norm: str, channels: int) -> dict[str, Any]:
    return {
        "code": "dead-bias",
        "title": "A bias before a batch norm is erased",
        "severity": "warning",
        "where": where,
        "evidence": {"parameters": channels, "norm": norm},
        "cause": "The mean that the norm subtracts takes the bias with it; it is trained and never used.",
        "remedy": "Build the layer with bias=False, or call surgery.strip_dead_bias(model, example).",
    }


def examination(
    sites: list[dict[str, Any]], findings: list[dict[str, Any]], loss: tuple[float, float] | None
) -> Any:
    return {
        "findings": findings,
        "sites": sites,
        "unrecognized": [],
        "not_seen": [],
        "loss": None if loss is None else {"eval": loss[0], "batch": loss[1]},
    }


def sample() -> dict[str, Any]:
    """The embedded example after `doctor --fix`: unwarmed norms and dead biases cured, decay left."""
    names = ("net.2", "net.5")
    before = [site(name, seed) for seed, name in enumerate(names)]
    after = [site(s["where"], i, repaired=True, channel=s["gap"]["channel"]) for i, s in enumerate(before)]
    decayed = {
        "code": "decayed-norm",
        "title": "Weight decay pulls γ and β of the norms towards zero",
        "severity": "note",
        "where": "net.2, net.5",
        "evidence": {"weight decay": 0.01, "parameters": 384},
        "cause": "AdamW was given all parameters in one group; γ is a scale; decay does not regularize it.",
        "remedy": "Pass surgery.param_groups(model, 0.01) to the optimizer.",
    }
    biases = [dead_bias("net.1", "net.2", 96), dead_bias("net.4", "net.5", 96)]
    why, pair = "pooled over all training names", "a linear layer, then a batch norm with stored statistics"
    return {
        "normalcy": "0.1.0",
        "torch": "2.13.0",
        "target": "the embedded example",
        "model": {"class": "CharacterMLP", "parameters": 15_747, "norms": 2},
        "baselines": {"uniform": UNIFORM, "bigram": 2.4548},
        "before": examination(before, [*map(unwarmed, before), *biases, decayed], (2.6127, 2.2946)),
        "repair": {
            "done": [{"what": "recalibrate", "where": name, "why": why} for name in names]
            + [
                {
                    "what": "strip dead bias",
                    "where": b["where"],
                    "why": f"the mean of {b['evidence']['norm']} took it over",
                }
                for b in biases
            ],
            "refused": [
                {
                    "what": "regroup the optimizer",
                    "where": "net.2, net.5",
                    "why": "an optimizer's groups are the training script's; the remedy names the call",
                }
            ],
        },
        "after": examination(after, [decayed], (2.2983, 2.2946)),
        "fold": {
            "done": [{"where": "net.1 + net.2", "why": pair}, {"where": "net.4 + net.5", "why": pair}],
            "refused": [],
            "error": 4.4703483581543e-07,
            "bound": 1.3642e-05,
            "ratio": 4.4703483581543e-07 / 1.3642e-05,
            "model_error": 3.1e-15,
            "model_bound": 1e-9,
            "proved": True,
            "notes": ["The whole model was folded once more in float64 and compared there."],
        },
        "proved": True,
        "notes": [],
    }


def nothing() -> dict[str, Any]:
    """A model without a normalization layer: every list is empty and everything that may be null is."""
    return {
        "normalcy": "0.1.0",
        "torch": "2.13.0",
        "target": "model.py:make",
        "model": {"class": "Sequential", "parameters": 0, "norms": 0},
        "baselines": None,
        "before": examination([], [], None),
        "repair": None,
        "after": None,
        "fold": None,
        "proved": None,
        "notes": ["Nothing was folded: folding is proved on an example, and no data were given."],
    }


def many(layers: int = 300) -> dict[str, Any]:
    """A deep model, every layer of it unwarmed to another degree, not repaired."""
    sites = [
        site(
            f"backbone.stage{i // 50}.block{i % 50}.residual.norm",
            i,
            momentum=0.01,
            updates=20 + i,
            channels=2,
        )
        for i in range(layers)
    ]
    checkup = nothing() | {"before": examination(sites, [unwarmed(s) for s in sites], (1.93, 0.71))}
    return checkup | {"model": {"class": "DeepNet", "parameters": 23_508_032, "norms": layers}}


def sparse() -> dict[str, Any]:
    """One site of which almost nothing is known, and numbers that are not finite."""
    bare = site("norm", 3) | dict.fromkeys(("momentum", "updates", "weight_left", "gap", "sample", "warmup"))
    wild = site("block.norm", 4) | {"gap": {"rms": "inf", "worst": "nan", "channel": 0}}
    wild["sample"]["stored"][:2] = ["inf", "nan"]
    wild["sample"]["skewness"]["stored"] = "nan"
    finding = unwarmed(site("block.norm", 4)) | {
        "code": "negative-variance",
        "title": "A stored variance is negative",
        "evidence": {"variance": "-inf", "channel": 3},
    }
    checkup = nothing() | {"before": examination([bare, wild], [finding], None)}
    checkup["model"]["norms"] = 2
    checkup["before"]["loss"] = {"eval": "nan", "batch": 2.25}
    checkup["before"]["unrecognized"] = [
        {"where": "head.scale", "why": "it looks like a normalizer and is none known"}
    ]
    checkup["before"]["not_seen"] = [{"where": "head", "why": "never reached in the recorded pass"}]
    return checkup


HOSTILE = "net.</script><img src=x onerror=alert(1)>'\"&\x01\ud800→ünï\u202e"


def hostile() -> dict[str, Any]:
    """The sample with markup, control signs and a lone surrogate wherever a text stands."""

    def spoil(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: item if key in {"severity", "mode", "kind"} else spoil(item)
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [spoil(item) for item in value]
        return f"{value} {HOSTILE}" if isinstance(value, str) else value

    spoiled: dict[str, Any] = spoil(sample())
    return spoiled
