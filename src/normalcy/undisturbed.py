"""Running a model that is somebody else's, and leaving it as it was.

Not for what is found on the way: that is `measure` and the proofs of `surgery`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from normalcy.errors import ArgumentError


@contextmanager
def on_batch_statistics(model: nn.Module, norms: Mapping[str, _BatchNorm]) -> Iterator[None]:
    """Within: `norms` use batch statistics and record nothing, all else evaluates; then all is as before."""
    modes = [(module, module.training) for module in model.modules()]
    tracks = [(norm, norm.track_running_stats) for norm in norms.values()]
    # also where a forward assigns a new tensor instead of writing into the buffer
    held = [(module._buffers, dict(module._buffers.items())) for module in model.modules()]  # noqa: SLF001 - no public name
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.no_grad(), random_states_kept():
        try:
            for module, _ in modes:
                module.training = False
            for norm in norms.values():
                norm.training, norm.track_running_stats = True, False
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            for norm, tracked in tracks:
                norm.track_running_stats = tracked
            for buffers, before in held:
                for name, tensor in before.items():
                    if buffers[name] is not tensor:
                        buffers[name] = tensor
            for buffer, values in kept:
                if not torch.equal(buffer, values):
                    buffer.copy_(values)


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Within, anything may draw random numbers; afterwards PyTorch's, Python's and NumPy's are as before."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - loaders and models draw from it
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002 - the same


def must_have_values(model: object) -> None:
    """Refuse what is no module, or one whose tensors hold no numbers yet.

    Raises:
        ArgumentError: no module, a lazy layer that never ran, or a tensor on the meta device.

    Example:
        >>> must_have_values(nn.LazyLinear(3))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        normalcy.errors.ArgumentError: weight has no shape yet; needed: a model that has run once. Give it ...
    """
    if not isinstance(model, nn.Module):
        kind = (
            f"the class {model.__name__}"
            if isinstance(model, type)
            else f"a value of type {type(model).__name__}"
        )
        raise ArgumentError(f"the model is {kind}", "a torch.nn.Module", "give the model itself")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ArgumentError(
                f"{name} has no shape yet", "a model that has run once", "give it one batch first"
            )
        if tensor.is_meta:
            raise ArgumentError(
                f"{name} has no values (meta device)",
                "a model with values",
                "call model.to_empty(device='cpu') and load a checkpoint",
            )
