"""The golden cases through layers and running statistics; each kind names what it can be checked by."""

from __future__ import annotations

import functools
import json
import math
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import normalcy
from normalcy import Moments, conventions
from normalcy import nn as ours
from normalcy.conventions import replace
from normalcy.statistics import Running, debiased, weight_left

HERE = Path(__file__).parent
CASES = [
    case
    for name in ("worked", "field", "grid")
    for case in json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))
    if {"layer", "statistics"} & set(case["through"])
]
Case = dict[str, Any]


def close(got: Tensor | float, right: Any, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(
        torch.as_tensor(got, dtype=torch.float64).detach().squeeze(),
        torch.as_tensor(right, dtype=torch.float64).squeeze(),
        rtol=tolerance,
        atol=tolerance,
    )


def feature(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def batch_norm(given: Case) -> ours.BatchNorm1d:
    """One feature in float64; eps 0 stands for 1e-12, which PyTorch's layers and these accept in training."""
    layer = ours.BatchNorm1d(1, eps=given.get("eps") or 1e-12, momentum=given.get("momentum", 0.1)).double()
    with torch.no_grad():
        layer.weight.fill_(given.get("gamma", 1))
        layer.bias.fill_(given.get("beta", 0))
        layer.running_mean.fill_(given.get("initial_mean", given.get("running_mean", 0)))
        layer.running_var.fill_(given.get("initial_var", given.get("running_var", 1)))
    return layer


def forward(given: Case, right: Case) -> None:
    y = batch_norm(given)(feature(given["x"]))
    close(y, right["y"])
    if "normalized_variance" in right:
        close(Moments.of(y).var(), right["normalized_variance"])
    if "var" in right:
        close(Moments.of(feature(given["x"])).var(), right["var"])


def backward(given: Case, right: Case) -> None:
    layer, x = batch_norm(given), feature(given["x"]).requires_grad_()
    layer.train("running_mean" not in given)(x).backward(feature(given["dy"]))
    close(x.grad, right["dx"])
    close(layer.weight.grad, right["dgamma"])
    close(layer.bias.grad, right["dbeta"])


def running_update(given: Case, right: Case) -> None:
    layer = batch_norm(given)
    for k, (batch, after) in enumerate(zip(given["batches"], right["after"], strict=True), start=1):
        layer(feature(batch))
        left = weight_left(given["momentum"], k)
        close(layer.running_mean, after["running_mean"])
        close(layer.running_var, after["running_var"])
        close(debiased(layer.running_mean, given["initial_mean"], left), after["debiased_mean"])
        close(debiased(layer.running_var, given["initial_var"], left), after["debiased_var"])


def warm_up(given: Case, right: Case) -> None:
    kept = Running(torch.zeros(1).double(), torch.ones(1).double(), torch.tensor(0), given["momentum"])
    for k, (mean, after) in enumerate(zip(given["batch_means"], right["after"], strict=True), start=1):
        kept.update(Moments.of(feature([mean - 1.0, mean + 1.0]), 0))
        left = weight_left(given["momentum"], k)
        close(kept.mean, after["running"])
        close(debiased(kept.mean, given["initial"], left), after["debiased"])
        close(left, after["weight_left"])


def std_versus_variance(given: Case, right: Case) -> None:
    kept = Running(torch.zeros(1).double(), torch.ones(1).double(), torch.tensor(0), momentum=None)
    for std in given["batch_std"]:
        kept.update(Moments.of(feature([-std, std]) / math.sqrt(2), 0))  # an unbiased variance of std²
    close(kept.var.sqrt(), right["root_of_mean_variance"])
    assert kept.var.sqrt().item() > right["mean_of_std"] + 0.2


def stored_variance(given: Case, right: Case) -> None:
    layer = batch_norm(given)
    x = torch.tensor(given["x"], dtype=torch.float64).reshape(given.get("x_shape", [-1, 1]))
    y = layer(x)
    close(layer.running_var, right["running_var"])
    if "train" in right:
        close(y, right["train"], 1e-9)
        with torch.no_grad():
            layer.running_mean.copy_(x.mean())
        close(layer.eval()(x), right["eval"], 1e-9)
    else:
        close(layer.running_mean, right["running_mean"])
        close(y[0, 0, 0], right["y[0,0,0]"])
        biased = ours.BatchNorm1d(1, convention=replace(conventions.TORCH, correction=0)).double()
        biased(x)
        close(biased.running_var, right["running_var_if_biased"])


def convention(given: Case, right: Case) -> None:
    meant = getattr(conventions, given["framework"].upper())
    layer = ours.BatchNorm1d(1, momentum=given["momentum"], convention=meant).double()
    with torch.no_grad():
        layer.running_mean.fill_(given["initial"])
    layer(feature([given["batch_mean"] - 3.0, given["batch_mean"] + 3.0]))
    close(layer.running_mean, right["running_mean"])
    assert layer.momentum == right["torch_momentum"]


def unwarmed(given: Case, right: Case) -> None:
    layer = batch_norm(given)
    # two values per batch whose unbiased variance is the one named
    spread = math.sqrt(given["batch_var"] / 2)
    batch = feature([given["batch_mean"] - spread, given["batch_mean"] + spread])
    after = {row["k"]: row for row in right["after"]}
    for k in range(1, max(after) + 1):
        layer.train()(batch)
        if k in after:
            close(layer.running_mean, after[k]["running_mean"])
            close(layer.running_var, after[k]["running_var"])
            close(layer.eval()(feature([given["batch_mean"]])), after[k]["eval_of_10"], 1e-9)
            left = weight_left(given["momentum"], k)
            close(debiased(layer.running_mean, given["initial_mean"], left), after[k]["debiased_mean"])
            close(debiased(layer.running_var, given["initial_var"], left), after[k]["debiased_var"])


def numeric(given: Case, right: Case) -> None:
    for offset in given["offsets"]:
        steps = torch.arange(given["count"], dtype=torch.float64) * given["step"]
        x = (offset + steps.float()).float()
        y = ours.LayerNorm(given["count"], eps=given["eps"])(x)
        close(y[0], right["first"][str(offset)], right["tolerance"])


def edge(given: Case, right: Case) -> None:
    layer = ours.BatchNorm1d(given["x_shape"][1])
    x = torch.empty(given["x_shape"], requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert list(y.shape) == right["y_shape"]
    assert x.grad is not None
    assert not layer.weight.grad.any()
    assert layer.running_mean.tolist() == right["running_mean"]
    assert layer.running_var.tolist() == right["running_var"]
    assert layer.num_batches_tracked == right["num_batches_tracked"]


def mask(given: Case, right: Case) -> None:
    x = torch.tensor(given["x"], dtype=torch.float64)
    moments = Moments.of(x, mask=torch.tensor(given["mask"]).bool())
    close(moments.mean, right["mean"])
    close(moments.var(), right["var"])
    close(Moments.of(x).mean, right["wrong_without_mask"]["mean"])
    valid, count = torch.tensor(given["mask"]).bool(), sum(given["mask"])
    xhat = torch.where(valid, (x - right["mean"]) / math.sqrt(right["var"] + 1e-5), 0.0)
    layer = ours.BatchNorm1d(1, momentum=1.0).double()
    close(layer(x[:, None], valid[:, None])[:, 0], xhat)
    close(layer.running_mean, right["mean"])
    close(layer.running_var, right["var"] * count / (count - 1))
    padded = x.reshape(1, 1, -1)  # the valid values come first
    close(ours.InstanceNorm1d(1)(padded, lengths=torch.tensor([count])), xhat)
    close(ours.GroupNorm(1, 1).double()(padded, lengths=torch.tensor([count])), xhat)
    close(ours.LayerNorm(len(x)).double()(x, valid), xhat)


def distributed(given: Case, right: Case) -> None:
    whole = sum((Moments.of(torch.tensor(rank).double()) for rank in given["ranks"]), Moments.empty())
    close(whole.mean, right["mean"])
    close(whole.var(), right["var"])
    close(whole.var(1), right["unbiased_var"])


def recalibrate(given: Case, right: Case) -> None:
    whole = sum((Moments.of(torch.tensor(batch).double()) for batch in given["batches"]), Moments.empty())
    close(whole.mean, right["mean"])
    for correction in (0, 1):
        close(whole.var(correction), right["stored"][f"correction {correction}"])


def training(given: Case, right: Case) -> None:
    layer = batch_norm(given)
    if "micro" not in given:  # under activation checkpointing
        x = feature([9.0, 11.0]).requires_grad_()
        checkpoint(layer, x, use_reentrant=False).square().sum().backward()
        close(layer.running_mean, 10 * right["right_effective_momentum"])
        assert layer.num_batches_tracked == right["num_batches_tracked_per_step"]
        return
    outputs = torch.cat([layer(feature(batch)) for batch in given["micro"]])
    close(outputs, right["micro_outputs"], 1e-9)
    close(layer.running_mean, right["running_after_micro"]["mean"])
    close(layer.running_var, right["running_after_micro"]["var"])
    full = batch_norm(given)
    close(full(feature(functools.reduce(operator.iadd, given["micro"], []))), right["full_outputs"], 1e-9)
    close(full.running_mean, right["running_after_full"]["mean"])
    close(full.running_var, right["running_after_full"]["var"])


def fold(given: Case, right: Case) -> None:
    """Folding is surgery's; here the layer is shown to be the affine map that is to be folded."""
    layer = batch_norm(given).eval()
    x = feature([-3.0, 0.25, 1e4])
    close(layer(given["weight"] * x + given["bias"]), right["weight"] * x + right["bias"])


def variants(given: Case, right: Case) -> None:
    x = torch.tensor(given["x"], dtype=torch.float64).reshape(given["x_shape"])
    channels = x.shape[1]
    over_channels = ours.LayerNorm2d(channels, eps=1e-12, dtype=torch.float64)(x)
    close(over_channels.flatten(), right["per_pixel_over_channels"], 1e-9)
    over_all = ours.GroupNorm(1, channels, eps=1e-12, dtype=torch.float64)(x)
    close(over_all.flatten(), right["over_channels_and_pixels"], 1e-9)


def grid(given: Case, right: Case) -> None:
    x, dy, weight, bias = (
        torch.tensor(given[name], dtype=torch.float64).requires_grad_(name != "dy")
        if given.get(name) is not None
        else None
        for name in ("x", "dy", "weight", "bias")
    )
    assert x is not None
    y = _grid_norm(given, x, weight, bias)
    close(y, right["y"])
    y.backward(dy)
    close(x.grad, right["dx"])
    close(weight.grad, right["dweight"])
    if bias is not None and "dbias" in right:
        close(bias.grad, right["dbias"])


def _grid_norm(given: Case, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    norm, eps, over = given["norm"], given["eps"], given["averaged_over"]
    if norm == "batch":
        return normalcy.batch_norm(x, weight=weight, bias=bias, training=True, eps=eps)
    if norm == "instance":
        return normalcy.instance_norm(x, weight=weight, bias=bias, eps=eps)
    if norm == "group":
        return normalcy.group_norm(x, given["groups"], weight, bias, eps)
    if norm == "rms":  # over channels: moved last and back
        return normalcy.rms_norm(x.movedim(1, -1), x.shape[1], weight, eps).movedim(-1, 1)
    if over == ["channel"]:
        return normalcy.normalize(x, normalcy.spec.channels, weight, bias, eps=eps)
    shape = x.shape[1:]  # over channels and positions, weights per channel: expanded
    wide = [p[:, None].expand(shape) for p in (weight, bias)]
    return normalcy.layer_norm(x, shape, *wide, eps)


CHECKS: dict[str, Callable[[Case, Case], None]] = {
    "forward": forward,
    "backward": backward,
    "backward-inference": backward,
    "running-update": running_update,
    "warm-up": warm_up,
    "std-versus-variance": std_versus_variance,
    "stored-variance": stored_variance,
    "convention": convention,
    "unwarmed": unwarmed,
    "numeric": numeric,
    "edge": edge,
    "mask": mask,
    "distributed": distributed,
    "recalibrate": recalibrate,
    "training": training,
    "fold": fold,
    "variants": variants,
    "grid": grid,
}


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_a_case_comes_out_right(case: Case) -> None:
    CHECKS[case["kind"]](case["given"], case["right"])


def test_every_kind_of_check_has_a_case() -> None:
    assert {case["kind"] for case in CASES} == set(CHECKS)
