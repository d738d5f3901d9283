"""What the recorder says of small models, each with one difficulty."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import threading
import weakref
from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary

import normalcy
from normalcy.errors import ArgumentError
from normalcy.flow import Flow, Step, Value, record
from normalcy.flow.ledger import Ledger
from normalcy.flow.records import Held
from normalcy.flow.structure import deep_tensors_in, tensors_in


class Through(nn.Module):
    """conv and norm, and whatever the test does with them."""

    def __init__(self, way, channels=4):
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3)
        self.norm = nn.BatchNorm2d(channels)
        self._way = [way]
        self.eval()

    def forward(self, *args, **kwargs):
        return self._way[0](self, *args, **kwargs)


def image():
    return torch.randn(2, 3, 8, 8) + 5


def through(way, *args) -> tuple[nn.Module, Flow]:
    model = Through(way)
    given = args or (image(),)
    return model, record(model, lambda: model(*given))


def only(flow: Flow, op: str) -> Step:
    (step,) = [step for step in flow.steps if step.op == op]
    return step


def ops(flow: Flow) -> list[str]:
    return [step.op for step in flow.steps]


def consumers(flow: Flow, value: Value) -> list[str]:
    return [step.op for step in flow.consumers(value)]


def test_a_functional_batch_norm_is_one_step_with_its_statistics_by_name():
    def way(m, x):
        n = m.norm
        return functional.batch_norm(m.conv(x), n.running_mean, n.running_var, n.weight, n.bias)

    _, flow = through(way)
    step = only(flow, "batch_norm")
    assert step.parameters == ("norm.running_mean", "norm.running_var", "norm.weight", "norm.bias")
    assert step.args[0] is only(flow, "conv2d").outputs[0]
    assert [value.origin for value in step.inputs] == ["step", "buffer", "buffer", "parameter", "parameter"]
    assert [item.where for item in flow.not_seen] == ["norm"]  # the layer itself was never called


def test_a_norm_layer_is_one_step_and_what_it_does_inside_is_none():
    model, flow = through(lambda m, x: m.norm(m.conv(x)))
    assert ops(flow) == ["conv2d", "module"]
    conv, norm = flow.steps
    assert norm.leaf is model.norm
    assert norm.module == "norm"
    assert norm.inputs == conv.outputs
    assert flow.consumers(conv.outputs[0]) == (norm,)
    assert flow.is_output(norm.outputs[0])
    assert not flow.is_output(conv.outputs[0])
    assert flow.outputs == norm.outputs
    assert flow.inputs == (conv.inputs[0],)
    assert conv.inputs[0].origin == "input"
    assert set(norm.parameters) >= {"norm.weight", "norm.bias", "norm.running_mean", "norm.running_var"}
    assert flow.not_seen == ()


def test_a_residual_add_takes_both_branches():
    _, flow = through(lambda m, x: m.norm(y := m.conv(x)) + y)
    conv, norm, add = flow.steps
    assert add.inputs == (*norm.outputs, *conv.outputs)
    assert consumers(flow, conv.outputs[0]) == ["module", "add"]


ADDITIONS = {
    "torch.add": torch.add,
    "+": lambda a, b: a + b,
    "add": Tensor.add,
    "__radd__": Tensor.__radd__,
    "overload": torch.ops.aten.add.Tensor,
    "packet": torch.ops.aten.add,
    "add_ in place": Tensor.add_,
    "+= in place": Tensor.__iadd__,
    "out= in place": lambda a, b: torch.add(a, b, out=a),
}


@pytest.mark.parametrize("written", ADDITIONS)
def test_an_addition_has_one_name_however_it_is_written(written):
    a, b = torch.randn(2, 3), torch.randn(2, 3)
    flow = record(nn.Identity(), lambda: ADDITIONS[written](a, b))
    (step,) = flow.steps
    assert step.op == "add"
    assert step.in_place == ("in place" in written)


def test_a_reflected_subtraction_is_not_a_subtraction():
    x = torch.randn(3)
    assert ops(record(nn.Identity(), lambda: 1 - x)) == ["rsub"]


POOLINGS = {
    "functional": functional.max_pool2d,
    "with indices": lambda x, k: functional.max_pool2d(x, k, return_indices=True)[0],
    "torch": torch.max_pool2d,
    "module": lambda x, k: nn.MaxPool2d(k)(x),
}


@pytest.mark.parametrize("pool", POOLINGS)
def test_max_pooling_has_one_name(pool):
    x = image()
    flow = record(nn.Identity(), lambda: POOLINGS[pool](x, 2))
    assert next(step.op for step in flow.steps if step.outputs) == "max_pool2d"


def test_cat_and_chunk_are_followed_part_by_part():
    def way(m, x):
        a, b = m.conv(x).chunk(2, dim=1)
        return m.norm(torch.cat([b, a], dim=1))

    _, flow = through(way)
    chunk, cat = only(flow, "chunk"), only(flow, "cat")
    assert cat.inputs == (chunk.outputs[1], chunk.outputs[0])
    assert cat.args[0] == [chunk.outputs[1], chunk.outputs[0]]
    assert cat.kwargs == {"dim": 1}


def test_view_permute_and_flatten_are_steps_of_their_own():
    _, flow = through(
        lambda m, x: m.conv(x).permute(0, 2, 3, 1).contiguous().view(2, -1, 4).flatten(1).reshape(-1)
    )
    assert ops(flow) == ["conv2d", "permute", "contiguous", "view", "flatten", "reshape"]
    for before, after in pairwise(flow.steps):
        assert after.inputs == before.outputs


def test_asking_for_a_shape_or_a_dtype_is_no_step():
    def way(m, x):
        y = m.conv(x)
        assert y.shape[1] == y.size(1) == 4
        assert y.dim() == y.ndim == 4
        assert y.numel()
        assert y.stride()
        assert y.is_contiguous()
        assert (y.dtype, y.device.type, y.requires_grad, len(y)) == (torch.float32, "cpu", False, 2)
        return y

    assert ops(through(way)[1]) == ["conv2d"]


@pytest.mark.parametrize(
    "read", ["item", "tolist", "numpy", "__array__", "data_ptr", "__bool__", "__float__", "untyped_storage"]
)
def test_data_that_leaves_torch_is_seen_to_be_consumed(read):
    model = nn.Linear(3, 1)
    x = torch.randn(1, 3)

    def run():
        y = model(x)
        getattr(y, read)()
        return y * 2

    flow = record(model, run)
    assert flow.steps[1] in flow.consumers(flow.steps[0].outputs[0])
    assert flow.steps[1].outputs == () or read == "numpy"
    assert [step.op for step in flow.steps][::2] == ["linear", "mul"]


@pytest.mark.parametrize("access", ["data", "T", "mT", "real"])
def test_attributes_that_hold_data_are_steps(access):
    _, flow = through(lambda m, x: getattr(m.conv(x)[0, 0], access))
    assert ops(flow)[-1] == access
    assert flow.steps[-1].outputs == flow.outputs


def test_a_module_called_twice_is_counted_twice():
    def way(m, x):
        return m.norm(m.conv(x)) + m.norm(m.conv(x + 1))

    model, flow = through(way)
    assert flow.calls("conv") == flow.calls("norm") == 2
    assert len(flow.steps_of("conv")) == len(flow.steps_of("norm")) == 2
    assert len(flow.uses(model.conv.weight)) == 2
    assert flow.calls("") == 1


def test_a_shared_module_is_one_module_under_all_its_names():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    model[2] = model[0]
    flow = record(model, lambda: model(torch.ones(2, 3)))
    assert flow.calls("0") == flow.calls("2") == 2
    assert flow.steps_of("2") == flow.steps_of("0")
    assert flow.names(model[2].weight) == ("0.weight", "2.weight")


def test_tied_weights_are_used_in_both_places():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    flow = record(model, lambda: model(torch.ones(2, 3)))
    assert [step.module for step in flow.uses(model[1].weight)] == ["0", "1"]
    assert flow.names(model[0].weight) == ("0.weight", "1.weight")
    assert flow.steps[-1].parameters == ("0.weight", "1.bias")


def test_weights_tied_by_memory_alone_are_tied():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = nn.Parameter(model[0].weight.data.t())
    flow = record(model, lambda: model(torch.ones(2, 3)))
    assert flow.names(model[1].weight) == ("1.weight", "0.weight")
    assert len(flow.uses(model[0].weight)) == 2


def test_an_alias_of_a_weight_that_is_no_parameter_counts_as_a_use():
    model = nn.Sequential(nn.Linear(3, 3))
    alias = model[0].weight.detach()
    flow = record(model, lambda: functional.linear(model(torch.ones(2, 3)), alias))
    assert len(flow.uses(model[0].weight)) == 2
    assert flow.steps[-1].inputs[1].origin == "unknown"


def test_of_a_data_dependent_branch_the_one_taken_is_recorded():
    def way(m, x):
        return m.norm(m.conv(x)) if x.sum() > 0 else m.conv(x)

    assert ops(through(way, image().abs())[1]) == ["sum", "gt", "bool", "conv2d", "module"]
    taken = through(way, -image().abs())[1]
    assert ops(taken) == ["sum", "gt", "bool", "conv2d"]
    assert [item.where for item in taken.not_seen] == ["norm"]


@dataclasses.dataclass
class Answer:
    logits: Tensor
    states: list


def test_outputs_are_found_in_dicts_dataclasses_and_objects():
    class Plain:
        def __init__(self, held):
            self.held = held

    def way(m, x):
        y = m.conv(x)
        z = m.norm(y)
        return {"a": Answer(z * 2, [z + 1, {"deep": y}]), "b": Plain([z])}

    _, flow = through(way)
    assert [value.step.op for value in flow.outputs] == ["mul", "add", "conv2d", "module"]
    assert all(flow.is_output(value) for value in flow.outputs)


def test_inputs_are_found_in_dicts_and_dataclasses():
    def way(m, batch, *, extra):
        return m.norm(m.conv(batch["x"])) + extra.logits

    model = Through(way)
    x, extra = image(), Answer(torch.randn(2, 4, 6, 6), [])
    flow = record(model, lambda: model({"x": x}, extra=extra))
    assert [value.shape for value in flow.inputs] == [(2, 3, 8, 8), (2, 4, 6, 6)]
    assert only(flow, "add").inputs[1] is flow.inputs[1]


def test_what_existed_before_is_unknown():
    outside = torch.randn(2, 4, 6, 6)
    _, flow = through(lambda m, x: m.conv(x) + outside)
    assert only(flow, "add").inputs[1].origin == "unknown"


def test_an_edit_through_a_view_makes_the_tensor_unknown():
    def way(m, x):
        y = m.conv(x)
        y[:, 0].mul_(2)
        return m.norm(y)

    _, flow = through(way)
    value = only(flow, "module").inputs[0]
    assert value.origin == "unknown"
    assert consumers(flow, only(flow, "conv2d").outputs[0]) == ["getitem"]


@pytest.mark.parametrize(
    "alias", [lambda y: y.data, lambda y: y.detach(), lambda y: y.view(-1), lambda y: y.numpy()]
)
def test_an_edit_through_an_alias_makes_the_tensor_unknown(alias):
    def way(m, x):
        y = m.conv(x)
        other = alias(y)
        other += 1
        return m.norm(y)

    assert only(through(way)[1], "module").inputs[0].origin == "unknown"


def test_an_edit_of_a_tensor_makes_its_views_unknown():
    def way(m, x):
        y = m.conv(x)
        flat = y.flatten(2)
        y.mul_(2)
        return flat + 1

    assert only(through(way)[1], "add").inputs[0].origin == "unknown"


def test_exchanging_the_memory_of_a_tensor_is_an_edit():
    def way(m, x):
        y = m.conv(x)
        y.data = y.data + 1
        return m.norm(y)

    _, flow = through(way)
    value = only(flow, "module").inputs[0]
    assert value.step is None or value.step.op == "set_data"


def test_an_in_place_activation_makes_a_new_value():
    _, flow = through(lambda m, x: functional.relu(m.norm(m.conv(x)), inplace=True))
    norm, relu = only(flow, "module"), only(flow, "relu")
    assert relu.in_place
    assert relu.inputs == norm.outputs
    assert relu.outputs[0] is not norm.outputs[0]
    assert flow.is_output(relu.outputs[0])
    assert not flow.is_output(norm.outputs[0])


def test_after_an_in_place_activation_the_old_name_means_the_new_value():
    def way(m, x):
        y = m.conv(x)
        m.norm(y)
        functional.relu_(y)
        return y + 1

    _, flow = through(way)
    assert only(flow, "add").inputs == only(flow, "relu").outputs


def test_assigning_to_a_part_makes_a_new_value_of_the_whole():
    def way(m, x):
        y = m.conv(x)
        y[:, 0] = 0
        return m.norm(y)

    _, flow = through(way)
    edit = only(flow, "setitem")
    assert edit.in_place
    assert only(flow, "module").inputs == edit.outputs


def test_an_edited_parameter_is_no_longer_the_parameter():
    def way(m, x):
        m.conv.weight.mul_(0.5)
        return m.conv(x)

    model, flow = through(way)
    conv = only(flow, "conv2d")
    assert conv.inputs[1].step.op == "mul"
    assert "conv.weight" in conv.parameters
    assert len(flow.uses(model.conv.weight)) == 2


def test_a_parameter_handed_through_unchanged_is_still_the_parameter():
    _, flow = through(lambda m, x: functional.conv2d(x, m.conv.weight.contiguous(), m.conv.bias))
    assert only(flow, "conv2d").inputs[1].name == "conv.weight"


def test_a_module_list_is_followed_in_the_order_of_its_calls():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

        def forward(self, x):
            for layer in reversed(self.layers):
                x = layer(x).tanh()
            return x

    model = Loop()
    x = torch.randn(2, 3)
    flow = record(model, lambda: model(x))
    assert [step.module for step in flow.steps] == ["layers.2", "", "layers.1", "", "layers.0", ""]
    assert flow.not_seen == ()
    assert flow.calls("layers") == 0


def test_recurrent_use_is_a_chain():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = nn.Linear(3, 3)
            self.norm = nn.LayerNorm(3)

        def forward(self, x, steps):
            for _ in range(steps):
                x = self.norm(self.cell(x))
            return x

    model = Recurrent()
    flow = record(model, lambda: model(torch.randn(2, 3), 4))
    assert flow.calls("cell") == flow.calls("norm") == 4
    steps = [step for step in flow.steps if step.op != "randn"]
    for before, after in pairwise(steps):
        assert after.inputs[0] is before.outputs[0]


def test_a_recurrent_layer_of_pytorch_is_one_step_with_all_its_weights():
    model = nn.LSTM(3, 4, num_layers=2)
    x = torch.randn(5, 2, 3)
    flow = record(model, lambda: model(x))
    assert set(only(flow, "lstm").parameters) == {name for name, _ in model.named_parameters()}
    assert flow.inputs[0] in only(flow, "lstm").inputs


def test_inference_mode_gives_unknown_values_and_no_crash():
    def way(m, x):
        with torch.inference_mode():
            y = m.norm(m.conv(x))
            y.add_(1)
            return y[0]

    _, flow = through(way)
    assert ops(flow) == ["conv2d", "module", "add", "getitem"]
    assert {value.origin for step in flow.steps for value in step.outputs} == {"unknown"}


def test_an_exception_leaves_nothing_behind():
    def way(m, x):
        m.norm(m.conv(x))
        raise KeyError("mine")

    model = Through(way)
    own = model.norm.forward
    model.norm.forward = own  # somebody's wrapper: it has to be there again afterwards
    before = [dict(module.__dict__) for module in model.modules()]
    call = nn.Module.__call__
    with pytest.raises(KeyError, match="mine"):
        record(model, lambda: model(image()))
    assert [dict(module.__dict__) for module in model.modules()] == before
    assert nn.Module.__call__ is call
    assert not torch._C._is_torch_function_mode_enabled()
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch.is_grad_enabled()
    assert record(model, lambda: None).steps == ()


def test_a_recording_leaves_nothing_behind():
    model = Through(lambda m, x: m.norm(m.conv(x)))
    before = [dict(module.__dict__) for module in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    record(model, lambda: model(image()))
    assert [dict(module.__dict__) for module in model.modules()] == before
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert "forward" not in model.norm.__dict__


def test_an_exception_caught_inside_the_model_does_not_confuse_the_paths():
    class Picky(nn.Module):
        def forward(self, x):
            raise ValueError(x.shape)

    class Tolerant(nn.Module):
        def __init__(self):
            super().__init__()
            self.picky, self.linear = Picky(), nn.Linear(3, 3)

        def forward(self, x):
            try:
                return self.picky(x)
            except ValueError:
                return self.linear(x) + 1

    model = Tolerant()
    flow = record(model, lambda: model(torch.ones(2, 3)))
    assert [(step.op, step.module) for step in flow.steps if step.op != "ones"] == [
        ("linear", "linear"),
        ("add", ""),
    ]


def test_a_compiled_model_runs_without_the_compiler():
    model = Through(lambda m, x: m.norm(m.conv(x)))
    compiled = torch.compile(model, backend="eager")
    flow = record(compiled, lambda: compiled(image()))
    assert [step.op for step in flow.steps if step.op != "randn"] == ["add", "conv2d", "module"]
    assert flow.calls("_orig_mod.norm") == 1
    assert any("compiled" in item.why for item in flow.not_seen)
    inner = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    inner[0].compile(backend="eager")
    flow = record(inner, lambda: inner(torch.ones(2, 3)))
    assert [step.op for step in flow.steps if step.op != "ones"] == ["linear", "module"]
    assert [item.where for item in flow.not_seen] == ["0"]


@pytest.fixture
def scripted():
    with pytest.warns(DeprecationWarning, match="jit"):
        return torch.jit.script(nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)).eval())


def test_a_scripted_submodule_is_one_step_and_named_as_not_seen(scripted):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), scripted, nn.ReLU())
    x = image()
    flow = record(model, lambda: model(x))
    assert ops(flow) == ["conv2d", "module", "relu"]
    assert flow.steps[1].inputs == flow.steps[0].outputs
    assert flow.steps[1].leaf is scripted
    assert flow.steps[2].inputs == flow.steps[1].outputs
    assert [item.where for item in flow.not_seen] == ["1"]
    assert flow.uses(next(scripted.parameters())) == (flow.steps[1],)


def test_a_script_that_is_called_unseen_is_a_consumer(scripted):
    script = scripted.forward
    _, flow = through(lambda m, x: m.norm(y := m.conv(x)) + script(y))
    conv = only(flow, "conv2d")
    assert consumers(flow, conv.outputs[0]) == ["module", "unseen"]
    assert only(flow, "add").inputs[1].origin == "unknown"
    assert any("cannot" in item.why or "outside" in item.why for item in flow.not_seen)


def test_the_fast_path_of_a_transformer_is_named_and_its_norms_are_seen():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 5, 8)
    flow = record(model, lambda: model(x))
    assert [flow.calls(f"layers.{i}.norm{k}") for i in (0, 1) for k in (1, 2)] == [1] * 4
    assert [item.where for item in flow.not_seen] == [""]
    assert "fused" in flow.not_seen[0].why
    model.train()
    assert record(model, lambda: model(x)).not_seen == ()


def test_a_reused_id_is_not_taken_for_the_tensor_that_had_it():
    ledger = Ledger(Held(nn.Identity()))
    reused = 0
    for _ in range(100):
        gone = torch.randn(3)
        number, value = id(gone), ledger.made(gone, None)
        assert ledger(gone) is value
        del gone
        others = [torch.randn(3) for _ in range(20)]
        for other in others:
            reused += id(other) == number
            assert not ledger.knows(other)
            assert ledger(other).origin == "unknown"
    assert reused > 50, "this test has to see ids used again"


def test_a_hundred_temporaries_and_strangers_are_told_apart():
    def way(m, x):
        for k in range(100):
            y = m.conv(x)
            m.norm(torch.from_numpy(np.full((2, 4, 6, 6), k, np.float32)) if k % 2 else y)
            del y
        return x

    _, flow = through(way)
    norms = [step for step in flow.steps if step.op == "module"]
    assert [step.inputs[0].origin for step in norms] == ["step", "unknown"] * 50
    numbers = [step.outputs[0].id for step in flow.steps]
    assert len(set(numbers)) == len(numbers)


def test_the_record_keeps_no_tensor_alive():
    size = 1 << 20
    alive = []

    def run():
        x = torch.ones(size)
        for _ in range(20):
            x = x * 1.5
            alive.append(weakref.ref(x))
            assert sum(ref() is not None for ref in alive) <= 2
        return x

    flow = record(nn.Identity(), run)
    gc.collect()
    assert all(ref() is None for ref in alive)
    assert len(flow.steps) == 21


def test_hooks_of_the_user_run_and_what_they_make_is_seen():
    model = Through(lambda m, x: m.norm(m.conv(x)))
    model.norm.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    model.norm.register_forward_hook(lambda *call: call[-1] + 1)
    x = image()
    flow = record(model, lambda: model(x))
    assert ops(flow) == ["conv2d", "mul", "module", "add"]
    conv, mul, norm, add = flow.steps
    assert mul.inputs == conv.outputs
    assert norm.inputs == mul.outputs
    assert add.inputs == norm.outputs
    assert flow.outputs == add.outputs


def test_what_a_hook_keeps_leaves_the_pass():
    model = Through(lambda m, x: m.norm(m.conv(x)))
    kept = []
    model.conv.register_forward_hook(lambda *call: kept.append(call[-1]))
    x = image()
    flow = record(model, lambda: model(x))
    assert flow.is_output(only(flow, "conv2d").outputs[0])
    kept.clear()
    model.conv._forward_hooks.clear()
    assert not (again := record(model, lambda: model(x))).is_output(only(again, "conv2d").outputs[0])


def test_a_parametrized_weight_is_the_result_of_a_step():
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 4)), nn.LayerNorm(4))
    flow = record(model, lambda: model(torch.ones(2, 3)))
    linear = only(flow, "linear")
    assert linear.inputs[1].origin == "step"
    assert linear.inputs[2].name == "0.bias"
    assert linear.parameters == ("0.bias",)
    originals = {name for step in flow.steps for name in step.parameters}
    assert {"0.parametrizations.weight.original0", "0.parametrizations.weight.original1"} <= originals


def test_a_parametrized_norm_is_still_one_step():
    class Positive(nn.Module):
        def forward(self, weight):
            return weight.abs()

    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    parametrize.register_parametrization(model[1], "weight", Positive())
    flow = record(model, lambda: model(torch.ones(2, 3)))
    assert [step.op for step in flow.steps if step.op != "ones"] == ["linear", "module"]
    assert "1.parametrizations.weight.original" in flow.steps[-1].parameters


def test_torch_func_swaps_the_parameters_so_they_are_unknown():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    other = {name: value.clone() for name, value in model.named_parameters()}
    flow = record(model, lambda: torch.func.functional_call(model, other, torch.ones(2, 3)))
    assert [value.origin for value in only(flow, "linear").inputs[1:]] == ["unknown", "unknown"]
    assert flow.uses(model[0].weight) == ()


def test_a_tensor_used_under_vmap_is_seen_to_be_used():
    _, flow = through(lambda m, x: m.norm(y := m.conv(x)) + torch.vmap(torch.sin)(y))
    assert set(consumers(flow, only(flow, "conv2d").outputs[0])) >= {"module", "sin"}
    assert only(flow, "add").inputs[1].origin == "unknown"


def test_a_tensor_subclass_does_no_harm():
    class Mine(Tensor):
        pass

    _, flow = through(lambda m, x: m.norm(m.conv(x)), image().as_subclass(Mine))
    assert ops(flow) == ["conv2d", "module"]
    assert flow.steps[1].inputs == flow.steps[0].outputs


def test_a_model_that_intercepts_functions_itself_is_recorded_below_its_mode():
    class Doubling(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            return result * 2 if func is torch.conv2d else result

    def way(m, x):
        with Doubling():
            y = m.conv(x)
        return m.norm(y)

    _, flow = through(way)
    assert ops(flow) == ["conv2d", "mul", "module"]
    assert flow.steps[2].inputs == flow.steps[1].outputs


def test_with_interception_switched_off_the_use_is_still_seen():
    def way(m, x):
        y = m.conv(x)
        with torch._C.DisableTorchFunction():
            z = y * 2
        return m.norm(y) + z

    _, flow = through(way)
    assert consumers(flow, only(flow, "conv2d").outputs[0]) == ["unseen", "module"]
    assert only(flow, "add").inputs[1].origin == "unknown"


def test_a_custom_function_is_seen_through():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(_ctx, x):
            return x * 2

        @staticmethod
        def backward(_ctx, grad):
            return grad * 2

    _, flow = through(lambda m, x: m.norm(Twice.apply(m.conv(x))))
    assert ops(flow) == ["conv2d", "mul", "module"]
    assert flow.steps[2].inputs == flow.steps[1].outputs


def test_memory_that_nobody_seen_has_filled_makes_everything_alive_used():
    def foreign_kernel(address, count):  # nothing of it is visible
        (ctypes.c_float * count).from_address(address)[:] = [3.0] * count

    address = []

    def way(m, x):
        y = m.conv(x)
        with torch._C.DisableTorchFunction():
            z = torch.empty(y.shape)
            address.append(z.data_ptr())
        foreign_kernel(address[-1], z.numel())
        return m.norm(y) + z

    _, flow = through(way)
    assert "unseen" in consumers(flow, only(flow, "conv2d").outputs[0])
    assert only(flow, "add").inputs[1].origin == "unknown"
    assert any("filled" in item.why for item in flow.not_seen)


def test_memory_that_is_filled_by_what_is_seen_is_known():
    def way(m, x):
        z = torch.empty(2, 4, 6, 6)
        z.copy_(m.conv(x))
        return m.norm(z)

    _, flow = through(way)
    assert only(flow, "module").inputs == only(flow, "copy").outputs
    assert flow.not_seen == ()


def test_a_tensor_that_appears_in_the_memory_of_another_makes_that_one_used():
    def way(m, x):
        y = m.conv(x)
        z = nn.Parameter(y, requires_grad=False)  # cannot be intercepted, and is the same memory
        return m.norm(y) + (z + 0)

    _, flow = through(way)
    assert "unseen" in consumers(flow, only(flow, "conv2d").outputs[0])


def test_work_in_another_thread_is_named():
    def way(m, x):
        found = []
        with torch.no_grad():
            y = m.conv(x)
        worker = threading.Thread(target=lambda: found.append(m.norm(y).detach()))
        worker.start()
        worker.join()
        return found[0] + 1

    _, flow = through(way)
    assert next((item.where, "thread" in item.why) for item in flow.not_seen) == ("norm", True)
    assert only(flow, "add").inputs[0].origin == "unknown"


def test_a_norm_that_is_not_registered_is_named():
    hidden = [nn.BatchNorm2d(4).eval()]
    _, flow = through(lambda m, x: m.norm(hidden[0](m.conv(x))))
    assert [item.where for item in flow.not_seen] == [""]
    assert "not registered" in flow.not_seen[0].why


def test_a_branch_that_is_never_reached_is_named_once_and_each_norm_in_it():
    model = Through(lambda m, x: m.norm(m.conv(x)))
    model.unused = nn.Sequential(
        nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), nn.ReLU()
    )
    flow = record(model, lambda: model(image()))
    assert [item.where for item in flow.not_seen] == ["unused", "unused.1.1"]


def test_a_model_that_is_not_called_at_all_is_named():
    model = nn.Linear(3, 3)
    assert [item.where for item in record(model, lambda: None).not_seen] == [""]


def test_a_call_of_forward_itself_is_recorded():
    _, flow = through(lambda m, x: m.norm.forward(m.conv.forward(x)))
    assert [(step.op, step.module) for step in flow.steps] == [("conv2d", ""), ("module", "norm")]
    assert flow.calls("norm") == 1


def test_steps_that_only_factories_and_dropout_make_are_in_the_chain():
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(), nn.Identity(), nn.LayerNorm(3)).eval()
    flow = record(model, lambda: model(torch.ones(2, 3)))
    linear, dropout, norm = flow.steps[-3:]
    assert dropout.inputs == linear.outputs
    assert norm.inputs == dropout.outputs
    assert not dropout.in_place


def test_a_path_that_the_model_has_not_is_refused():
    _, flow = through(lambda m, x: m.conv(x))
    with pytest.raises(ArgumentError, match="'cnov' is no module of the recorded model"):
        flow.calls("cnov")
    with pytest.raises(ArgumentError, match="is no module"):
        flow.steps_of("cnov")


def test_a_stranger_has_no_names_and_no_uses():
    _, flow = through(lambda m, x: m.conv(x))
    assert flow.names(torch.ones(2)) == ()
    assert flow.uses(torch.ones(2)) == ()


def test_no_gradient_is_recorded_and_modes_stay_as_they_were():
    model = Through(lambda m, x: m.norm(m.conv(x)))
    model.train()
    results = []
    x = image()
    record(model, lambda: results.append(model(x)))
    assert not results[0].requires_grad
    assert model.norm.training
    assert model.norm.num_batches_tracked == 1


def test_a_recording_changes_no_result():
    model = Through(lambda m, x: functional.gelu(m.norm(m.conv(x))).mean((2, 3)))
    x = image()
    results = []
    record(model, lambda: results.append(model(x)))
    assert torch.equal(results[0], model(x))


def test_two_threads_that_record_do_not_mix():
    models = [Through(lambda m, x: m.norm(m.conv(x))) for _ in range(4)]
    call = nn.Module.__call__
    flows = {}

    def work(k):
        for _ in range(5):
            flows[k] = record(models[k], lambda: models[k](image()))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert nn.Module.__call__ is call
    for flow in flows.values():
        assert [step.op for step in flow.steps if step.inputs] == ["add", "conv2d", "module"]


def test_what_a_function_returns_without_making_it_counts_as_used():
    kept = []

    def cached(x):
        if has_torch_function_unary(x):
            return handle_torch_function(cached, (x,), x)
        return kept[0]

    def way(m, x):
        kept.append(m.conv(x))
        return m.norm(kept[0]) + cached(x)

    _, flow = through(way)
    assert consumers(flow, only(flow, "conv2d").outputs[0]) == ["module", "cached"]
    assert only(flow, "add").inputs[1].step.op == "cached"


def test_running_statistics_after_a_training_update_are_no_longer_the_buffers():
    def way(m, x):
        before = x.mean() - m.norm.running_mean
        m.norm(m.conv(x))
        return before, x.amax() - m.norm.running_mean

    model = Through(way)
    model.norm.train()
    x = image()
    flow = record(model, lambda: model(x))
    assert [step.inputs[1].origin for step in flow.steps if step.op == "sub"] == ["buffer", "unknown"]


@pytest.mark.parametrize(
    "layer",
    [
        normalcy.nn.BatchNorm2d(4),
        normalcy.nn.LayerNorm2d(4),
        normalcy.nn.GroupNorm(2, 4),
        normalcy.nn.InstanceNorm2d(4),
        nn.SyncBatchNorm(4),
    ],
    ids=lambda m: type(m).__name__,
)
@pytest.mark.parametrize("training", [False, True])
def test_every_norm_layer_is_one_step(layer, training):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), layer).train(training and type(layer) is not nn.SyncBatchNorm)
    x = image()
    flow = record(model, lambda: model(x))
    assert [(step.op, step.leaf) for step in flow.steps] == [("conv2d", None), ("module", layer)]
    assert flow.steps[1].inputs == flow.steps[0].outputs
    assert flow.outputs == flow.steps[1].outputs


def test_a_function_of_this_library_is_one_step():
    def way(m, x):
        return normalcy.batch_norm(
            m.conv(x), m.norm.running_mean, m.norm.running_var, m.norm.weight, m.norm.bias
        )

    _, flow = through(way)
    assert ops(flow) == ["conv2d", "batch_norm"]
    assert flow.steps[1].inputs[0] is flow.steps[0].outputs[0]
    assert flow.steps[1].parameters[0] == "norm.running_mean"


def test_an_edit_that_no_operator_shows_is_seen_by_the_version():
    ledger = Ledger(Held(nn.Identity()))
    y = torch.randn(3)
    value = ledger.made(y, None, "input")
    assert ledger(y) is value
    torch.autograd.graph.increment_version(y)  # as compiled extensions do for what they overwrite
    assert ledger(y).origin == "unknown"


def test_a_parameter_edited_through_an_alias_before_its_first_use_is_unknown():
    model = Through(lambda m, x: m.norm(m.conv(x)))
    alias = model.conv.weight.detach()

    def run():
        alias.mul_(0.5)
        return model(image())

    flow = record(model, run)
    assert only(flow, "conv2d").inputs[1].origin == "unknown"
    assert len(flow.uses(model.conv.weight)) == 2


def test_a_tensor_in_a_slice_or_a_set_is_found():
    x, start = torch.randn(5, 3), torch.tensor(1)
    flow = record(nn.Identity(), lambda: x[start:])
    step = only(flow, "getitem")
    assert [value.shape for value in step.inputs] == [(5, 3), ()]
    assert step.args[1] == slice(step.inputs[1], None, None)
    assert len(tensors_in({x}, frozenset({start}))) == 2


def test_objects_that_hold_each_other_are_walked_once():
    class Node:
        __slots__ = ("held", "other")

    a, b = Node(), Node()
    a.other, b.other = b, a
    a.held, b.held = torch.ones(1), {"k": (torch.ones(2), [a])}
    assert [tuple(tensor.shape) for tensor in deep_tensors_in([a])] == [(1,), (2,)]


def test_objects_made_while_they_are_walked_are_not_confused():
    class Lazy(Mapping):
        def __len__(self):
            return 50

        def __iter__(self):
            return iter(range(50))

        def __getitem__(self, k):
            return [[torch.full((1,), float(k))]]

    found = deep_tensors_in([Lazy()])
    assert [tensor.item() for tensor in found] == list(range(50))


def test_memory_with_nothing_in_it_has_no_known_value():
    _, flow = through(lambda m, x: torch.empty_like(m.conv(x)))
    assert flow.outputs[0].origin == "unknown"


def test_a_tensor_in_a_dead_cycle_does_not_leave_the_pass():
    def way(m, x):
        cycle = [m.conv(x)]
        cycle.append(cycle)
        return m.norm(cycle[0])

    _, flow = through(way)
    assert not flow.is_output(only(flow, "conv2d").outputs[0])
