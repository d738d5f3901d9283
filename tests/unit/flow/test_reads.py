"""Values that forward hands to Python are named: there it may decide by its data."""

from __future__ import annotations

import inspect
import threading

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - PyTorch's own name for it

from normalcy.flow import Flow, record


class Reading(nn.Module):
    """A layer, a norm, and a forward given as a function of the module and the input."""

    def __init__(self, wired) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(5, 4), nn.BatchNorm1d(4)
        self.wired = wired

    def forward(self, x: Tensor) -> object:
        return self.wired(self, x)


def x(n: int = 6) -> Tensor:
    return torch.randn(n, 5, generator=torch.Generator().manual_seed(1)) * 1.7 + 2.5


def flow_of(wired) -> Flow:
    model = Reading(wired).eval()
    return record(model, lambda: model(x()))


READS = {
    "bool": lambda y: bool(y.mean() > 3),
    "if": lambda y: 1 if y.max() > 3 else 0,
    "item": lambda y: y.max().item(),
    "float": lambda y: float(y.abs().max()),
    "int": lambda y: int(y.argmax()),
    "index": lambda y: [4, 5, 6, 7, 8, 9][y[:, 0].argmax()],
    "tolist": lambda y: y[0].tolist()[0],
    "numpy": lambda y: y.detach().numpy().max(),
    "dlpack": lambda y: np.from_dlpack(y.detach()).max(),
    "contains": lambda y: 3.0 in y,
    "equal": lambda y: torch.equal(y, y + 1),
    "allclose": lambda y: torch.allclose(y, y + 1),
    "far behind": lambda y: F.relu(y @ torch.ones(y.shape[1], 2)).sum().log().item(),
}


@pytest.mark.parametrize("where", ["input", "output"])
@pytest.mark.parametrize("name", READS)
def test_every_way_of_reading_what_depends_on_the_data_is_seen(name: str, where: str) -> None:
    def wired(m: Reading, x: Tensor) -> Tensor:
        y = m.norm(m.layer(x))
        READS[name](x if where == "input" else y)
        return y

    assert len(flow_of(wired).reads()) == 1


@pytest.mark.parametrize(
    "wired",
    [
        lambda m, x: m.norm(m.layer(x)),
        lambda m, x: m.norm(m.layer(x)) * (2 if len(x) > 3 and x.shape[1] == 5 and x.dim() == 2 else 1),
        lambda m, x: m.norm(m.layer(x)) * float(m.layer.weight.abs().max()),
        lambda m, x: m.norm(m.layer(x)) * (2 if m.norm.num_batches_tracked > 0 else 1),
        lambda m, x: m.norm(m.layer(x)) * (2 if torch.rand(()) > 0.5 else 1),
        lambda m, x: m.norm(m.layer(x)) * torch.arange(4)[1].item(),
    ],
    ids=["none", "shapes", "a weight", "a counter", "a random number", "a constant"],
)
def test_reading_shapes_parameters_and_random_numbers_is_no_decision_by_data(wired) -> None:
    assert flow_of(wired).reads() == ()


def test_a_value_of_unknown_origin_counts_as_data() -> None:
    stranger = x()

    def wired(m: Reading, x: Tensor) -> Tensor:
        return m.norm(m.layer(x)) * (2 if stranger.mean() > 0 else 1)

    assert [step.op for step in flow_of(wired).reads()] == ["bool"]


def test_a_norm_that_ran_in_another_thread_was_called() -> None:
    def wired(m: Reading, x: Tensor) -> Tensor:
        with torch.no_grad():
            y, found = m.layer(x), []
        worker = threading.Thread(target=lambda: found.append(m.norm(y).detach()))
        worker.start()
        worker.join()
        return found[0]

    flow = flow_of(wired)
    assert flow.calls("norm") == 1
    assert [item.why for item in flow.not_seen if "never called" in item.why] == []


def test_of_a_norm_that_only_lends_its_statistics_it_is_said_to_whom() -> None:
    def wired(m: Reading, x: Tensor) -> Tensor:
        return F.batch_norm(m.layer(x), m.norm.running_mean, m.norm.running_var)

    (item,) = flow_of(wired).not_seen
    assert item.where == "norm"
    assert item.why.endswith("but batch_norm in the model itself takes its running_mean, running_var")


def test_a_model_that_asks_a_norm_what_it_takes_gets_the_same_answer_while_it_is_recorded() -> None:
    told = []

    def wired(m: Reading, x: Tensor) -> Tensor:
        told.append(str(inspect.signature(m.norm.forward)))
        return m.norm(m.layer(x))

    flow_of(wired)
    assert told == [str(inspect.signature(nn.BatchNorm1d(4).forward))]
