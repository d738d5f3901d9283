"""What the recorder says of whole networks: between which convolution and which norm nothing else reads."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from normalcy.flow import Flow, record


class Basic(nn.Module):
    def __init__(self, channels, wider):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, wider, 3, 1, 1, bias=False), nn.BatchNorm2d(wider)
        self.conv2, self.bn2 = nn.Conv2d(wider, wider, 3, 1, 1, bias=False), nn.BatchNorm2d(wider)
        self.relu = nn.ReLU(inplace=True)
        self.down = (
            nn.Sequential(nn.Conv2d(channels, wider, 1), nn.BatchNorm2d(wider)) if channels != wider else None
        )

    def forward(self, x):
        kept = x if self.down is None else self.down(x)
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += kept
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        )
        self.layers = nn.Sequential(Basic(8, 8), Basic(8, 16))
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        return self.head(functional.adaptive_avg_pool2d(self.layers(self.stem(x)), 1).flatten(1))


class Dense(nn.Module):
    """Pre-activation and concatenation: the norm of each layer reads what several convolutions made."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(4 * k) for k in (1, 2, 3))
        self.convs = nn.ModuleList(nn.Conv2d(4 * k, 4, 3, padding=1) for k in (1, 2, 3))

    def forward(self, x):
        features = [self.first(x)]
        for norm, conv in zip(self.norms, self.convs, strict=True):
            features.append(conv(functional.relu(norm(torch.cat(features, 1)))))
        return {"features": features[-1]}


class Inverted(nn.Module):
    def __init__(self, channels):
        super().__init__()
        wide = 2 * channels
        self.body = nn.Sequential(
            nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU6(inplace=True),
            nn.Conv2d(wide, wide, 3, 1, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.Hardswish(),
            nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, channels, 1), nn.Hardsigmoid())

    def forward(self, x):
        y = self.body(x)
        return x + y * self.gate(y)


class MobileNet(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.SiLU(), Inverted(8), Inverted(8))


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.ModuleList([self.block(3, 4), self.block(4, 8)])
        self.bottom = self.block(8, 8)
        self.up = nn.ModuleList([nn.ConvTranspose2d(8, 8, 2, 2), nn.ConvTranspose2d(8, 4, 2, 2)])
        self.merge = nn.ModuleList([self.block(16, 8), self.block(8, 4)])

    @staticmethod
    def block(channels, wider):
        return nn.Sequential(
            nn.Conv2d(channels, wider, 3, padding=1), nn.BatchNorm2d(wider), nn.LeakyReLU(0.1, True)
        )

    def forward(self, x):
        skips = []
        for block in self.down:
            skips.append(x := block(x))
            x = functional.max_pool2d(x, 2)
        x = self.bottom(x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], 1))
        return x


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.register_buffer("places", torch.randn(16, 8))
        self.norms = nn.ModuleList(nn.LayerNorm(8) if k % 2 else nn.RMSNorm(8) for k in range(4))
        self.mixers = nn.ModuleList(Attention(8, 2) for _ in range(2))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2)
        )
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens) + self.places[: tokens.shape[1]]
        for k, (mixer, mlp) in enumerate(zip(self.mixers, self.mlps, strict=True)):
            x = x + mixer(self.norms[2 * k](x))
            x = x + mlp(self.norms[2 * k + 1](x))
        return self.head(x)


def images():
    return torch.randn(2, 3, 16, 16) + 5


NETS = {"ResNet": ResNet, "Dense": Dense, "MobileNet": MobileNet, "UNet": UNet, "Transformer": Transformer}


def recorded(name: str, *, training: bool = False) -> tuple[nn.Module, Flow]:
    model = NETS[name]().train(training)
    x = torch.randint(0, 20, (2, 7)) if name == "Transformer" else images()
    return model, record(model, lambda: model(x))


