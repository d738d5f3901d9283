"""The network of the embedded example, with any of five norms, and its losses.

Not a network to use: it is small enough to be trained while one waits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from normalcy.errors import ArgumentError
from normalcy.example.names import ALPHABET, CONTEXT, Batch
from normalcy.nn import BatchNorm1d, GroupNorm, LayerNorm, RMSNorm

NORM_MOMENTUM = 0.001
GROUPS = 8
NORMS = ("none", "batch", "layer", "group", "rms")
"""What may follow a linear layer."""
PLACES = ("before", "after")
"""Where it stands: before the activation or after it."""


class CharacterMLP(nn.Module):
    """logits = W·h₂ + b with hₖ = tanh(norm(Wₖ·hₖ₋₁ + bₖ)), h₀ = the embeddings of three characters, joined.

    `forward` maps indices (N, 3), int64 in [0, 27), to logits (N, 27) in the parameters' dtype. As it is
    built by default, two faults are there on purpose: the norm subtracts the mean and so erases the bias bₖ
    before it, and with momentum 0.001 the running statistics need thousands of updates to forget that they
    began at 0 and 1.

    Args:
        embedding: values for each character.
        hidden: units of each hidden layer.
        norm: one of NORMS; group norm has 8 groups.
        place: "before" the activation, or "after" it: hₖ = norm(tanh(Wₖ·hₖ₋₁ + bₖ)).
        momentum: of batch norm, the weight of the new value.
        bias: False leaves out the biases bₖ. The same seed draws the same weights with and without them,
            and whatever the norm is.

    Raises:
        ArgumentError: a norm or a place that there is not, or units that the groups do not divide.

    Source: the neural probabilistic language model (JMLR 3, 2003), with batch normalization before tanh.

    Example:
        >>> model = CharacterMLP(embedding=10, hidden=(200, 200))
        >>> model(torch.tensor([[0, 0, 1], [0, 1, 14]])).shape
        torch.Size([2, 27])
        >>> [name for name, _ in CharacterMLP(hidden=(8,), norm="rms", place="after").hidden.named_children()]
        ['linear1', 'tanh1', 'norm1']
    """

    def __init__(
        self,
        embedding: int = 10,
        hidden: Sequence[int] = (200, 200),
        *,
        norm: str = "batch",
        place: str = "before",
        momentum: float = NORM_MOMENTUM,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if norm not in NORMS:
            raise ArgumentError(f"norm={norm!r}", f"one of {', '.join(NORMS)}")
        if place not in PLACES:
            raise ArgumentError(f"place={place!r}", f"one of {', '.join(PLACES)}")
        self.embedding = nn.Embedding(len(ALPHABET), embedding)
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        width = CONTEXT * embedding
        for number, units in enumerate(hidden, start=1):
            linear = nn.Linear(width, units)  # with its bias, so that the same numbers are drawn
            if not bias:
                linear.register_parameter("bias", None)
            normalizer = _normalizer(norm, units, momentum)
            layers[f"linear{number}"] = linear
            if normalizer is not None and place == "before":
                layers[f"norm{number}"] = normalizer
            layers[f"tanh{number}"] = nn.Tanh()
            if normalizer is not None and place == "after":
                layers[f"norm{number}"] = normalizer
            width = units
        self.hidden = nn.Sequential(layers)
        self.output = nn.Linear(width, len(ALPHABET))

    def forward(self, indices: Tensor) -> Tensor:
        """Logits (N, 27) of the character that follows each of `indices` (N, 3)."""
        logits: Tensor = self.output(self.hidden(self.embedding(indices).flatten(1)))
        return logits


def loss(output: Tensor, batch: Batch) -> Tensor:
    """Cross entropy of `output` = model(batch[0]), logits (N, 27), in nats per character; a scalar.

    Example:
        >>> contexts, following = torch.tensor([[0, 0, 0], [0, 0, 1], [0, 1, 12]]), torch.tensor([1, 12, 0])
        >>> round(float(loss(torch.zeros(3, 27), (contexts, following))), 4)  # ln 27
        3.2958
    """
    return nn.functional.cross_entropy(output, batch[1])


def evaluation_loss(model: nn.Module, batch: Batch) -> float:
    """`loss` of the model on `batch` in evaluation mode; every module's mode is put back afterwards.

    Example:
        >>> model = CharacterMLP()
        >>> evaluation_loss(model, (torch.tensor([[0, 0, 1]]), torch.tensor([14]))) > 0, model.training
        (True, True)
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            return float(loss(model(batch[0]), batch))
    finally:
        for module, mode in modes:
            module.training = mode


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    """One training step on one batch, in the mode that the model is in."""
    optimizer.zero_grad()
    with torch.enable_grad():
        torch.autograd.backward(loss(model(batch[0]), batch))
    optimizer.step()


def _normalizer(norm: str, units: int, momentum: float) -> nn.Module | None:
    match norm:
        case "batch":
            return BatchNorm1d(units, momentum=momentum)
        case "layer":
            return LayerNorm(units)
        case "group":
            if units % GROUPS:
                raise ArgumentError(f"{units} units for group norm", f"a multiple of its {GROUPS} groups")
            return GroupNorm(GROUPS, units)
        case "rms":
            return RMSNorm(units, eps=1e-5)
        case _:
            return None
