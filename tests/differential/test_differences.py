"""Each row of docs/differences.md, shown on both sides: what PyTorch does, and what is done here."""

from __future__ import annotations

import subprocess
import sys
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.fx
from differential.table import rows
from laws.truth import truth
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import normalcy
import normalcy.nn as ours
from normalcy import spec
from normalcy.conventions import KERAS, TORCH
from normalcy.definition import forward
from normalcy.errors import ArgumentError, TooFewValuesError, TypeMismatchError
from normalcy.testing import errors_in_ulps


def test_every_row_has_a_test_and_every_test_a_row() -> None:
    here = {name[len("test_") :].replace("_", "-") for name in globals() if name.startswith("test_")}
    named = set(rows())
    assert len(named) == len(rows())
    assert named == here - {"every-row-has-a-test-and-every-test-a-row"}


def buffers(layer: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in layer.named_buffers()}


def test_empty_batch() -> None:
    x = torch.empty(0, 3, 4)
    theirs, mine = nn.BatchNorm1d(3), ours.BatchNorm1d(3)
    assert theirs(x).shape == mine(x).shape == x.shape
    assert theirs.num_batches_tracked == 1
    assert mine.num_batches_tracked == 0
    leaf = x.clone().requires_grad_()
    mine(leaf).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.shape == x.shape
    assert not mine.weight.grad.any()
    assert not mine.bias.grad.any()
    with pytest.raises(IndexError):
        nn.InstanceNorm1d(3, affine=True)(x)
    poisoned = nn.InstanceNorm1d(3, track_running_stats=True)
    poisoned(x)
    assert poisoned.running_mean.isnan().all()
    kept = ours.InstanceNorm1d(3, affine=True, track_running_stats=True)
    assert kept(x).shape == x.shape
    assert kept.num_batches_tracked == 0
    assert not kept.running_mean.any()
    assert (kept.running_var == 1).all()
    with pytest.raises(ValueError, match="eps must be positive"):
        nn.BatchNorm1d(3, eps=0.0)(x)
    assert ours.BatchNorm1d(3, eps=0.0)(x).shape == x.shape


def test_empty_group_gradient() -> None:
    x = torch.empty(2, 4, 0)
    theirs, mine = nn.GroupNorm(2, 4), ours.GroupNorm(2, 4)
    theirs(x).sum().backward()
    mine(x).sum().backward()
    assert theirs.weight.grad.isnan().any()
    assert torch.equal(mine.weight.grad, torch.zeros(4))
    assert torch.equal(mine.bias.grad, torch.zeros(4))


def test_one_value() -> None:
    x = torch.tensor([[2.0, -3.0]])
    theirs, mine = nn.BatchNorm1d(2), ours.BatchNorm1d(2)
    with pytest.raises(ValueError, match="more than 1 value"):
        theirs(x)
    before = buffers(mine)
    with pytest.raises(TooFewValuesError, match=r"BatchNorm1d\(2\)"):
        mine(x)
    assert theirs.num_batches_tracked == 1
    assert all(torch.equal(before[name], now) for name, now in buffers(mine).items())


def test_eps_zero() -> None:
    x = torch.tensor([[[2.0, 2.0], [0.0, 0.0]]])
    for build in (
        lambda module: module.InstanceNorm1d(2, eps=0.0),
        lambda module: module.GroupNorm(2, 2, eps=0.0),
        lambda module: module.LayerNorm(2, eps=0.0),
        lambda module: module.RMSNorm(2, eps=0.0),
    ):
        plain = build(nn)
        assert plain(x).isnan().any() or isinstance(plain, nn.InstanceNorm1d)
        with pytest.raises(ArgumentError, match="eps=0"):
            build(ours)(x)
        varied = x + torch.tensor([[[0.0, 3.0], [1.0, 5.0]]])
        torch.testing.assert_close(build(ours)(varied), build(nn)(varied))
    for module in (nn, ours):
        with pytest.raises(ValueError, match="eps"):
            module.BatchNorm1d(2, eps=0.0)(x.expand(2, 2, 2))


def test_instance_counts() -> None:
    x = torch.tensor([[[2.0, 5.0], [1.0, 9.0]]])
    theirs, mine = (module.InstanceNorm1d(2, track_running_stats=True) for module in (nn, ours))
    for layer in (theirs, mine):
        layer(x)
        layer(x)
    assert theirs.num_batches_tracked == 0
    assert mine.num_batches_tracked == 2
    torch.testing.assert_close(theirs.running_mean, mine.running_mean)


def test_instance_cumulative() -> None:
    batches = torch.tensor([[[[2.0, 5.0]]], [[[1.0, 9.0]]]])
    theirs, mine = (
        module.InstanceNorm1d(1, momentum=None, track_running_stats=True) for module in (nn, ours)
    )
    for x in batches:
        theirs(x)
        mine(x)
    assert theirs.running_mean == 0
    assert mine.running_mean == pytest.approx((3.5 + 5) / 2)
    assert mine.running_var == pytest.approx((4.5 + 32) / 2)  # the unbiased variances of (2, 5) and (1, 9)


