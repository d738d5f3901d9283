"""`Fused` as a module: what tools find in it, and what it does where one has replaced its child."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_all
from torch.nn.utils import parametrize

from normalcy import nn as ours
from normalcy.errors import ArgumentError, ShapeError, TooFewValuesError, TypeMismatchError
from normalcy.flow import record
from normalcy.kernels.activation import ACTIVATIONS
from normalcy.nn import Fused, adopt, release
from normalcy.surgery import fold

activations = pytest.mark.parametrize("activation", [None, *ACTIVATIONS], ids=str)
MASK = torch.rand(4, 1, 5, 6, generator=torch.Generator().manual_seed(3)) < 0.6


def data(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, residual = (torch.randn(4, 3, 5, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    return (x * 2 + 30).to(dtype), (residual + 0.2).to(dtype)


def settled(norm: nn.Module, seed: int = 1) -> Any:
    """Parameters and statistics that are nobody's default."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) + 0.3)
        for name, buffer in norm.named_buffers():
            if name in ("running_mean", "running_var"):
                buffer.copy_(
                    torch.rand(buffer.shape, generator=generator) * 3 + (29 if "mean" in name else 1)
                )
    return norm


def composed(norm: nn.Module, activation: str | None, x: Tensor, residual: Tensor | None) -> Tensor:
    """In PyTorch's operators, one after the other."""
    y = norm(x) if residual is None else norm(x) + residual
    return y if activation is None else ACTIVATIONS[activation].function(y)


def close(got: Tensor, expected: Tensor) -> None:
    """Float32 at 30 away from zero: PyTorch's own norms lose some fifteen spreads' worth of ulps."""
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)


# --- as a module


def test_state_is_the_childs_under_norm() -> None:
    fused, plain = Fused(settled(ours.BatchNorm2d(3)), "relu"), nn.BatchNorm2d(3)
    state = fused.state_dict()
    assert list(state) == [
        "norm.weight",
        "norm.bias",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ]
    plain.load_state_dict({name.removeprefix("norm."): value for name, value in state.items()})
    x, residual = data()
    close(fused.eval()(x, residual), torch.relu(plain.eval()(x) + residual))
    fresh = Fused(ours.BatchNorm2d(3), "relu").eval()
    fresh.load_state_dict({f"norm.{name}": value for name, value in plain.state_dict().items()})
    assert torch.equal(fresh(x, residual), fused(x, residual))


@activations
def test_copies_and_pickles_compute_the_same(activation: str | None) -> None:
    fused = Fused(settled(ours.BatchNorm2d(3)), activation)
    x, residual = data()
    buffer = io.BytesIO()
    torch.save(fused, buffer)
    buffer.seek(0)
    others = [
        copy.deepcopy(fused),
        pickle.loads(pickle.dumps(fused)),  # noqa: S301 - its own bytes
        torch.load(buffer, weights_only=False),
    ]
    y = fused(x, residual, MASK)
    for other in others:
        assert torch.equal(other(x, residual, MASK), y)
        for name, value in other.state_dict().items():
            assert torch.equal(value, fused.state_dict()[name])
    assert fused.norm.num_batches_tracked == 1


def test_it_says_its_activation_and_its_norm() -> None:
    text = repr(Fused(ours.GroupNorm(1, 3), "silu"))
    assert "activation='silu'" in text
    assert "(norm): GroupNorm(1, 3" in text


@activations
def test_modes_are_the_childs(activation: str | None) -> None:
    fused = Fused(settled(ours.BatchNorm2d(3)), activation)
    x, residual = data()
    trained = fused(x, residual)
    assert fused.norm.num_batches_tracked == 1
    fused.eval()
    assert not fused.norm.training
    served = fused(x, residual)
    assert not torch.equal(served, trained)
    assert torch.equal(served[1:2], fused(x[1:2], residual[1:2]))
    assert fused.norm.num_batches_tracked == 1


def test_running_statistics_are_those_of_the_norm_alone() -> None:
    fused, alone = Fused(settled(ours.BatchNorm2d(3)), "relu"), settled(ours.BatchNorm2d(3))
    for seed in range(3):
        x, residual = data(seed)
        fused(x, residual, MASK)
        alone(x, MASK)
    for name, value in alone.state_dict().items():
        assert torch.equal(value, fused.state_dict()[f"norm.{name}"]), name


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@activations
def test_a_compiled_one_computes_the_same(activation: str | None, training: bool) -> None:
    torch.compiler.reset()
    fused = Fused(settled(ours.BatchNorm2d(3)), activation).train(training)
    x, residual = data()
    expected = copy.deepcopy(fused)
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    for mask in (None, MASK):
        leaf, other = (t.clone().requires_grad_() for t in (x, residual))
        y = compiled(leaf, other, mask)
        close(y, expected(x, residual, mask))
        y.backward(residual)
        found = (leaf.grad, other.grad)
        leaf, other = (t.clone().requires_grad_() for t in (x, residual))
        copy.deepcopy(expected)(leaf, other, mask).backward(residual)
        close(found[0], leaf.grad)
        close(found[1], other.grad)
    close(fused.norm.running_var, expected.norm.running_var)


