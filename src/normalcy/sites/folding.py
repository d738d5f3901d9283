"""Whether a norm can be folded into the layer before it, as far as wiring tells.

Not for the folding itself or for its numbers. Every refusal is one sentence; where two apply, the first that
a person would look at is given.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from normalcy.flow import Flow, Step, Value
from normalcy.sites.biases import bias_axis
from normalcy.sites.kinds import PRODUCERS, masked, overrides
from normalcy.sites.records import Fold
from normalcy.sites.shift import at

_FOLDABLE = ("linear", "conv1d", "conv2d", "conv3d")
_NOTHING = frozenset({"contiguous", "clone", "identity", "alias", "detach"})


def examine(
    model: nn.Module, flow: Flow, where: str, module: nn.Module | None, kind: str, steps: tuple[Step, ...]
) -> Fold:
    """The verdict on one site."""
    why = _norm_refusal(model, flow, module, kind, steps)
    if why:
        return Fold(False, why)
    step = steps[0]
    producer, why = _producer(flow, step)
    if producer is None:
        return Fold(False, why)
    path = producer.module
    layer = dict(model.named_modules(remove_duplicate=False)).get(path)
    why = _layer_refusal(flow, producer, layer) or _join_refusal(step, producer, module)
    return Fold(False, why) if why else Fold(True, f"{where} folds into {path}", path)


def has_hooks(module: nn.Module) -> bool:
    """Whether a user's hook may see or change what goes into or comes out of the module."""
    held = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(vars(module).get(name) for name in held)


def _norm_refusal(  # noqa: C901 - a chain of early refusals, one sentence each
    model: nn.Module, flow: Flow, module: nn.Module | None, kind: str, steps: tuple[Step, ...]
) -> str | None:
    if kind != "batch":
        return f"{kind} norm takes its statistics from each input, so it is no fixed affine map"
    if module is None:
        return "a functional batch norm cannot be taken out of the forward code"
    if parametrize.is_parametrized(module):
        return "the norm is parametrized"
    if getattr(module, "running_mean", None) is None or getattr(module, "running_var", None) is None:
        return "the norm has no running statistics, so it uses the batch's in evaluation too"
    if module.training:
        return "the norm is in training mode; folding is for inference: call model.eval() first"
    if len(steps) != 1:
        return f"the norm is called {len(steps)} times"
    paths = [path for path, m in model.named_modules(remove_duplicate=False) if m is module]
    if len(paths) != 1:
        return f"the norm is registered under several names ({', '.join(paths)})"
    if paths == [""]:
        return "the model is the norm itself"
    if has_hooks(module):
        return "the norm has hooks"
    for name, held in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
        if any(use.leaf is not module for use in flow.uses(held)):
            return f"the forward code also reads the norm's {name}"
    return _call_refusal(steps[0])


def _call_refusal(step: Step) -> str | None:
    if by := masked(step):
        given = {"mask": "a mask", "lengths": "lengths"}[by]
        return f"the norm is called with {given}: masked places give 0, which no folded layer does"
    if len(step.inputs) != 1 + sum(v.origin in ("parameter", "buffer") for v in step.inputs):
        return "the norm is called with more than its input"
    return None


def _producer(flow: Flow, step: Step) -> tuple[Step | None, str]:
    """The step whose output goes into the norm and nowhere else, or why there is none."""
    value = step.inputs[0]
    while True:
        if value.origin != "step" or value.step is None:
            what = {"input": "the model's input", "parameter": "a parameter", "buffer": "a buffer"}.get(
                value.origin
            )
            return (
                None,
                f"the norm's input is {what}" if what else "what computes the norm's input is not known",
            )
        if flow.is_output(value):
            return None, f"the output of {at(value.step)} is also an output of the model"
        others = [at(s) for s in flow.consumers(value) if s is not step]
        if others or len(flow.consumers(value)) != 1:
            return None, f"the output of {at(value.step)} has a second consumer ({', '.join(others)})"
        step = value.step
        if step.op not in _NOTHING or step.in_place:
            return step, ""
        value = step.inputs[0]
        if value.dtype != step.outputs[0].dtype:
            return None, "the dtype changes between the layer and the norm"


def _layer_refusal(flow: Flow, step: Step, layer: nn.Module | None) -> str | None:
    if step.op in PRODUCERS and step.op.startswith("conv_transpose"):
        return f"{step.module} is a transposed convolution, which is not folded yet"
    if step.op not in _FOLDABLE:
        return f"{at(step)} lies before the norm, which is no linear layer or convolution"
    classes = PRODUCERS[step.op]
    if layer is None or not isinstance(layer, classes):
        return f"{at(step)} is a functional call, not the forward of a layer"
    if parametrize.is_parametrized(layer):
        return f"{step.module} is parametrized"
    if type(layer) not in classes or overrides(layer):
        return (
            f"{step.module} is a {type(layer).__name__}, a subclass of {classes[0].__name__} that may do more"
        )
    if has_hooks(layer):
        return f"{step.module} has hooks (an old weight_norm, spectral_norm or pruning is one too)"
    if flow.calls(step.module) != 1:
        return f"{step.module} is called {flow.calls(step.module)} times"
    own = dict(layer.named_parameters(recurse=False))
    return _parameter_refusal(flow, step, layer, "weight", own) or _parameter_refusal(
        flow, step, layer, "bias", own
    )


def _parameter_refusal(
    flow: Flow, step: Step, layer: nn.Module, name: str, own: dict[str, nn.Parameter]
) -> str | None:
    held = own.get(name)
    if held is None:
        there = name == "weight" or getattr(layer, name, None) is not None
        return f"the {name} of {step.module} is not a parameter of its own" if there else None
    names = flow.names(held)
    if len(names) != 1:
        return f"the {name} of {step.module} is tied ({', '.join(names)})"
    uses = flow.uses(held)
    if any(use is not step for use in uses):
        return f"the {name} of {step.module} is also used elsewhere"
    position = {"weight": 1, "bias": 2}[name]
    given = step.args[position] if len(step.args) > position else step.kwargs.get(name)
    if not uses or not isinstance(given, Value) or given.name != names[0]:
        return f"{step.module} does not use its {name} as it is"
    return None


def _join_refusal(step: Step, producer: Step, norm: nn.Module | None) -> str | None:
    out = producer.outputs[0]
    axis = bias_axis(producer)
    if axis != 1:
        return (
            f"the norm's channels are axis 1 of its input, the output channels of {producer.module} are axis "
            f"{axis} of {tuple(out.shape)}"
        )
    if not isinstance(norm, _BatchNorm):
        return "the norm is no batch norm of PyTorch's family"
    held = [*norm.parameters(recurse=False), norm.running_mean, norm.running_var]
    dtypes = {v.dtype for v in (*producer.inputs, out, *step.outputs)} | {
        t.dtype for t in held if isinstance(t, Tensor)
    }
    if len(dtypes) != 1:
        return f"dtypes are mixed ({', '.join(sorted(str(d).removeprefix('torch.') for d in dtypes))})"
    return None
