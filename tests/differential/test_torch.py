"""Every norm layer against PyTorch's own, over random settings that cover every pair of them.

Outputs, strides, all gradients and all buffers are compared, and that both refuse the same inputs. Judge is
the float64 definition: ours may miss it by what PyTorch's layer misses plus a few ulps, so PyTorch need not
be exact. What differs by decision is a row of docs/differences.md.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from differential import draws
from differential.draws import Draw
from differential.table import rows
from laws.truth import Truth, truth
from torch import Tensor, nn

import normalcy.nn
from normalcy import definition, spec
from normalcy.errors import ArgumentError, NormalcyError
from normalcy.testing import assert_no_worse_than_plain

DRAWS = 3600
SEED = 20240229


# differences in what is refused
REFUSALS = {"eps-zero", "empty-batch", "mixed-dtypes"}


@dataclass
class Run:
    """What a layer did: per step the output and gradients, then its buffers; or the refusal."""

    error: Exception | None = None
    steps: list[tuple[Tensor, dict[str, Tensor]]] = field(default_factory=list)
    buffers: list[dict[str, Tensor]] = field(default_factory=list)


def run(layer: nn.Module, draw: Draw) -> Run:
    done = Run()
    # difference group-norm-parameters-only: PyTorch ends the process unless dx is asked for too
    parameters = any(parameter.requires_grad for parameter in layer.parameters())
    dx_too = type(layer) is nn.GroupNorm and draw.layout == "channels_last" and parameters
    done.buffers.append(_buffers(layer))
    for x, dy in draws.batches(draw):
        needed = draw.needs == "all" or "x" in draw.needs.split("+")
        leaf = x.requires_grad_(needed or dx_too)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # difference instance-channels-warning, and a hint on speed
                y = layer(leaf)
        except Exception as error:  # noqa: BLE001 - whatever a layer refuses with
            done.error = error
            done.buffers.append(_buffers(layer))
            return done
        wanted = {"x": leaf, **dict(layer.named_parameters())}
        wanted = {name: tensor for name, tensor in wanted.items() if tensor.requires_grad}
        gradients: dict[str, Tensor] = {}
        if wanted:
            found = torch.autograd.grad(y, list(wanted.values()), dy)
            gradients = dict(zip(wanted, found, strict=True))
            if not needed:
                gradients.pop("x", None)
        done.steps.append((y, gradients))
        done.buffers.append(_buffers(layer))
    return done


def _buffers(layer: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in layer.named_buffers()}


def norm_of(layer: nn.Module) -> spec.Norm:
    if isinstance(layer, nn.LayerNorm):
        return spec.layer(len(layer.normalized_shape))
    if isinstance(layer, nn.RMSNorm):
        return spec.rms(len(layer.normalized_shape))
    if isinstance(layer, nn.GroupNorm):
        return spec.group(layer.num_groups)
    return spec.batch if isinstance(layer, nn.modules.batchnorm._BatchNorm) else spec.instance


def truths(layer: nn.Module, draw: Draw, start: dict[str, Tensor]) -> list[Truth]:
    norm, stored = norm_of(layer), None
    if not layer.training and start.get("running_mean") is not None:
        stored = (start["running_mean"], start["running_var"])
    eps = torch.finfo(torch.float64 if draw.dtype == "float64" else torch.float32).eps
    eps = eps if layer.eps is None else layer.eps
    weight, bias = layer.weight, getattr(layer, "bias", None)
    found = []
    for batch in draws.batches(draw):
        x, dy = (t[None] if draw.unbatched else t for t in batch)
        try:
            found.append(truth(norm, x, dy, weight, bias, eps=eps, stored=stored))
        except ArgumentError:  # the definition divides by no zero
            if eps:
                raise
            return []
    return found


def running(draw: Draw, seen: list[Truth], start: dict[str, Tensor]) -> dict[str, Tensor]:
    """The float64 running statistics after `seen`, by the definition."""
    mean, var = start["running_mean"].double().numpy(), start["running_var"].double().numpy()
    for k, each in enumerate(seen):
        new = definition.stored_variance(each.var.numpy(), each.count.numpy(), 1)
        means = each.mean.numpy()
        if draw.cls.startswith("Instance"):
            new, means = new.mean(0), means.mean(0)
        mean = definition.running_update(mean, means, draw.momentum, updates=k)
        var = definition.running_update(var, new, draw.momentum, updates=k)
    return {"running_mean": torch.from_numpy(mean), "running_var": torch.from_numpy(var)}


def differences(draw: Draw) -> set[str]:
    """The decided differences that a draw meets, by their ids in docs/differences.md."""
    met = set()
    instance, training = draw.cls.startswith("Instance"), draw.mode == "train"
    if 0 in draws.input_shape(draw):
        met.add("empty-batch")
    if not draw.cls.startswith("Batch") and draw.eps == 0.0 and (training or not draw.tracking):
        met.add("eps-zero")
    if draw.cls == "RMSNorm" or instance:
        wide, narrow = draw.dtypes
        half = wide in (torch.bfloat16, torch.float16)
        present = draw.affine or draw.tracking
        if present and wide != narrow and not (half and narrow == torch.float32):
            met.add("mixed-dtypes")
    if instance and draw.tracking and training:
        met.add("instance-counts")
        if draw.momentum is None:
            met.add("instance-cumulative")
    return met


def compare(draw: Draw) -> list[str]:
    ours_layer, torchs_layer = draws.build(draw, normalcy.nn), draws.build(draw, torch.nn)
    ours, torchs = run(ours_layer, draw), run(torchs_layer, draw)
    known = differences(draw)
    problems = []
    if ours.error is not None and not isinstance(ours.error, NormalcyError):
        problems.append(f"ours failed with {type(ours.error).__name__}: {ours.error}")
    if (ours.error is None) != (torchs.error is None) and not known & REFUSALS:
        problems.append(f"refusal: ours {ours.error!r}, PyTorch {str(torchs.error)[:150]!r}")
    if ours.error is not None or torchs.error is not None:
        if ours.error is not None and any(
            not torch.equal(a, b)
            for a, b in zip(ours.buffers[-2].values(), ours.buffers[-1].values(), strict=True)
        ):
            problems.append("a refusal changed buffers")
        return problems
    if list(ours.buffers[0]) != list(torchs.buffers[0]):
        return [*problems, f"buffers {list(ours.buffers[0])} and {list(torchs.buffers[0])}"]
    exact = [] if "empty-batch" in known else truths(ours_layer, draw, ours.buffers[0])
    for k, (mine, theirs) in enumerate(zip(ours.steps, torchs.steps, strict=True)):
        like = torch.empty_like(draws.batches(draw)[k][0])
        problems += compare_step(mine, theirs, exact[k] if exact else None, like, f"step {k}")
    if exact or "empty-batch" in known:
        problems += compare_buffers(draw, ours, torchs, exact, known)
    return problems


Step = tuple[Tensor, dict[str, Tensor]]


def compare_step(ours: Step, torchs: Step, exact: Truth | None, like: Tensor, step: str) -> list[str]:
    """Output and gradients. `like` has the strides that elementwise functions give; without `exact` there are
    no values, or var + eps is 0 somewhere and only what is finite is compared."""
    (y, gradients), (their_y, their_gradients) = ours, torchs
    if (y.requires_grad, *gradients) != (their_y.requires_grad, *their_gradients):
        return [f"{step}: gradients of {list(gradients)}, PyTorch {list(their_gradients)}"]
    problems = []
    if any(a != b for a, b, n in zip(y.stride(), like.stride(), y.shape, strict=True) if n > 1 and y.numel()):
        problems.append(f"{step}: strides {y.stride()}, as elementwise {like.stride()}")
    pairs = {"y": (y, their_y)}
    pairs |= {"d" + name: (gradients[name], their_gradients[name]) for name in gradients}
    for name, (mine, theirs) in pairs.items():
        if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
            problems.append(f"{step} {name}: {mine.dtype, mine.shape}, PyTorch {theirs.dtype, theirs.shape}")
        elif exact is not None:
            answer, scale = (t.reshape(mine.shape) for t in (getattr(exact, name), exact.scale[name]))
            try:
                assert_no_worse_than_plain(mine, theirs, answer, scale=scale, what=f"{step} {name}")
            except AssertionError as error:
                problems.append(str(error))
        elif not y.numel() and bool(mine.any()):
            problems.append(f"{step} {name} of no values: {mine}")
        elif y.numel() and not torch.equal(mine.isfinite(), theirs.isfinite()):
            problems.append(f"{step} {name} where var + eps is 0: {mine}, PyTorch {theirs}")
    return problems


def compare_buffers(draw: Draw, ours: Run, torchs: Run, exact: list[Truth], known: set[str]) -> list[str]:
    problems = []
    final, theirs = ours.buffers[-1], torchs.buffers[-1]
    if "running_mean" not in final:
        return problems
    counted = draw.steps if "instance-counts" in known else int(theirs["num_batches_tracked"])
    counted = 0 if "empty-batch" in known else counted
    if final["num_batches_tracked"] != counted:
        problems.append(f"num_batches_tracked {final['num_batches_tracked']}, right {counted}")
    if draw.mode == "eval" or not exact:
        answers = {name: ours.buffers[0][name].double() for name in ("running_mean", "running_var")}
    else:
        answers = running(draw, exact, ours.buffers[0])
    for name, answer in answers.items():
        scale = answer.abs() + ours.buffers[0][name].abs() + answers["running_var"].abs().sqrt()
        plain = (
            answer.to(final[name].dtype) if known & {"empty-batch", "instance-cumulative"} else theirs[name]
        )
        try:
            # each step rounds the buffer once; blending computes in float64
            assert_no_worse_than_plain(
                final[name], plain, answer, scale=scale, slack_ulps=draw.steps, what=name
            )
        except AssertionError as error:
            problems.append(str(error))
    return problems


@pytest.fixture(scope="module")
def sample() -> list[Draw]:
    return list(draws.draws(DRAWS, SEED))


def test_the_draws_cover_every_pair_of_settings(sample: list[Draw]) -> None:
    assert len(sample) >= 3000
    covered = set().union(*(draws.pairs_of(draw) for draw in sample))
    assert not draws.possible_pairs() - covered


def test_every_difference_that_is_excepted_is_in_the_table(sample: list[Draw]) -> None:
    met = set().union(*(differences(draw) for draw in sample))
    assert met > REFUSALS
    assert met <= set(rows())


@pytest.mark.parametrize("cls", draws.FACTORS["cls"])
def test_a_layer_does_what_pytorchs_does_except_by_decision(cls: str, sample: list[Draw]) -> None:
    mine = [draw for draw in sample if draw.cls == cls]
    assert mine
    failures = [(draw, problem) for draw in mine for problem in compare(draw)]
    assert not failures, "\n".join(f"{draw}\n    {problem}" for draw, problem in failures[:10])


if __name__ == "__main__":
    counts: Counter[str] = Counter()
    for draw in draws.draws(int(sys.argv[1]), SEED):
        for problem in compare(draw):
            key = re.sub(r"[-\d.e+]+", "#", problem)[:90]
            counts[key] += 1
            if counts[key] <= 2:
                print(draw, "\n     ", problem[:300])
    for key, count in counts.most_common():
        print(count, key)
