"""Remove biases that a norm right behind them erases, and prove that nothing else changes.

Not for a model whose norms stay frozen: there the bias counts, and it is left alone.
"""

from __future__ import annotations

from functools import partial
from itertools import compress

import torch
from torch import Tensor, nn

from normalcy import sites
from normalcy.case import Call
from normalcy.case import run as run_batch
from normalcy.errors import ArgumentError, DataError, NormalcyError, TypeMismatchError
from normalcy.flow import Flow
from normalcy.report import Item, Report
from normalcy.sites import DeadBias, Removal, copied, kind_of
from normalcy.surgery.proof import Pass, Whole, decides, keep_what_holds, recorded


def strip_dead_bias(
    model: nn.Module,
    example: object,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    call: Call | None = None,
    inplace: bool = False,
) -> Report:
    """Remove every bias that the norms behind it subtract again; their running means take it over.

    With x + b in place of x a norm on batch statistics gives the same, because mean(x + b) = mean(x) + b. In
    evaluation it subtracts its running mean, so for each channel

        running_mean ← running_mean − b

    keeps evaluation what it was. Dead means: on every path from the layer a norm with batch statistics (or
    instance norm, or group norm with one channel in each group) comes before anything that is not
    shift-equivariant, in evaluation and in training.

    Shapes: b (out,), running_mean (channels,); a flattened layer spreads b over several channels.
    Dtypes: computed in float64 and rounded once to the buffer's dtype.
    Proof: float64 copies agree to 1e-9 of each output's largest value in evaluation, with the norms on batch
    statistics, and in evaluation after that; on the example and on fresh inputs. What fails is taken back and
    refused.

    Args:
        model: the model, in either mode; modes, buffers and random states are left as they are.
        example: one batch of at least two examples, as `case.run` takes it: the model gets the first element
            of a tuple, a tensor or a dict whole.
        optimizer: forgets the removed parameters and their state; needs `inplace=True`, because it holds the
            parameters of `model` and not those of a copy.
        call: `call(model, batch)` for models that are called in another way.
        inplace: change `model` itself; otherwise a copy is changed.

    Returns:
        A report with `.model`, `.done`, `.refused`, `.error`, `.bound`. Biases that are alive are not listed.

    Raises:
        ArgumentError: an optimizer without `inplace=True`, or a model that cannot be copied.
        TypeMismatchError: an optimizer that cannot forget single parameters.
        DataError: the model fails on the example.

    Source: Ioffe and Szegedy 2015 (arXiv:1502.03167), section 3.2.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.ReLU())
        >>> report = strip_dead_bias(net, torch.randn(8, 4))
        >>> report.done[0].where, report.model[0].bias, report.error <= report.bound
        ('0', None, True)
    """
    _check_optimizer(optimizer, inplace)

    def run(module: nn.Module, batch: object) -> object:
        return run_batch(module, batch, call)

    report = Report(model)
    verdicts, flows = _strippable(copied(model), example, run, report)
    passes = (_in_evaluation(run), partial(_on_batch_statistics, run), _in_evaluation(run))
    if verdicts:
        verdicts = _prove(model, example, passes, verdicts, report)
    if verdicts:
        report.notes += decides(flows)
    if inplace:
        removed = [model.get_submodule(v.where).bias for v in verdicts]
        _forget(optimizer, [p for p in removed if isinstance(p, Tensor)])
    report.model = model if inplace else copied(model)
    for verdict in verdicts:
        strip(report.model, verdict)
        names = ", ".join(r.where for r in verdict.removals)
        report.done.append(Item(verdict.where, f"bias removed; {names} subtracts it anyway"))
    if inplace and verdicts and optimizer is None:
        report.notes.append(
            "an optimizer built before holds the removed biases still; build it anew or pass optimizer=…"
        )
    return report