def test_nan_replaced() -> None:
    x = torch.tensor([[2.0], [5.0]])
    theirs, mine = nn.BatchNorm1d(1, momentum=1.0), ours.BatchNorm1d(1, momentum=1.0)
    for layer in (theirs, mine):
        layer.running_mean.fill_(torch.nan)
        layer(x)
    assert theirs.running_mean.isnan()
    assert mine.running_mean == 3.5


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    x = torch.tensor([[2.0], [5.0], [11.0]], requires_grad=True)
    theirs, mine = nn.BatchNorm1d(1), ours.BatchNorm1d(1)
    for layer in (theirs, mine):
        checkpoint(layer, x, use_reentrant=reentrant).square().sum().backward()
    assert theirs.num_batches_tracked == 2
    assert mine.num_batches_tracked == 1
    assert mine.running_mean == pytest.approx(0.6)
    assert theirs.running_mean == pytest.approx(1.14)  # 0.9·0.6 + 0.1·6: a momentum of 0.19


def test_kept_gradient() -> None:
    gradients = []
    for module in (nn, ours):
        layer = module.BatchNorm1d(1)
        x = torch.tensor([[2.0], [5.0], [11.0]], requires_grad=True)
        y = layer.eval()(x).sum()
        layer.train()(x.detach() * 10)
        y.backward()
        gradients.append(x.grad[0, 0])
    right = (1 + 1e-5) ** -0.5
    assert gradients[0] < 0.5 * right
    assert gradients[1] == pytest.approx(right)


def third(layer: nn.Module, x: Tensor, v: Tensor) -> Tensor:
    """The third derivative of Σv·f(x) along v three times."""
    at = x.clone().requires_grad_()
    value = (layer(at) * v).sum()
    for _ in range(3):
        (value,) = torch.autograd.grad(value, at, create_graph=True)
        value = (value * v.flip(0)).sum()
    return value.detach()


def test_third_derivative() -> None:
    x = torch.tensor([[0.3], [-1.2], [2.1], [0.9]], dtype=torch.float64)
    v = torch.tensor([[0.7], [-0.4], [1.1], [0.2]], dtype=torch.float64)

    def along(t: float) -> Tensor:
        moved = x + t * v.flip(0)
        centred = moved - moved.mean(0)
        return (centred * (centred.square().mean(0) + 1e-5).rsqrt() * v).sum()

    h = 1e-3
    right = (along(2 * h) - 2 * along(h) + 2 * along(-h) - along(-2 * h)) / (2 * h**3)
    assert third(ours.BatchNorm1d(1).double(), x, v) == pytest.approx(
        float(right), rel=1e-4
    )  # O(h²) of the quotient
    assert third(nn.BatchNorm1d(1).double(), x, v) != pytest.approx(float(right), rel=1e-2)


def test_offset_precision() -> None:
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0)) + 1e4
    exact = truth(spec.layer(1), x, torch.zeros_like(x))
    worst = [
        errors_in_ulps(module.LayerNorm(512)(x), exact.y, exact.scale["y"]).max().item()
        for module in (nn, ours)
    ]
    assert worst[0] > 100
    assert worst[1] <= 4


def test_constants() -> None:
    x = torch.full((1000, 1), 7.3)
    theirs, mine = nn.BatchNorm1d(1), ours.BatchNorm1d(1)
    assert theirs(x).abs().max() > 0.01
    assert not mine(x).any()


def test_memory_format() -> None:
    x = torch.randn(2, 4, 3, 5).contiguous(memory_format=torch.channels_last)
    theirs, mine = nn.LayerNorm([3, 5])(x), ours.LayerNorm([3, 5])(x)
    assert theirs.is_contiguous()
    assert not theirs.is_contiguous(memory_format=torch.channels_last)
    assert mine.stride() == x.stride()
    turned = torch.randn(4, 3, 2).transpose(0, -1)
    assert nn.BatchNorm1d(3)(turned).is_contiguous()
    assert ours.BatchNorm1d(3)(turned).stride() == turned.stride()


CRASH = """
import torch, normalcy.nn
x = torch.linspace(-1, 2, 60).reshape(2, 5, 3, 2).contiguous(memory_format=torch.channels_last)
layer = {module}.GroupNorm(5, 5)
layer(x).sum().backward()
print(layer.bias.grad.tolist())
"""


def test_group_norm_parameters_only() -> None:
    found = [
        subprocess.run(
            [sys.executable, "-c", CRASH.format(module=module)], capture_output=True, text=True, check=False
        )
        for module in ("torch.nn", "normalcy.nn")
    ]
    assert found[0].returncode != 0
    assert found[1].stdout.strip() == "[12.0, 12.0, 12.0, 12.0, 12.0]"


