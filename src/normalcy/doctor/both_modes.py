"""Which dead biases are dead in training too, where being dead means something, and which can be taken out.

A second pass is recorded in training mode, on a copy; the model itself stays as it is. Not for taking a bias
out.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from normalcy.doctor.evidence import Dead
from normalcy.errors import NormalcyError
from normalcy.flow import Flow, record
from normalcy.sites import Sites, copied, find, irremovable, other_wiring
from normalcy.undisturbed import random_states_kept


def dead_biases(
    model: nn.Module, recorded: Flow, sites: Sites, run: Callable[[nn.Module], object]
) -> tuple[Dead, ...]:
    """Each bias that is dead in evaluation and in training, and why it cannot be taken out.

    Args:
        model: the model as its owner left it; where it trains, its norms keep their own modes.
        recorded: a pass in evaluation.
        sites: what was found in it.
        run: gives a model its batch.
    """
    if not sites.dead:
        return ()
    try:
        twin = copied(model)
        if not model.training:
            twin.train()
        with random_states_kept():
            there = find(twin, record(twin, lambda: run(twin)))
    except NormalcyError as error:
        said = f"no pass in training mode could be recorded ({error.given.rstrip('.')})"
        return tuple(Dead(verdict, said, in_training=None) for verdict in sites.dead)
    dead_there = {verdict.where for verdict in there.dead}
    return tuple(
        Dead(verdict, irremovable(model, recorded, verdict) or other_wiring(verdict, there, "training") or "")
        for verdict in sites.dead
        if verdict.where in dead_there
    )