def strip(model: nn.Module, verdict: DeadBias) -> None:
    """Remove one dead bias of `model` in place and let the norms' running means take it over."""
    layer = model.get_submodule(verdict.where)
    bias = layer.bias
    if not isinstance(bias, Tensor):
        raise ArgumentError(f"{verdict.where} has no bias", "a layer with a bias")
    wide = bias.detach().double()
    for removal in verdict.removals:
        mean = model.get_submodule(removal.where).running_mean if removal.tracks else None
        if isinstance(mean, Tensor):
            with torch.no_grad():
                mean.copy_(mean.double() - _at_norm(removal, wide, len(mean)))
    layer.register_parameter("bias", None)


def _at_norm(removal: Removal, bias: Tensor, channels: int) -> Tensor:
    """What the bias adds to each channel of the norm."""
    out = torch.zeros(channels, dtype=torch.float64, device=bias.device)
    factors = torch.tensor(removal.factors, dtype=torch.float64, device=bias.device)
    out[list(removal.channels)] = factors * bias[list(removal.sources)]
    return out


def _strippable(
    probe: nn.Module, example: object, run: Pass, report: Report
) -> tuple[list[DeadBias], list[Flow]]:
    """The biases that are dead in both modes and can be taken out, and the two passes that tell so."""
    other = copied(probe).train(not probe.training)
    mode = "training" if other.training else "evaluation"
    flow = recorded(probe, run, example)
    dead = sites.find(probe, flow).dead
    if not dead:
        return [], [flow]
    try:
        also = recorded(other, run, example)
    except NormalcyError as error:
        raise DataError(f"in {mode} mode: {error.given}", error.needed, error.do) from error
    there = sites.find(other, also)
    kept = []
    for verdict in dead:
        if why := sites.irremovable(probe, flow, verdict) or sites.other_wiring(verdict, there, mode):
            report.refused.append(Item(verdict.where, why))
        else:
            kept.append(verdict)
    return kept, [flow, also]


def _in_evaluation(run: Pass) -> Pass:
    def evaluate(model: nn.Module, batch: object) -> object:
        return run(model.eval(), batch)

    return evaluate


def _on_batch_statistics(run: Pass, model: nn.Module, batch: object) -> object:
    """One pass with only the norms in training mode, so that nothing is random."""
    model.eval()
    for module in model.modules():
        if kind_of(module):
            module.train()
    return run(model, batch)


def _prove(
    model: nn.Module,
    example: object,
    passes: tuple[Pass, ...],
    verdicts: list[DeadBias],
    report: Report,
) -> list[DeadBias]:
    """The biases without which the model stays what it was; found one by one if they do not hold together."""
    whole = Whole(copied(model), example, passes)
    kept, failed, found = keep_what_holds(whole, verdicts, strip)
    for verdict, miss in failed.items():
        report.fail(verdict.where, f"the model's output changes without it (by {miss.error:.3g})")
    report.notes += whole.notes
    if kept:
        report.error, report.bound = found.error, found.bound
    return kept


def _check_optimizer(optimizer: torch.optim.Optimizer | None, inplace: bool) -> None:
    if optimizer is None:
        return
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        raise TypeMismatchError(
            f"the optimizer is a {type(optimizer).__name__}",
            "a torch.optim optimizer with a state for each parameter",
            "strip first, then build the optimizer",
        )
    if not inplace:
        raise ArgumentError(
            "an optimizer was given, which holds the parameters of the original, and a copy is to be changed",
            "inplace=True with an optimizer",
            "pass inplace=True, or build a new optimizer for the copy",
        )


def _forget(optimizer: torch.optim.Optimizer | None, removed: list[Tensor]) -> None:
    """Take parameters out of the optimizer's groups and its state."""
    if optimizer is None:
        return
    gone = {id(p) for p in removed}
    for group in optimizer.param_groups:
        stays = [id(p) not in gone for p in group["params"]]
        # "param_names" is there where it was built from named parameters, name by name beside "params"
        for held in group.keys() & {"params", "param_names"}:
            group[held] = list(compress(group[held], stays))
    for parameter in removed:
        optimizer.state.pop(parameter, None)