def directly_before_a_norm(flow: Flow) -> set[tuple[str, str]]:
    """(module of the producer, norm) wherever the norm is all that reads what was produced."""
    found = set()
    for step in flow.steps:
        before = step.inputs[0].step if step.leaf is not None else None
        if (
            before is not None
            and flow.consumers(step.inputs[0]) == (step,)
            and not flow.is_output(step.inputs[0])
        ):
            found.add((f"{before.module}:{before.op}", step.module))
    return found


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_nothing_is_unknown_and_nothing_unseen(name, training):
    model, flow = recorded(name, training=training)
    assert flow.not_seen == ()
    values = [value for step in flow.steps for value in (*step.inputs, *step.outputs)]
    assert {value.origin for value in values} <= {"step", "input", "parameter", "buffer"}
    assert {name for step in flow.steps for name in step.parameters} >= {
        name for name, _ in model.named_parameters()
    }
    assert len(flow.inputs) == len(flow.outputs) == 1


@pytest.mark.parametrize("name", NETS)
def test_every_value_was_made_before_it_is_used(name):
    _, flow = recorded(name)
    for step in flow.steps:
        assert all(value.step.index < step.index for value in step.inputs if value.step)
        assert all(value.step is step for value in step.outputs)
        for value in step.inputs:
            assert step in flow.consumers(value)


@pytest.mark.parametrize("name", NETS)
def test_what_follows_from_the_input_is_all_that_is_computed(name):
    _, flow = recorded(name)
    reached = set(flow.inputs)
    for step in flow.steps:
        if reached & set(step.inputs):
            reached |= set(step.outputs)
    assert reached >= set(flow.outputs)


def test_in_a_residual_network_every_norm_follows_its_convolution():
    _, flow = recorded("ResNet")
    assert directly_before_a_norm(flow) == {
        ("stem.0:conv2d", "stem.1"),
        ("layers.0.conv1:conv2d", "layers.0.bn1"), ("layers.0.conv2:conv2d", "layers.0.bn2"),
        ("layers.1.conv1:conv2d", "layers.1.bn1"), ("layers.1.conv2:conv2d", "layers.1.bn2"),
        ("layers.1.down.0:conv2d", "layers.1.down.1"),
    }  # fmt: skip
    adds = [step for step in flow.steps if step.op == "add"]
    assert [step.in_place for step in adds] == [True, True]
    assert [step.inputs[1].step.module for step in adds] == ["stem.3", "layers.1.down.1"]
    assert flow.calls("layers.0.relu") == 2


def test_in_a_dense_network_no_norm_follows_one_convolution():
    model, flow = recorded("Dense")
    assert {before for before, _ in directly_before_a_norm(flow)} == {":cat"}
    first = flow.steps_of("first")[0].outputs[0]
    assert [step.op for step in flow.consumers(first)] == ["cat", "cat", "cat"]
    assert flow.outputs[0].step.module == "convs.2"
    assert len(flow.uses(model.norms[0].weight)) == 1


def test_in_a_mobile_network_a_gate_reads_what_the_last_norm_made():
    _, flow = recorded("MobileNet")
    assert {("3.body.0:conv2d", "3.body.1"), ("4.body.6:conv2d", "4.body.7")} <= directly_before_a_norm(flow)
    last = flow.steps_of("3.body.7")[0].outputs[0]
    assert sorted(step.op for step in flow.consumers(last)) == ["adaptive_avg_pool2d", "mul"]


def test_in_a_u_net_a_skip_is_read_below_and_beside():
    _, flow = recorded("UNet")
    assert len(directly_before_a_norm(flow)) == 5
    skip = flow.steps_of("down.0.2")[0].outputs[0]
    assert [step.op for step in flow.consumers(skip)] == ["max_pool2d", "cat"]


def test_in_a_transformer_a_norm_reads_the_stream_and_the_weights_are_tied():
    model, flow = recorded("Transformer")
    assert flow.names(model.head.weight) == ("embed.weight", "head.weight")
    assert [step.op for step in flow.uses(model.embed.weight)] == ["embedding", "linear"]
    stream = flow.steps_of("norms.1")[0].inputs[0]
    assert stream.step.op == "add"
    assert [step.op for step in flow.consumers(stream)] == ["module", "add"]
    qkv = flow.steps_of("mixers.0.qkv")[0]
    assert qkv.inputs[0] is flow.steps_of("norms.0")[0].outputs[0]
