"""A running mean from batch to batch, as one step.

Not for one update of running statistics: `trace(…, momentum=…)` shows that, in both meanings of momentum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from normalcy import definition
from normalcy.errors import DataError
from normalcy.trace.record import Step, Trace, Value

_FORMULA = (
    "running = (1 − m)·running + m·new\nweight left = (1 − m)^k\ndebiased = (running − weight "
    "left·initial)/(1 − weight left)"
)


def warm_up(
    batch_means: Sequence[float], *, momentum: float = 0.1, initial: float = 0.0, explain: bool = False
) -> Trace:
    """Trace a running mean from batch to batch: what the initial state still weighs, and the mean without it.

    running ← (1 − m)·running + m·new,  weight left = (1 − m)^k,
    debiased = (running − weight left·initial)/(1 − weight left).

    Args:
        batch_means: the means of the batches, in order.
        momentum: m, the weight of the new value, from 0 to 1.
        initial: the running mean before the first batch.
        explain: also say in sentences how the running value warms up.

    Returns:
        One step, `after`: for each batch `running`, `debiased` and `weight_left`, in float64.

    Raises:
        DataError: no batch, or a number that is not finite.
        ArgumentError: momentum outside [0, 1].

    Example:
        >>> [round(after["running"], 2) for after in warm_up([10, 12, 8]).as_dict()["after"]]
        [1.0, 2.1, 2.69]
    """
    if not len(batch_means):
        raise DataError("there are no batch means", "at least one number")
    for name, numbers in {"batch means": batch_means, "initial": [initial]}.items():
        for number in numbers:
            if not math.isfinite(number):
                raise DataError(f"{number} is among the {name}", "finite numbers", "take it out")
    running, from_zero = float(initial), 0.0
    after: list[dict[str, float | None]] = []
    for k, new in enumerate(batch_means, start=1):
        running = float(definition.running_update(running, new, momentum))
        # From a second average that starts at 0: a large initial value would cancel only to rounding.
        from_zero = float(definition.running_update(from_zero, new, momentum))
        debiased = float(definition.debias(from_zero, 0.0, momentum, k)) if momentum > 0 else None
        left = definition.weight_left(momentum, k)
        after.append({"running": running, "debiased": debiased, "weight_left": left})
    values: Mapping[str, Value] = {"momentum": momentum, "initial": initial, "after": after}
    why = _why(batch_means, momentum, initial, after[-1]) if explain else ()
    return Trace((Step("warm-up", _FORMULA, values, why),)).finite()


def _why(
    means: Sequence[float], momentum: float, initial: float, last: Mapping[str, float | None]
) -> tuple[str, ...]:
    if momentum == 0:
        return (f"With a momentum of 0 nothing is learned: the running mean stays {initial:g}.",)
    if momentum == 1:
        return ("With a momentum of 1 only the last batch counts, and nothing is averaged.",)
    k, few = len(means), math.ceil(math.log(0.01) / math.log1p(-momentum))
    return (
        (
            f"The running mean begins at {initial:g}, which no batch had, and each update leaves 1 − m = "
            f"{1 - momentum:.6g} of it. After {k} update{'s' * (k > 1)} it still weighs "
            f"{last['weight_left']:.4g}, so the running mean is {last['running']:.6g}, where the batches' "
            f"plain average is {math.fsum(means) / k:.6g}."
        ),
        (
            f"It takes {few} updates until the initial value weighs 1 % or less. The debiased mean, "
            f"{last['debiased']:.6g}, divides that weight out: from the first update on it is an average of "
            "the batches alone, in which the later ones weigh more."
        ),
    )
