"""The record of what is examined.

Not for loading one from a file's name: that is `target`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normalcy.case import feeding, running
from normalcy.case.feeding import Batches
from normalcy.case.running import Call
from normalcy.case.words import a, described
from normalcy.errors import ArgumentError, TargetError


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A model and what is known about how it is used.

    Attributes:
        model: the module to examine.
        data: a tensor, dict or tuple is one batch; a loader, generator or list is batches; a function without
            arguments is called for either. A generator is kept up to 2 GiB, so that it can be walked again.
        loss: `loss(output, batch)`, the mean over the batch's examples.
        optimizer: the optimizer that trains the model.
        loader: the loader it is trained with; it serves as data where `data` is not given.
        call: `call(model, batch)`, where the model does not take the batch or its first element.

    Raises:
        TargetError: `model` is no module.
        ArgumentError: `loss` or `call` cannot be called, or `optimizer` is none.

    Example:
        >>> case = Case(nn.Linear(3, 2), data=(torch.zeros(4, 3), torch.zeros(4)))
        >>> [case.run(case.model, batch).shape for batch in case.batches()]
        [torch.Size([4, 2])]
    """

    model: nn.Module
    data: Any = None
    loss: Callable[[Any, Any], Tensor] | None = None
    optimizer: torch.optim.Optimizer | None = None
    loader: Any = None
    call: Call | None = None

    def __post_init__(self) -> None:
        model: object = self.model
        if not isinstance(model, nn.Module):
            given = f"the class {model.__name__}" if isinstance(model, type) else described(model)
            raise TargetError(
                f"the model of a Case is {given}", "an instance of torch.nn.Module", "build the model first"
            )
        for name in ("loss", "call"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                kind = a(type(getattr(self, name)).__name__)
                raise ArgumentError(f"{name} is {kind}", "a function", "see help(normalcy.Case)")
        optimizer: object = self.optimizer
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            kind = a(type(optimizer).__name__)
            raise ArgumentError(
                f"optimizer is {kind}", "a torch.optim.Optimizer", "leave it out if the model is not trained"
            )
        object.__setattr__(self, "data", feeding.replayable(self.data))

    def batches(self) -> Batches:
        """Give the data as batches; the loader's where no data were given. Raises as `case.batches`."""
        return feeding.batches(data_of(self))

    def run(self, model: nn.Module, batch: Any) -> Any:
        """Give `model` (this one or a changed copy) one batch. Raises as `case.run`."""
        return running.run(model, batch, self.call)


def data_of(case: Case) -> Any:
    """The data of a case: its `data`, else its `loader`, else None."""
    return case.loader if case.data is None else case.data
