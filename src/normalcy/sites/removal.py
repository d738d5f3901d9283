"""Whether a dead bias can be taken out of its layer, and whether both modes of a model agree that it is dead.

Not for taking it out: that is `surgery.strip_dead_bias`. The doctor asks the same questions before it
recommends that.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from normalcy.errors import ArgumentError
from normalcy.flow import Flow
from normalcy.sites.folding import has_hooks
from normalcy.sites.kinds import PRODUCERS
from normalcy.sites.records import DeadBias, Removal, Sites

_EXACT = tuple(cls for classes in PRODUCERS.values() for cls in classes)


def copied(model: nn.Module) -> nn.Module:
    """A deep copy in which tied parameters stay tied.

    Raises:
        ArgumentError: the model cannot be copied.
    """
    held = [t for m in model.modules() for t in vars(m).values() if isinstance(t, Tensor) and not t.is_leaf]
    memo: dict[int, Any] = {
        id(t): t.detach().clone() for t in held
    }  # an old weight_norm's product: computed anew
    try:
        return copy.deepcopy(model, memo)
    except (RuntimeError, TypeError, AttributeError, ValueError, NotImplementedError) as error:
        raise ArgumentError(
            f"the model cannot be copied ({' '.join(str(error).split())[:200].rstrip('.')})",
            "a model that copy.deepcopy accepts, to try the change on",
            "keep what cannot be copied out of the model",
        ) from error


def other_wiring(verdict: DeadBias, there: Sites, mode: str) -> str | None:
    """Why a bias that is dead in one mode is not erased by the same norms in the other; None if it is.

    Args:
        verdict: as the model stands.
        there: the sites of the same model in its other mode.
        mode: what that mode is called.
    """
    said = next((other for other in there.biases if other.where == verdict.where), None)
    if said is not None and said.ok and _told(said) == _told(verdict):
        return None
    return f"in {mode} mode the wiring is another: {said.why if said else 'the bias reaches no norm'}"


def _told(verdict: DeadBias) -> list[tuple[object, ...]]:
    return sorted((r.where, r.channels, r.sources, r.factors) for r in verdict.removals)


def irremovable(model: nn.Module, flow: Flow, verdict: DeadBias) -> str | None:
    """Why this layer's bias cannot be taken out although it is dead; None if it can."""
    layer = model.get_submodule(verdict.where)
    if parametrize.is_parametrized(layer):
        return "the layer is parametrized"
    if type(layer) not in _EXACT or "forward" in vars(layer):
        return f"the layer is a {type(layer).__name__}, a subclass that may use its bias otherwise"
    bias = dict(layer.named_parameters(recurse=False)).get("bias")
    if bias is None:
        return "its bias is not a parameter of its own"
    if has_hooks(layer):
        return "the layer has hooks (an old weight_norm, spectral_norm or pruning is one too)"
    if len(names := flow.names(bias)) != 1:
        return f"the bias is tied ({', '.join(names)})"
    if flow.calls(verdict.where) != 1 or len(flow.uses(bias)) != 1:
        return f"the layer is shared: it is called {flow.calls(verdict.where)} times"
    if not bool(bias.isfinite().all()):
        return "the bias is not finite"
    return next((why for r in verdict.removals if (why := _norm_holds_on(flow, r))), None)


def _norm_holds_on(flow: Flow, removal: Removal) -> str | None:
    """Why the norm's running mean cannot take the bias over."""
    mean = getattr(removal.module, "running_mean", None)
    if removal.module is None or not isinstance(mean, Tensor):
        return None
    if len(names := flow.names(mean)) != 1:
        return f"the running mean of {removal.where} is shared ({', '.join(names)})"
    if any(use.leaf is not removal.module for use in flow.uses(mean)):
        return f"the forward code also reads the running mean of {removal.where}"
    if has_hooks(removal.module):
        return f"{removal.where} has hooks"
    return None