# --- what is refused


def test_a_wrong_activation_or_norm_is_refused_when_it_is_built() -> None:
    with pytest.raises(ArgumentError, match=r"activation='tanh'; needed: relu, leaky_relu, gelu, silu"):
        Fused(ours.BatchNorm2d(3), "tanh")
    with pytest.raises(ArgumentError, match=r"as norm; needed: a torch\.nn\.Module"):
        Fused(torch.relu)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("residual", "error", "sentence"),
    [
        (
            torch.randn(3, 1, 1),
            ShapeError,
            r"a residual of shape \(3, 1, 1\).*; needed: the shape of the input",
        ),
        (torch.randn(4, 3, 5, 6).double(), TypeMismatchError, "a residual of torch.float64"),
        (1.0, TypeMismatchError, "residual as float; needed: a torch.Tensor"),
        (torch.empty(4, 3, 5, 6, device="meta"), TypeMismatchError, "on meta"),
    ],
    ids=["shape", "dtype", "number", "device"],
)
@pytest.mark.parametrize("hooked", [False, True], ids=["one pass", "in sequence"])
def test_a_residual_that_does_not_fit_is_refused_and_nothing_has_changed(
    hooked: bool, residual: Any, error: type[Exception], sentence: str
) -> None:
    fused = Fused(settled(ours.BatchNorm2d(3)), "relu")
    if hooked:
        fused.norm.register_forward_hook(lambda *_: None)
    before = {name: value.clone() for name, value in fused.state_dict().items()}
    with pytest.raises(error, match=sentence):
        fused(data()[0], residual)
    for name, value in fused.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_one_valid_value_of_a_channel_is_refused_in_both_ways() -> None:
    mask = torch.zeros(4, 1, 5, 6, dtype=torch.bool)
    mask[0, 0, 0, 0] = True
    fused = Fused(settled(ours.BatchNorm2d(3)), "relu")
    x, residual = data()
    with pytest.raises(TooFewValuesError, match="BatchNorm2d"):
        fused(x, residual, mask)
    fused.norm.register_forward_hook(lambda *_: None)
    with pytest.raises(TooFewValuesError, match="BatchNorm2d"):
        fused(x, residual, mask)
    assert fused.norm.num_batches_tracked == 0


class Exp(nn.Module):
    """A parametrization."""

    def forward(self, value: Tensor) -> Tensor:
        return value.exp()


class Mine(ours.BatchNorm2d):
    """A user's subclass, which computes something else."""

    def forward(self, input: Tensor, mask: Tensor | None = None) -> Tensor:
        return 2 * super().forward(input, mask)


