"""A mask is as if the other places were not there: they count nowhere, whatever they hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from laws.masked import a_mask, right, spoiled
from laws.tables import BACKENDS, BATCH, CENTRED, NORMS, Row, cotangent, recording
from torch import Tensor, nn

import normalcy
from normalcy import Moments, conventions, definition, masks, spec
from normalcy import nn as ours
from normalcy.conventions import replace
from normalcy.errors import ArgumentError, NormalcyError, ShapeError, TooFewValuesError, TypeMismatchError
from normalcy.testing import ULPS, assert_close, layouts

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
OFFSETS = {torch.float64: 1e4, torch.float32: 1e4, torch.bfloat16: 10.0}
JUNK = (0.0, torch.nan, torch.inf, -torch.inf, 1e30)
INSTANCE = Row(
    "instance-tracked",
    spec.tracked_instance,
    (3, 4, 9),
    lambda: ours.InstanceNorm1d(4, affine=True, track_running_stats=True),
)
TIMED = (
    Row("batch-1d-length", spec.batch, (4, 3, 7), lambda: ours.BatchNorm1d(3)),
    Row("batch-2d", spec.batch, (4, 3, 2, 7), lambda: ours.BatchNorm2d(3)),
    Row("batch-3d", spec.batch, (4, 3, 2, 2, 7), lambda: ours.BatchNorm3d(3)),
    Row("instance-1d", spec.instance, (4, 3, 7), lambda: ours.InstanceNorm1d(3, affine=True)),
    Row("instance-2d", spec.instance, (4, 3, 2, 7), lambda: ours.InstanceNorm2d(3, affine=True)),
    Row("instance-3d", spec.instance, (4, 3, 2, 2, 7), lambda: ours.InstanceNorm3d(3, affine=True)),
    Row("group", spec.group(2), (4, 6, 7), lambda: ours.GroupNorm(2, 6)),
    Row("layer-channels", spec.channels, (4, 6, 2, 7), lambda: ours.LayerNorm2d(6)),
)
LENGTHS = torch.tensor([7, 4, 2, 5])

rows = pytest.mark.parametrize("row", NORMS, ids=str)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
backends = pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
modes = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


def outcome(layer: nn.Module, x: Tensor, dy: Tensor, *args: Any, **keywords: Any) -> dict[str, Tensor]:
    """The output, every gradient, and what the buffers hold afterwards."""
    leaf = x.detach().requires_grad_()  # the same memory, so that layouts stay what they are
    y = layer(leaf, *args, **keywords)
    names = [f"d{name}" for name, _ in layer.named_parameters()]
    found = torch.autograd.grad(y, [leaf, *layer.parameters()], dy)
    buffers = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    return {"y": y.detach(), **dict(zip(["dx", *names], found, strict=True)), **buffers}


def gradients(results: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: results[name] for name in ("y", "dx", "dweight", "dbias") if name in results}


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor], what: object = "") -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), (name, what)


def truth(layer: nn.Module, row: Row, x: Tensor, dy: Tensor, mask: Tensor | None) -> Any:
    stored = None
    if not layer.training and row.norm.infer is spec.Origin.STORED:
        stored = (layer.running_mean.clone(), layer.running_var.clone())
    parameters = layer.weight, getattr(layer, "bias", None)
    return right(row.norm, x, dy, *parameters, eps=layer.eps, mask=mask, stored=stored)


@backends
@modes
@dtypes
@rows
def test_a_masked_norm_is_the_definition_with_that_mask(
    row: Row, dtype: torch.dtype, training: bool, backend: Any
) -> None:
    mask = a_mask(row.shape, row.norm)
    for offset in (0.0, OFFSETS[dtype]):
        layer, x = row.layer(dtype).train(training), row.input(dtype, offset=offset)
        exact = truth(layer, row, x, dy := cotangent(x), mask)
        with recording(backend) as calls:
            results = outcome(layer, spoiled(x, mask, torch.nan), dy, mask)
        assert calls.keys() >= {"apply", "collect_grad", "apply_grad"}
        exact.judge(gradients(results))


@backends
@modes
@dtypes
@rows
def test_a_mask_of_ones_is_no_mask(row: Row, dtype: torch.dtype, training: bool, backend: Any) -> None:
    x = row.input(dtype, offset=OFFSETS[dtype])
    dy, ones = cotangent(x), torch.ones(row.shape, dtype=torch.bool)
    exact = truth(row.layer(dtype).train(training), row, x, dy, None)
    with recording(backend) as calls:
        plain = outcome(row.layer(dtype).train(training), x, dy)
        masked = outcome(row.layer(dtype).train(training), x, dy, ones)
    assert calls["apply_grad"] == 2
    exact.judge(gradients(plain))
    exact.judge(gradients(masked))
    for name, value in masked.items():
        # Float64 sums that start elsewhere may differ in the last places of mean and variance, and all that
        # follows from them by as much.
        if name in exact.scale:
            assert_close(value, plain[name].double(), ulps=ULPS[dtype], scale=exact.scale[name], what=name)
        else:
            torch.testing.assert_close(value, plain[name], rtol=torch.finfo(dtype).eps, atol=0)


@backends
@modes
@dtypes
@rows
def test_what_stands_at_masked_places_has_no_effect_on_anything(
    row: Row, dtype: torch.dtype, training: bool, backend: Any
) -> None:
    x, mask = row.input(dtype, offset=OFFSETS[dtype]), a_mask(row.shape, row.norm)
    dy = cotangent(x)
    with recording(backend) as calls:
        clean = outcome(row.layer(dtype).train(training), x, dy, mask)
        assert all(value.isfinite().all() for value in clean.values())
        for junk in JUNK:
            found = outcome(row.layer(dtype).train(training), spoiled(x, mask, junk), dy, mask)
            assert_same_bits(found, clean, f"{junk} in x")
            found = outcome(row.layer(dtype).train(training), x, spoiled(dy, mask, junk), mask)
            assert_same_bits(found, clean, f"{junk} in dy")
    assert calls["apply_grad"] == 1 + 2 * len(JUNK)


@modes
@dtypes
@rows
def test_masked_places_have_output_and_gradient_zero(row: Row, dtype: torch.dtype, training: bool) -> None:
    x, mask = row.input(dtype), a_mask(row.shape, row.norm)
    layer = row.layer(dtype).train(training)
    found = outcome(layer, spoiled(x, mask, torch.nan), spoiled(cotangent(x), mask, torch.nan), mask)
    for name in ("y", "dx"):
        assert (found[name][~mask] == 0).all()
        assert (found[name][mask] != 0).float().mean() > 0.9  # a gradient may round to zero here and there


@pytest.mark.parametrize("row", [*BATCH, INSTANCE], ids=str)
def test_statistics_that_are_stored_see_no_mask_and_valid_places_are_as_ever(row: Row) -> None:
    x, mask = row.input(offset=100), a_mask(row.shape, row.norm)
    layer = row.layer().eval()
    plain = outcome(layer, x, dy := cotangent(x))
    masked = outcome(layer, spoiled(x, mask, torch.inf), dy, mask)
    for name in ("y", "dx"):
        assert torch.equal(masked[name][mask], plain[name][mask])
    assert_same_bits({name: masked[name] for name, _ in layer.named_buffers()}, dict(layer.named_buffers()))


# --- padding is slicing -------------------------------------------------------------------------------------


def bare(norm: spec.Norm) -> Callable[..., Tensor]:
    """The norm of `norm` without parameters, for any shape it takes."""
    return lambda x, mask=None: normalcy.normalize(x, norm, mask=mask)


@dtypes
@pytest.mark.parametrize("row", [r for r in TIMED if r.norm is not spec.batch], ids=str)
def test_padding_is_slicing_where_an_example_has_statistics_of_its_own(row: Row, dtype: torch.dtype) -> None:
    layer, x = row.layer(dtype), row.input(dtype, offset=OFFSETS[dtype])
    mask = masks.of_lengths(LENGTHS, row.shape).expand(row.shape)
    dy = cotangent(x)
    padded = outcome(layer, spoiled(x, mask, torch.nan), dy, lengths=LENGTHS)
    exact = truth(layer, row, x, dy, mask)
    sums = {name: torch.zeros_like(padded[name], dtype=torch.float64) for name in ("dweight", "dbias")}
    for i, length in enumerate(LENGTHS.tolist()):
        alone = outcome(layer, x[i : i + 1, ..., :length], dy[i : i + 1, ..., :length])
        for name in ("y", "dx"):
            scale = exact.scale[name][i : i + 1, ..., :length]
            part = padded[name][i : i + 1, ..., :length]
            assert_close(part, alone[name].double(), ulps=2 * ULPS[dtype], scale=scale, what=f"{name} of {i}")
            assert (padded[name][i, ..., length:] == 0).all()
        for name in sums:
            sums[name] += alone[name].double()
    for name, total in sums.items():  # each example's part was rounded once more
        assert_close(padded[name], total, ulps=3 * ULPS[dtype], scale=exact.scale[name], what=name)


@dtypes
@pytest.mark.parametrize("row", [r for r in TIMED if r.norm is spec.batch], ids=str)
def test_padding_is_slicing_for_batch_norm_and_its_running_statistics(row: Row, dtype: torch.dtype) -> None:
    x = row.input(dtype, offset=OFFSETS[dtype])
    places = masks.of_lengths(LENGTHS, row.shape).expand(row.shape[0], 1, *row.shape[2:])
    mask, dy = places.expand(row.shape), cotangent(x)
    layer, short = row.layer(dtype), Row("short", spec.batch, (), lambda: ours.BatchNorm1d(3)).layer(dtype)
    exact = truth(layer, row, x, dy, mask)
    padded = outcome(layer, spoiled(x, mask, torch.nan), dy, lengths=LENGTHS)
    sliced = outcome(short, x.movedim(1, -1)[places[:, 0]], dy.movedim(1, -1)[places[:, 0]])
    assert layer.num_batches_tracked == 1
    for name in ("y", "dx"):
        valid = padded[name].movedim(1, -1)[places[:, 0]]
        scale = exact.scale[name].movedim(1, -1)[places[:, 0]]
        assert_close(valid, sliced[name].double(), ulps=2 * ULPS[dtype], scale=scale, what=name)
    for name in ("dweight", "dbias"):
        assert_close(
            padded[name], sliced[name].double(), ulps=2 * ULPS[dtype], scale=exact.scale[name], what=name
        )
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(padded[name], sliced[name], rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("name", ["layer", "rms"])
def test_any_mask_over_features_is_the_norm_of_the_features_that_are_left(name: str, offset: float) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(6, 33, generator=generator) + offset
    mask = torch.rand(6, 33, generator=generator) < 0.5
    norm = spec.layer(1) if name == "layer" else spec.rms(1)
    y = bare(norm)(spoiled(x, mask, torch.nan), mask)
    size = right(norm, x, x, mask=mask).scale["y"]
    for i in range(6):
        alone = bare(norm)(x[i : i + 1, mask[i]])
        assert_close(y[i : i + 1, mask[i]], alone.double(), scale=size[i : i + 1, mask[i]], what=f"row {i}")


def test_running_statistics_of_a_mask_by_channel_are_those_of_each_channels_valid_values() -> None:
    row = BATCH[2]
    layer, x, mask = (
        row.layer(torch.float64),
        row.input(torch.float64, offset=1e3),
        a_mask(row.shape, row.norm),
    )
    made = definition.forward("batch", x.numpy(), mask=mask.numpy())
    before = (layer.running_mean.numpy().copy(), layer.running_var.numpy().copy())
    assert len(set(made.count.tolist())) > 1, "the channels should differ in how much is valid"
    layer(spoiled(x, mask, torch.nan), mask)
    stored = definition.stored_variance(made.var, made.count)
    for kept, old, new in zip(
        (layer.running_mean, layer.running_var), before, (made.mean, stored), strict=True
    ):
        expected = torch.from_numpy(definition.running_update(old, new, layer.momentum))
        torch.testing.assert_close(kept, expected, rtol=1e-13, atol=0)


def test_running_statistics_of_instance_norm_average_the_examples_that_have_enough_values() -> None:
    layer, x = INSTANCE.layer(torch.float64), INSTANCE.input(torch.float64, offset=50)
    lengths = torch.tensor([9, 0, 4])
    before = (layer.running_mean.clone(), layer.running_var.clone())
    layer(x, lengths=lengths)
    parts = [x[0], x[2, :, :4]]
    means = torch.stack([part.mean(-1) for part in parts]).mean(0)
    variances = torch.stack([part.var(-1) for part in parts]).mean(0)
    torch.testing.assert_close(layer.running_mean, 0.9 * before[0] + 0.1 * means, rtol=1e-13, atol=0)
    torch.testing.assert_close(layer.running_var, 0.9 * before[1] + 0.1 * variances, rtol=1e-13, atol=0)
    assert layer.num_batches_tracked == 1


@pytest.mark.parametrize("cumulative", ["values", "batches"])
def test_cumulative_statistics_of_padded_batches_are_those_of_what_is_valid(cumulative: str) -> None:
    generator = torch.Generator().manual_seed(11)
    batches = [torch.randn(3, 2, 5, generator=generator, dtype=torch.float64) + 100 * k for k in range(3)]
    lengths = [torch.tensor(pair) for pair in ([5, 1, 2], [0, 5, 5], [3, 3, 3])]
    convention = replace(conventions.TORCH, cumulative=cumulative)
    layer = ours.BatchNorm1d(2, momentum=None, convention=convention).double()
    valid = []
    for x, length in zip(batches, lengths, strict=True):
        layer(x, lengths=length)
        valid.append(torch.cat([x[i, :, :n] for i, n in enumerate(length.tolist())], dim=1))
    whole = torch.cat(valid, dim=1)
    if cumulative == "values":
        mean, var = whole.mean(1), whole.var(1)
    else:
        mean = torch.stack([part.mean(1) for part in valid]).mean(0)
        var = torch.stack([part.var(1) for part in valid]).mean(0)
    torch.testing.assert_close(layer.running_mean, mean, rtol=1e-12, atol=0)
    torch.testing.assert_close(layer.running_var, var, rtol=1e-12, atol=0)


@pytest.mark.parametrize("offset", [0.0, 1e6])
@pytest.mark.parametrize("dim", [0, (0, 2), None], ids=str)
def test_masked_pieces_merge_to_the_whole(dim: Any, offset: float) -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(5, 3, 7, generator=generator, dtype=torch.float64) + offset
    which = torch.randint(0, 4, x.shape, generator=generator)
    pieces = [Moments.of(spoiled(x, which == i, torch.nan), dim, which == i) for i in range(3)]
    merged = sum(pieces, Moments.empty(pieces[0].count.shape))
    whole = Moments.of(x, dim, which < 3)
    assert torch.equal(merged.count, whole.count)
    # a mean is as coarse as the values, and an error e of it enters m2 as n·e·spread; three merges
    ulp = 8 * torch.finfo(torch.float64).eps * max(abs(offset), 1)
    assert ((merged.mean - whole.mean).abs() <= ulp).all()
    assert ((merged.m2 - whole.m2).abs() <= ulp * whole.count).all()


# --- nothing, and one value ---------------------------------------------------------------------------------


@modes
@dtypes
@pytest.mark.parametrize("row", [*NORMS, INSTANCE], ids=str)
def test_where_nothing_is_valid_the_output_is_zero_and_nothing_is_learnt(
    row: Row, dtype: torch.dtype, training: bool
) -> None:
    layer = row.layer(dtype).train(training)
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    x = torch.full(row.shape, torch.nan, dtype=dtype)
    found = outcome(layer, x, cotangent(x), torch.zeros(row.shape, dtype=torch.bool))
    for name, value in gradients(found).items():
        assert (value == 0).all(), name
    assert_same_bits({name: found[name] for name in before}, before)


@rows
def test_a_statistic_without_values_leaves_the_others_as_they_are(row: Row) -> None:
    x, mask = row.input(offset=10), a_mask(row.shape, row.norm)
    layout = row.norm.axes.resolve(row.shape)
    split = mask.view(layout.shape)
    first = split
    for i, extent in enumerate(layout.statistic):
        first = first.narrow(i, 0, 1) if extent > 1 else first
    first.fill_(False)
    layer = row.layer()
    before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    exact = truth(layer, row, x, dy := cotangent(x), mask)
    found = outcome(layer, spoiled(x, mask, torch.nan), dy, mask)
    exact.judge(gradients(found))
    for name in ("running_mean", "running_var"):
        if name in before:
            assert found[name][0] == before[name][0]
            assert (found[name][1:] != before[name][1:]).all()


@pytest.mark.parametrize("row", BATCH, ids=str)
def test_one_valid_value_of_a_channel_is_refused_and_nothing_has_changed(row: Row) -> None:
    layer, x, mask = row.layer(), row.input(), torch.ones(row.shape, dtype=torch.bool)
    one_place = (0, slice(None), *[0] * (len(row.shape) - 2))
    mask[:, 1] = False
    mask[0, 1, *one_place[2:]] = True
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    with pytest.raises(
        TooFewValuesError, match="leaves 1 channel one valid value; needed: at least two, or none"
    ):
        layer(x, mask)
    alone = torch.zeros(row.shape, dtype=torch.bool)
    alone[one_place] = True
    with pytest.raises(TooFewValuesError, match="leaves 3 channels one valid value"):
        layer(x, alone)
    assert_same_bits(dict(layer.state_dict()), before)
    assert layer.eval()(x, mask).isfinite().all()


# --- how a mask may come ------------------------------------------------------------------------------------

SHAPES = {
    (4, 3, 7): [(4, 1, 7), (7,), (1, 1, 7), (4, 1, 1), (3, 1), (1, 3, 1), (4, 3, 1), (4, 3, 7), (3, 7)],
    (4, 3, 5, 6): [(4, 1, 5, 6), (5, 6), (6,), (5, 1), (4, 3, 1, 1), (3, 1, 1), (1, 3, 5, 1), (4, 1, 1, 1)],
}


@pytest.mark.parametrize(("shape", "narrow"), [(s, n) for s, many in SHAPES.items() for n in many], ids=str)
@pytest.mark.parametrize(
    "build",
    [
        lambda: ours.InstanceNorm1d(3, affine=True),
        lambda: ours.BatchNorm1d(3),
        lambda: ours.GroupNorm(1, 3),
        lambda: ours.LayerNorm2d(3),
        lambda: ours.LayerNorm(7),
        lambda: ours.RMSNorm(7),
    ],
    ids=["instance", "batch", "group", "layer-channels", "layer", "rms"],
)
def test_a_mask_that_broadcasts_is_the_mask_it_broadcasts_to(
    build: Callable[[], nn.Module], shape: tuple[int, ...], narrow: tuple[int, ...]
) -> None:
    layer = build()
    if len(shape) == 4:
        kinds = {ours.BatchNorm1d: ours.BatchNorm2d, ours.InstanceNorm1d: ours.InstanceNorm2d}
        kind = kinds.get(type(layer))
        layer = kind(3, affine=True) if kind else layer
        if isinstance(layer, (ours.LayerNorm, ours.RMSNorm)):
            layer = type(layer)(6)
    x = Row("", spec.batch, shape, build).input(offset=100)
    mask = torch.rand(narrow, generator=torch.Generator().manual_seed(1)) < 0.6
    mask.view(-1)[:2] = True
    mask.view(-1)[-1] = False
    assert not mask.expand(shape).all()
    dy = cotangent(x)
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    one = outcome(layer, x, dy, mask)
    layer.load_state_dict(state)
    assert_same_bits(one, outcome(layer, x, dy, mask.expand(shape).contiguous()))


@pytest.mark.parametrize("valid", [True, False])
def test_a_mask_of_one_number_serves_for_all(valid: bool) -> None:
    row = NORMS[2]
    x = row.input()
    y = row.layer()(x, torch.tensor(valid))
    assert torch.equal(y, row.layer()(x, torch.full(row.shape, valid)))


@dtypes
@rows
def test_memory_does_not_matter_to_a_masked_norm(row: Row, dtype: torch.dtype) -> None:
    x, mask = row.input(dtype, offset=OFFSETS[dtype]), a_mask(row.shape, row.norm)
    dy = cotangent(x)
    exact = truth(row.layer(dtype), row, x, dy, mask)
    masked = spoiled(x, mask, torch.nan)
    for name, laid in layouts(masked):
        for kind, where in layouts(mask.double()):
            found = outcome(row.layer(dtype), laid, dy, where.bool() if kind == "contiguous" else where != 0)
            exact.judge(gradients(found))
            if name.startswith("channels_last"):
                assert found["y"].is_contiguous(memory_format=getattr(torch, name))


@rows
def test_functions_take_the_mask_that_layers_take(row: Row) -> None:
    layer, x, mask = row.layer(), row.input(offset=100), a_mask(row.shape, row.norm)
    weight, bias = layer.weight, getattr(layer, "bias", None)
    masked = spoiled(x, mask, torch.nan)
    kept = [buffer.clone() for name, buffer in layer.named_buffers() if name.startswith("running")]
    call: Callable[[], Tensor] = {
        "batch": lambda: normalcy.batch_norm(masked, *kept, weight, bias, training=True, mask=mask),
        "instance": lambda: normalcy.instance_norm(masked, weight=weight, bias=bias, mask=mask),
        "group": lambda: normalcy.group_norm(masked, 2, weight, bias, mask=mask),
        "layer": lambda: normalcy.layer_norm(masked, weight.shape, weight, bias, mask=mask),
        "rms": lambda: normalcy.rms_norm(masked, weight.shape, weight, 1e-5, mask=mask),
    }[row.norm.name]
    over_channels = row.norm is spec.channels  # which only `normalize` is a function for
    y = normalcy.normalize(masked, row.norm, weight, bias, mask=mask) if over_channels else call()
    assert torch.equal(y, layer(masked, mask))
    for mine, theirs in zip(
        kept, [b for n, b in layer.named_buffers() if n.startswith("running")], strict=True
    ):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("row", [TIMED[3], TIMED[4], TIMED[5]], ids=str)
def test_one_example_without_its_axis_takes_a_mask_without_it(row: Row) -> None:
    layer, x, mask = row.layer(), row.input(offset=100), a_mask(row.shape, row.norm)
    assert torch.equal(layer(x[0], mask[0]), layer(x[:1], mask[:1])[0])
    assert torch.equal(layer(x[0], mask[0, 0]), layer(x[:1], mask[:1, :1])[0])


# --- lengths ------------------------------------------------------------------------------------------------


@dtypes
@modes
@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.int16], ids=str)
@pytest.mark.parametrize("row", TIMED, ids=str)
def test_lengths_are_the_mask_they_stand_for(
    row: Row, kind: torch.dtype, training: bool, dtype: torch.dtype
) -> None:
    x = row.input(dtype, offset=10)
    dy = cotangent(x)
    lengths = torch.tensor([7, 0, 2, 5], dtype=kind)
    mask = torch.zeros(row.shape, dtype=torch.bool)
    for i, length in enumerate(lengths.tolist()):
        mask[i, ..., :length] = True
    by_length = outcome(row.layer(dtype).train(training), x, dy, lengths=lengths)
    assert_same_bits(by_length, outcome(row.layer(dtype).train(training), x, dy, mask))


@pytest.mark.parametrize("name", ["batch_norm", "instance_norm", "group_norm"])
def test_functions_take_lengths_too(name: str) -> None:
    x = TIMED[0].input(offset=100)
    extra: tuple[Any, ...] = (3,) if name == "group_norm" else ()
    keywords = {"training": True} if name == "batch_norm" else {}
    function = getattr(normalcy, name)
    mask = torch.arange(7) < LENGTHS[:, None, None]
    y = function(x, *extra, lengths=LENGTHS, **keywords)
    assert torch.equal(y, function(x, *extra, mask=mask, **keywords))


@pytest.mark.parametrize(
    ("lengths", "error", "sentence"),
    [
        (
            torch.tensor([7.0, 4, 2, 5]),
            TypeMismatchError,
            "lengths is torch.float32; needed: a tensor of integers",
        ),
        (torch.tensor([True] * 4), TypeMismatchError, "lengths is torch.bool; needed: a tensor of integers"),
        ([7, 4, 2, 5], TypeMismatchError, "lengths is list; needed: a tensor of integers"),
        (
            torch.tensor([7, 4, 2]),
            ShapeError,
            r"lengths has shape \(3,\) for an input .*; needed: one length for",
        ),
        (torch.tensor([[7], [4], [2], [5]]), ShapeError, r"lengths has shape \(4, 1\)"),
        (torch.tensor(7), ShapeError, r"lengths has shape \(\)"),
        (torch.tensor([7, 4, 8, 5]), ArgumentError, "8 is among the lengths; needed: 0 to 7"),
        (torch.tensor([7, -1, 2, 5]), ArgumentError, "-1 is among the lengths; needed: 0 to 7"),
    ],
    ids=str,
)
@pytest.mark.parametrize("row", TIMED, ids=str)
def test_lengths_that_cannot_be_meant_are_refused_with_a_sentence(
    row: Row, lengths: Any, error: type[NormalcyError], sentence: str
) -> None:
    layer = row.layer()
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    with pytest.raises(error, match=sentence) as caught:
        layer(row.input(), lengths=lengths)
    assert "\n" not in str(caught.value)
    assert_same_bits(dict(layer.state_dict()), before)


@pytest.mark.parametrize("row", TIMED, ids=str)
def test_a_mask_and_lengths_together_are_refused(row: Row) -> None:
    with pytest.raises(ArgumentError, match=r"got mask and lengths; needed: one of the two"):
        row.layer()(row.input(), torch.ones(row.shape, dtype=torch.bool), lengths=LENGTHS)


def test_lengths_of_an_input_without_time_are_refused() -> None:
    with pytest.raises(ShapeError, match="one length for each example of"):
        ours.BatchNorm1d(3)(torch.randn(4, 3), lengths=torch.tensor([1, 1, 0, 1]))
    with pytest.raises(ShapeError, match="one example without its axis"):
        ours.InstanceNorm1d(3)(torch.randn(3, 7), lengths=torch.tensor([4, 4, 4]))


@pytest.mark.parametrize(
    ("mask", "error", "sentence"),
    [
        (torch.ones(4, 3, 7), TypeMismatchError, "mask is torch.float32; needed: torch.bool, True = valid"),
        (torch.ones(4, 3, 7, dtype=torch.int64), TypeMismatchError, "mask is torch.int64"),
        ([[True] * 7], TypeMismatchError, "mask is list"),
        (
            torch.ones(4, 7, dtype=torch.bool),
            ShapeError,
            r"mask has shape \(4, 7\) for an input of shape \(4, 3, 7\)",
        ),
        (torch.ones(1, 4, 3, 7, dtype=torch.bool), ShapeError, "a shape that broadcasts to the input's"),
        (
            torch.ones(4, 3, 7, dtype=torch.bool, device="meta"),
            TypeMismatchError,
            "mask is on meta, the input on cpu",
        ),
    ],
    ids=["float", "int", "list", "shape", "too many axes", "device"],
)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_mask_that_is_none_is_refused_with_a_sentence(
    training: bool, mask: Any, error: type[NormalcyError], sentence: str
) -> None:
    layer = TIMED[0].layer().train(training)
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    with pytest.raises(error, match=sentence):
        layer(TIMED[0].input(), mask)
    assert_same_bits(dict(layer.state_dict()), before)


# --- the laws, masked ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", CENTRED, ids=str)
def test_a_shift_of_the_input_changes_nothing_with_a_mask(row: Row) -> None:
    layer, x, mask = row.layer(), row.input(offset=0), a_mask(row.shape, row.norm)
    moved = x + 1e4
    dy = cotangent(x)
    exact = truth(layer, row, moved.double() - 1e4, dy, mask)  # of what x + c was rounded to
    scale = truth(layer, row, moved, dy, mask).scale["y"]
    assert_close(layer(spoiled(moved, mask, 1e30), mask), exact.results["y"], scale=scale, what="y")


@pytest.mark.parametrize("value", [0.1, -1e4 / 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("row", CENTRED, ids=str)
def test_constants_give_exactly_the_bias_where_they_are_valid(
    row: Row, dtype: torch.dtype, value: float
) -> None:
    layer, mask = row.layer(dtype), a_mask(row.shape, row.norm)
    x = torch.where(mask, value, torch.rand(row.shape) * 50).to(dtype)
    layout = row.norm.axes.resolve(row.shape)
    bias = layer.bias.detach().reshape(layout.parameter).expand(layout.shape).reshape(row.shape)
    assert torch.equal(layer(x, mask).detach(), torch.where(mask, bias, 0.0))


@pytest.mark.parametrize("row", CENTRED, ids=str)
def test_dx_sums_to_zero_over_the_valid_values_of_each_statistic(row: Row) -> None:
    x, mask = row.input(offset=1e3), a_mask(row.shape, row.norm)
    exact = truth(row.layer(), row, x, dy := cotangent(x), mask)
    layout = row.norm.axes.resolve(row.shape)
    dx = outcome(row.layer(), spoiled(x, mask, torch.nan), dy, mask)["dx"].double().reshape(layout.shape)
    size = exact.scale["dx"].reshape(layout.shape).sum(layout.reduce)
    assert (dx.sum(layout.reduce).abs() <= ULPS[torch.float32] * torch.finfo(torch.float32).eps * size).all()


@pytest.mark.parametrize("row", CENTRED, ids=str)
def test_the_variance_of_what_is_valid_becomes_v_over_v_plus_eps(row: Row) -> None:
    x, mask = row.input(torch.float64, offset=20), a_mask(row.shape, row.norm)
    layout = row.norm.axes.resolve(row.shape)
    y = normalcy.normalize(spoiled(x, mask, torch.inf), row.norm, eps=0.5, mask=mask)
    before, after = (
        Moments.of(t.reshape(layout.shape), layout.reduce, mask.reshape(layout.shape)) for t in (x, y)
    )
    torch.testing.assert_close(after.var(), before.var() / (before.var() + 0.5), rtol=1e-11, atol=0)


@pytest.mark.parametrize("row", [*NORMS, INSTANCE], ids=str)
def test_the_order_of_the_examples_does_not_matter_with_a_mask(row: Row) -> None:
    x, mask = row.input(offset=100), a_mask(row.shape, row.norm)
    layer = row.layer()
    exact = truth(layer, row, x, dy := cotangent(x), mask)
    found = outcome(layer, x.flip(0), dy.flip(0), mask.flip(0))
    exact.judge({name: v.flip(0) if name in ("y", "dx") else v for name, v in gradients(found).items()})


@rows
def test_in_evaluation_an_example_is_independent_of_its_neighbours_masks(row: Row) -> None:
    layer, x, mask = row.layer().eval(), row.input(offset=100), a_mask(row.shape, row.norm)
    together = layer(x, mask)
    for i in range(row.shape[0]):
        assert torch.equal(layer(x[i : i + 1], mask[i : i + 1]), together[i : i + 1])


# --- derivatives and transforms -----------------------------------------------------------------------------

SMALL = (
    (spec.batch, (3, 2, 3), (2,)),
    (spec.instance, (2, 2, 4), (2,)),
    (spec.group(2), (2, 4, 3), (4,)),
    (spec.layer(1), (3, 7), (7,)),
    (spec.layer(2), (2, 3, 4), (3, 4)),
    (spec.channels, (2, 4, 3), (4,)),
    (spec.rms(1), (3, 7), (7,)),
)
small = pytest.mark.parametrize(
    ("norm", "shape", "parameter"), SMALL, ids=lambda v: getattr(v, "name", str(v))
)


def points(norm: spec.Norm, shape: tuple[int, ...], parameter: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = (shape, parameter, parameter) if norm.center else (shape, parameter)
    found = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    found[0] += 2
    return [t.requires_grad_() for t in found]


@small
def test_first_and_second_derivatives_agree_with_finite_differences_with_a_mask(
    norm: spec.Norm, shape: tuple[int, ...], parameter: tuple[int, ...]
) -> None:
    mask, inputs = a_mask(shape, norm), points(norm, shape, parameter)

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        return normalcy.normalize(x, norm, *parameters, mask=mask)

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@small
def test_second_derivatives_do_not_see_what_stands_at_masked_places(
    norm: spec.Norm, shape: tuple[int, ...], parameter: tuple[int, ...]
) -> None:
    mask, inputs = a_mask(shape, norm), points(norm, shape, parameter)
    found = []
    for junk in (0.0, torch.nan, 1e30):
        x = spoiled(inputs[0], mask, junk).requires_grad_()
        y = normalcy.normalize(x, norm, *inputs[1:], mask=mask)
        (dx,) = torch.autograd.grad((y * cotangent(y)).sin().sum(), x, create_graph=True)
        found.append(torch.autograd.grad((dx * cotangent(dx, 8)).sum(), [x, *inputs[1:]], allow_unused=True))
    assert all((g[0][~mask] == 0).all() for g in found)
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert one is two is None or torch.equal(one, two)


@small
def test_a_functional_gradient_with_a_mask_is_autograds(
    norm: spec.Norm, shape: tuple[int, ...], parameter: tuple[int, ...]
) -> None:
    mask, inputs = a_mask(shape, norm), points(norm, shape, parameter)
    dy = cotangent(inputs[0])

    def loss(*given: Tensor) -> Tensor:
        return (normalcy.normalize(given[0], norm, *given[1:], mask=mask) * dy).sum()

    found = torch.func.grad(loss, argnums=tuple(range(len(inputs))))(*[t.detach() for t in inputs])
    for one, two in zip(found, torch.autograd.grad(loss(*inputs), inputs), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-11)


@small
def test_many_masks_at_once_are_as_many_calls(
    norm: spec.Norm, shape: tuple[int, ...], parameter: tuple[int, ...]
) -> None:
    many = torch.stack([a_mask(shape, norm, seed) for seed in range(4)])
    x, *parameters = [t.detach() for t in points(norm, shape, parameter)]
    dy = cotangent(x)

    def loss(x: Tensor, mask: Tensor) -> Tensor:
        return (normalcy.normalize(x, norm, *parameters, mask=mask) * dy).sum()

    values = torch.func.vmap(lambda mask: normalcy.normalize(x, norm, *parameters, mask=mask))(many)
    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(x, many)
    for i, mask in enumerate(many):
        y = normalcy.normalize(x, norm, *parameters, mask=mask)
        torch.testing.assert_close(values[i], y, rtol=1e-11, atol=1e-11)
        leaf = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(loss(leaf, mask), leaf)
        torch.testing.assert_close(found[i], dx, rtol=1e-11, atol=1e-11)


@small
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # torch's, at its first jvp
def test_a_forward_derivative_with_a_mask_is_the_backward_ones_transpose(
    norm: spec.Norm, shape: tuple[int, ...], parameter: tuple[int, ...]
) -> None:
    mask = a_mask(shape, norm)
    x, *parameters = points(norm, shape, parameter)
    dy, along = cotangent(x), cotangent(x, 9)

    def function(x: Tensor) -> Tensor:
        return normalcy.normalize(x, norm, *[p.detach() for p in parameters], mask=mask)

    _, dy_along = torch.func.jvp(function, (x.detach(),), (along,))
    (dx,) = torch.autograd.grad(function(x), x, dy)
    torch.testing.assert_close((dy_along * dy).sum(), (dx * along).sum(), rtol=1e-11, atol=1e-11)
