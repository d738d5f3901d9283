"""What the recorder says of networks that other people wrote, built small and with random weights."""

from __future__ import annotations

import warnings

import pytest
import torch

from normalcy.flow import is_norm, record

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what these packages say while they are imported is theirs
    import monai.networks.nets as monai
    import transformers

TINY = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}


def bert():
    return transformers.BertModel(transformers.BertConfig(vocab_size=50, **TINY))


def gpt2():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=50, n_embd=8, n_layer=2, n_head=2))


def resnet():
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic"
    )
    return transformers.ResNetModel(config)


def vit():
    return transformers.ViTModel(transformers.ViTConfig(image_size=32, **TINY))


def unet():
    return monai.UNet(2, 1, 2, (4, 8, 16), (2, 2), norm="batch")


def densenet():
    return monai.DenseNet(2, 1, 2, init_features=8, growth_rate=4, block_config=(2, 2))


def tokens():
    return torch.randint(0, 50, (2, 9))


def image(channels):
    return torch.randn(2, channels, 32, 32) + 3


MODELS = {
    "BERT": (bert, tokens),
    "GPT-2": (gpt2, tokens),
    "ResNet": (resnet, lambda: image(3)),
    "ViT": (vit, lambda: image(3)),
    "U-Net": (unet, lambda: image(1)),
    "DenseNet": (densenet, lambda: image(1)),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_value_is_known_and_every_norm_is_one_step(name):
    make, given = MODELS[name]
    model, x = make().eval(), given()
    flow = record(model, lambda: model(x))
    assert flow.not_seen == ()
    values = [value for step in flow.steps for value in (*step.inputs, *step.outputs)]
    assert {value.origin for value in values} <= {"step", "input", "parameter", "buffer"}
    norms = [path for path, module in model.named_modules() if is_norm(module)]
    assert len(norms) >= 4
    for path in norms:
        (step,) = flow.steps_of(path)
        assert step.leaf is model.get_submodule(path)
        assert flow.calls(path) == 1


def test_a_tied_language_model_head_is_seen_to_be_tied():
    model, x = gpt2().eval(), tokens()
    flow = record(model, lambda: model(x))
    assert flow.names(model.lm_head.weight) == ("transformer.wte.weight", "lm_head.weight")
    assert [step.op for step in flow.uses(model.lm_head.weight)] == ["embedding", "linear"]