class TakesMask(nn.Module):
    """A norm of somebody else's that knows masks."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x - (x if mask is None else torch.where(mask, x, 0.0)).mean((0, 2, 3), keepdim=True)


def parametrized() -> nn.Module:
    norm = settled(ours.BatchNorm2d(3))
    parametrize.register_parametrization(norm, "weight", Exp())
    return norm


def synchronized() -> nn.Module:
    """PyTorch's converter takes our child for PyTorch's own; its layer runs on a CPU in evaluation only."""
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Fused(settled(ours.BatchNorm2d(3)), "relu"))
    assert isinstance(model, Fused)
    assert type(model.norm) is nn.SyncBatchNorm
    return model.norm.eval()


CHILDREN: dict[str, Callable[[], nn.Module]] = {
    "PyTorch's": lambda: settled(nn.BatchNorm2d(3)),
    "PyTorch's in evaluation": lambda: settled(nn.BatchNorm2d(3)).eval(),
    "PyTorch's group norm": lambda: settled(nn.GroupNorm(1, 3)),
    "nothing": nn.Identity,
    "synchronized": synchronized,
    "parametrized": parametrized,
    "subclass": lambda: settled(Mine(3)),
    "two in a row": lambda: nn.Sequential(settled(ours.InstanceNorm2d(3)), settled(nn.BatchNorm2d(3))),
    "another's": TakesMask,
}
children = pytest.mark.parametrize("build", CHILDREN.values(), ids=CHILDREN)


@pytest.mark.parametrize("with_residual", [True, False], ids=["residual", "alone"])
@activations
@children
def test_a_child_that_a_tool_has_put_there_runs_in_sequence(
    build: Callable[[], nn.Module], activation: str | None, with_residual: bool
) -> None:
    fused, x, residual = Fused(ours.BatchNorm2d(3), activation), *data()
    fused.norm = build()
    alone = copy.deepcopy(fused.norm)
    found = []
    for compute in (fused, lambda x, r: composed(alone, activation, x, r)):
        leaf, other = x.clone().requires_grad_(), residual.clone().requires_grad_()
        y = compute(leaf, other if with_residual else None)
        y.backward(residual)
        found.append((y.detach(), leaf.grad, other.grad))
    for one, two in zip(*found, strict=True):
        assert one is two is None or torch.equal(one, two)
    for one, two in zip(fused.norm.parameters(), alone.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)
    for one, two in zip(fused.norm.buffers(), alone.buffers(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize(
    "name", ["PyTorch's", "PyTorch's group norm", "nothing", "synchronized", "two in a row"]
)
def test_a_mask_that_the_child_cannot_take_is_refused_by_name(name: str) -> None:
    fused = Fused(ours.BatchNorm2d(3), "relu")
    fused.norm = CHILDREN[name]()
    x, residual = data()
    kind = type(fused.norm).__name__
    with pytest.raises(TypeMismatchError, match=rf"got a mask, and its norm is a {kind}, which takes none"):
        fused(x, residual, MASK)
    assert fused(x, residual).isfinite().all()


@activations
@pytest.mark.parametrize("name", ["parametrized", "subclass", "another's"])
def test_a_child_that_takes_a_mask_gets_it_and_masked_places_are_zero(
    name: str, activation: str | None
) -> None:
    fused, x, residual = Fused(ours.BatchNorm2d(3), activation), *data()
    fused.norm = CHILDREN[name]()
    y = fused(x, residual, MASK)
    z = copy.deepcopy(fused.norm)(x, MASK) + residual
    expected = z if activation is None else ACTIVATIONS[activation].function(z)
    valid = MASK.expand(y.shape)
    close(y[valid], expected[valid])
    assert (y[~valid] == 0).all()


@activations
def test_release_and_adopt_go_one_way_and_back(activation: str | None) -> None:
    model, (x, residual) = nn.ModuleDict({"block": Fused(settled(ours.BatchNorm2d(3)), activation)}), data()
    expected = copy.deepcopy(model)["block"](x, residual)
    report = release(model)
    assert [item.where for item in report.done] == ["block.norm"]
    assert [(item.where, item.why) for item in report.refused] == [
        (
            "block",
            "PyTorch has no layer of this kind; with PyTorch's own norm in it, it runs in sequence",
        )
    ]
    assert type(model["block"].norm) is nn.BatchNorm2d
    close(copy.deepcopy(model)["block"](x, residual), expected)
    assert [item.where for item in adopt(model).done] == ["block.norm"]
    assert torch.equal(model["block"](x, residual), expected)


@activations
def test_one_pass_and_in_sequence_are_the_same_to_rounding(activation: str | None) -> None:
    x, residual = data()
    found = []
    for hooked in (False, True):
        fused = Fused(settled(ours.BatchNorm2d(3)), activation)
        if hooked:
            fused.norm.register_forward_hook(lambda *_: None)
        leaf, other = x.clone().requires_grad_(), residual.clone().requires_grad_()
        y = fused(leaf, other, MASK)
        y.backward(residual)
        found.append((y, leaf.grad, other.grad, *(p.grad for p in fused.parameters()), *fused.buffers()))
    for one, two in zip(*found, strict=True):
        close(one, two)


@pytest.mark.parametrize("junk", [torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize("name", ["one of ours", "hooked", "another's"])
@activations
def test_what_stands_at_masked_places_has_no_effect_in_sequence_either(
    activation: str | None, name: str, junk: float
) -> None:
    found = []
    for filled in (0.0, junk):
        fused = Fused(settled(ours.BatchNorm2d(3)), activation)
        if name == "hooked":
            fused.norm.register_forward_hook(lambda *_: None)
        elif name == "another's":
            fused.norm = TakesMask()
        x, residual, dy = (torch.where(MASK, t, filled).requires_grad_() for t in (*data(), data(9)[1]))
        y = fused(x, residual, MASK)
        given = (x, residual, *fused.parameters())
        found.append((y.detach(), *torch.autograd.grad(y, given, dy)))
        for value in found[-1][:3]:
            assert (value[~MASK.expand(value.shape)] == 0).all()
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)


# --- hooks


def norms_own_output(x: Tensor) -> Tensor:
    return settled(ours.BatchNorm2d(3))(x)


def test_a_hook_on_the_child_sees_the_norms_own_output() -> None:
    fused, (x, residual) = Fused(settled(ours.BatchNorm2d(3)), "relu"), data()
    seen: list[Tensor] = []
    handle = fused.norm.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    y = fused(x, residual)
    assert torch.equal(seen[0], norms_own_output(x))
    assert (y >= 0).all()
    handle.remove()
    fused(x, residual)
    assert len(seen) == 1


def test_a_hook_on_the_child_may_change_what_follows() -> None:
    fused, (x, residual) = Fused(settled(ours.BatchNorm2d(3)), "relu"), data()
    fused.norm.register_forward_hook(lambda _module, _inputs, output: output * 0)
    assert torch.equal(fused(x, residual), residual.relu())
    fused.norm.register_forward_pre_hook(lambda _module, inputs: (inputs[0] * 3, *inputs[1:]))
    assert torch.equal(fused(x, residual), residual.relu())


@pytest.mark.parametrize(
    "register",
    [
        of_all.register_module_forward_hook,
        of_all.register_module_forward_pre_hook,
    ],
)
def test_a_hook_on_all_modules_sees_the_child_called(register: Callable[..., Any]) -> None:
    fused, (x, residual) = Fused(settled(ours.BatchNorm2d(3)), "relu"), data()
    called: list[nn.Module] = []
    handle = register(lambda module, *_: called.append(module))
    try:
        fused(x, residual)
    finally:
        handle.remove()
    assert fused.norm in called


@pytest.mark.parametrize("kind", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_a_backward_hook_on_the_child_gets_the_gradient_at_the_norms_output(kind: str) -> None:
    fused, (x, residual) = Fused(settled(ours.BatchNorm2d(3)), "relu"), data()
    seen: list[Tensor] = []
    getattr(fused.norm, kind)(lambda _module, *gradients: seen.append(gradients[-1][0]))
    leaf = x.clone().requires_grad_()
    y = fused(leaf, residual)
    y.backward(residual)
    assert torch.equal(seen[0], torch.where(y > 0, residual, 0.0))


def test_a_recording_sees_a_norm_an_addition_and_an_activation() -> None:
    model = nn.Sequential(nn.Conv2d(3, 3, 1), Fused(settled(ours.BatchNorm2d(3)), "relu")).eval()
    x, residual = data()
    flow = record(model, lambda: model[1](model[0](x), residual))
    (norm,) = flow.steps_of("1.norm")
    assert norm.leaf is model[1].norm
    added, activated = flow.steps_of("1")
    assert (added.op, activated.op) == ("add", "relu")
    assert flow.consumers(norm.outputs[0]) == (added,)
    assert flow.consumers(added.outputs[0]) == (activated,)


def test_a_torch_function_mode_sees_what_follows_the_child() -> None:
    seen: list[str] = []

    class Looking(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(getattr(function, "__name__", ""))
            return function(*args, **(kwargs or {}))

    fused, (x, residual) = Fused(settled(ours.BatchNorm2d(3)), "relu"), data()
    one_pass = fused(x, residual)
    with Looking():
        y = fused(x, residual)
    assert seen[-2:] == ["add", "relu"]
    close(y, one_pass)


def test_a_forward_that_was_replaced_on_the_child_is_called() -> None:
    fused, (x, residual) = Fused(settled(ours.BatchNorm2d(3)), "relu"), data()
    forward = fused.norm.forward
    fused.norm.forward = lambda *given: forward(*given) * 0 + 5
    close(fused(x, residual), (5 + residual).relu())


def test_a_norm_in_it_folds_and_what_is_left_is_right() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 3, 1), Fused(settled(ours.BatchNorm2d(3)), "silu")).eval()
    x, _ = data()
    report = fold(model, x)
    assert [item.where for item in report.done] == ["1.norm"]
    assert type(report.model[1].norm) is nn.Identity
    assert report.error <= report.bound
    # of products that cancel: x is 30 away from zero
    torch.testing.assert_close(report.model(x), model(x), rtol=1e-4, atol=1e-3)


def test_lengths_are_the_mask_they_stand_for_where_the_child_takes_them() -> None:
    x, lengths = torch.randn(3, 4, 6) + 1e3, torch.tensor([6, 2, 4])
    mask = (torch.arange(6) < lengths[:, None])[:, None]
    one, other = (ours.Fused(ours.BatchNorm1d(4), "silu") for _ in range(2))
    assert torch.equal(one(x, x.cos(), lengths=lengths), other(x, x.cos(), mask=mask))
    assert torch.equal(one.norm.running_var, other.norm.running_var)
    with pytest.raises(TypeMismatchError, match="LayerNorm, which takes none"):
        ours.Fused(ours.LayerNorm(6))(x, lengths=lengths)
    with pytest.raises(ArgumentError, match="mask and lengths"):
        one(x, mask=mask, lengths=lengths)
    with pytest.raises(ShapeError, match=r"Use mask\[:, None\]"):
        one(x, mask=mask[:, 0])


def test_a_residual_that_is_no_tensor_is_refused_for_one_example_too() -> None:
    with pytest.raises(TypeMismatchError, match="residual as float"):
        ours.Fused(ours.InstanceNorm1d(3))(torch.randn(3, 5) + 1e3, residual=1.0)