def test_mixed_dtypes() -> None:
    x = torch.randn(2, 3, 4)
    theirs, mine = nn.RMSNorm(4, dtype=torch.bfloat16), ours.RMSNorm(4, dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "cannot dispatch to fused implementation", once a process
        assert theirs(x).dtype == torch.float32
    with pytest.raises(TypeMismatchError, match=r"weight of torch.bfloat16 .*torch.float32"):
        mine(x)
    assert nn.InstanceNorm1d(3, track_running_stats=True).double().eval()(x).shape == x.shape
    with pytest.raises(TypeMismatchError, match=r"running_mean of torch.float64 .*torch.float32"):
        ours.InstanceNorm1d(3, track_running_stats=True).double().eval()(x)
    assert ours.RMSNorm(4)(x.bfloat16()).dtype == torch.bfloat16


def test_momentum_range() -> None:
    assert nn.BatchNorm1d(3, momentum=2.5).momentum == 2.5
    with pytest.raises(ArgumentError, match=r"momentum=2\.5"):
        ours.BatchNorm1d(3, momentum=2.5)
    layer = ours.BatchNorm1d(3)
    layer.momentum = 2.5
    with pytest.raises(ArgumentError, match=r"momentum=2\.5"):
        layer(torch.randn(4, 3))


def test_stored_gradient() -> None:
    x = torch.tensor([[2.0], [5.0], [11.0]])
    mean, var = torch.tensor([4.0], requires_grad=True), torch.tensor([9.0])
    with pytest.raises(RuntimeError, match="running_mean"):
        functional.batch_norm(x, mean, var)
    normalcy.batch_norm(x, mean, var).sum().backward()
    assert mean.grad.item() == pytest.approx(-3 * (9 + 1e-5) ** -0.5)


def test_nested() -> None:
    parts = [torch.randn(2, 4), torch.randn(3, 4)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged)
    assert functional.layer_norm(nested, (4,)).is_nested
    with pytest.raises(TypeMismatchError, match="nested"):
        normalcy.layer_norm(nested, 4)


def test_overflow() -> None:
    x = torch.tensor([[1e200], [-1e200], [3e200]], dtype=torch.float64)
    assert not functional.batch_norm(x, None, None, training=True).any()
    assert not functional.rms_norm(x.T, (3,)).any()
    assert functional.layer_norm(x.T.contiguous(), (3,)).isnan().all()
    assert normalcy.batch_norm(x, training=True).isnan().all()
    assert normalcy.rms_norm(x.T, 3).isnan().all()
    assert normalcy.layer_norm(x.T, 3).isnan().all()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (ours.BatchNorm1d(4, convention=KERAS), "biased variance"),
        (ours.BatchNorm1d(4, convention=replace(TORCH, debias=True)), "debiased"),
        (ours.InstanceNorm1d(4, momentum=None, track_running_stats=True), "never updates"),
        (ours.Fused(ours.BatchNorm1d(4), "relu"), "Fused"),
    ],
)
def test_scripting(layer: nn.Module, why: str) -> None:
    model = nn.Sequential(layer)
    with pytest.raises(TypeMismatchError, match=why):
        torch.jit.script(model)
    assert model[0] is layer
    mine, theirs = ours.BatchNorm1d(4), nn.BatchNorm1d(4)
    x = torch.randn(6, 4, 3) + 50
    scripted = torch.jit.script(mine)
    assert torch.equal(scripted(x), theirs(x))
    assert torch.equal(scripted.running_var, theirs.running_var)


def test_instance_channels_warning() -> None:
    x = torch.randn(2, 4, 5)
    with pytest.warns(UserWarning, match="num_features"):
        y = nn.InstanceNorm1d(3)(x)
    assert torch.allclose(ours.InstanceNorm1d(3)(x), y, atol=1e-6)
    with pytest.raises(ValueError, match="3 channels"):
        ours.InstanceNorm1d(3, affine=True)(x)


@pytest.mark.parametrize(
    "layer",
    [ours.BatchNorm2d(3), ours.LayerNorm(4), ours.GroupNorm(1, 3), ours.InstanceNorm1d(3), ours.RMSNorm(4)],
)
def test_fx_tracing(layer: nn.Module) -> None:
    """PyTorch's tracer keeps its own layers whole; of a subclass it would lose parameters and mode."""
    with pytest.raises(TypeMismatchError, match="release"):
        torch.fx.symbolic_trace(nn.Sequential(layer))
    released = nn.Sequential(layer)
    ours.release(released)
    assert [node.op for node in torch.fx.symbolic_trace(released).graph.nodes] == [
        "placeholder",
        "call_module",
        "output",
    ]


def test_infinity() -> None:
    x = torch.tensor([[1.0, torch.inf, 3.0]])
    theirs, mine = nn.RMSNorm(3)(x), ours.RMSNorm(3)(x)
    assert torch.equal(theirs.isnan(), torch.tensor([[False, True, False]]))
    assert mine.isnan().all()


def test_beyond_range() -> None:
    x = torch.tensor([[3e38, -3e38, 3e38, 1e38]])
    assert nn.LayerNorm(4)(x).isnan().all()
    y = ours.LayerNorm(4)(x)
    exact = forward("layer", x.numpy()).y
    right = y.isfinite()
    assert right.sum() == 3
    np.testing.assert_allclose(y[right].detach().numpy(), exact[right.numpy()], rtol=1e-5, atol=1e-6)
