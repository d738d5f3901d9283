"""Real architectures, tiny, with random weights: nothing crashes, what is folded or stripped stays equal."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normalcy.doctor import examine
from normalcy.surgery import fold, recalibrate, strip_dead_bias

T = pytest.importorskip("transformers")
M = pytest.importorskip("monai.networks.nets")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

BACKBONE = {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
TEXT = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
UNET = (2, 1, 2, (4, 8, 16), (2, 2))


@dataclass(frozen=True)
class Expected:
    """How many norms are known, unknown, recalibrated, folded, refused; how many biases stripped."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    norms: int
    unrecognized: int = 0
    recalibrated: int = 0
    folded: int = 0
    refused: int = 0
    stripped: int = 0


def detr() -> nn.Module:
    backbone = T.ResNetConfig(**BACKBONE, out_features=["stage4"])
    sizes = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in SIDE.items()}
    config = T.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone_config=backbone,
        d_model=16, num_queries=5, **sizes,
    )  # fmt: skip
    return T.DetrForObjectDetection(config)


SIDE = {"layers": 1, "attention_heads": 2, "ffn_dim": 16}

MODELS = {
    "ResNet": Expected(
        lambda: T.ResNetForImageClassification(T.ResNetConfig(**BACKBONE)),
        (4, 3, 32, 32), 16, recalibrated=16, folded=16,
    ),
    "RegNet": Expected(
        lambda: T.RegNetForImageClassification(T.RegNetConfig(**BACKBONE, groups_width=4)),
        (4, 3, 32, 32), 17, recalibrated=17, folded=17,
    ),
    "MobileNetV2": Expected(
        lambda: T.MobileNetV2ForImageClassification(
            T.MobileNetV2Config(depth_multiplier=0.25, finegrained_output=False)
        ),
        (4, 3, 32, 32), 52, recalibrated=52, folded=52,
    ),
    "ConvNeXt": Expected(
        lambda: T.ConvNextForImageClassification(
            T.ConvNextConfig(hidden_sizes=[8, 12, 16, 20], depths=[1, 1, 1, 1])
        ),
        (4, 3, 32, 32), 1, unrecognized=8,
    ),
    "LeViT": Expected(
        lambda: T.LevitForImageClassification(
            T.LevitConfig(
                image_size=64, hidden_sizes=[16, 24, 32], num_attention_heads=[2] * 3, depths=[1] * 3,
                key_dim=[8] * 3,
            )
        ),
        (4, 3, 64, 64), 27, recalibrated=27, folded=4, refused=23,
    ),
    "DETR": Expected(detr, (2, 3, 64, 64), 6, unrecognized=16, refused=16),
    "BERT": Expected(lambda: T.BertForSequenceClassification(T.BertConfig(**TEXT)), (4, 12), 5),
    "Llama": Expected(lambda: T.LlamaForCausalLM(T.LlamaConfig(**TEXT)), (4, 12), 0, unrecognized=5),
    "Wav2Vec2": Expected(
        lambda: T.Wav2Vec2Model(
            T.Wav2Vec2Config(
                **TEXT, conv_dim=[8] * 7, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2
            )
        ),
        (2, 4000), 7, unrecognized=-1,
    ),
    "UNet": Expected(
        lambda: M.UNet(*UNET, num_res_units=2, norm="batch"),
        (4, 1, 32, 32), 9, recalibrated=9, folded=7, refused=2, stripped=9,
    ),
    "UNet, instance norm": Expected(
        lambda: M.UNet(*UNET, num_res_units=1), (4, 1, 32, 32), 6, refused=6, stripped=6
    ),
    "DenseNet": Expected(
        lambda: M.DenseNet(2, 1, 2, init_features=8, growth_rate=4, block_config=(2, 2)),
        (4, 1, 32, 32), 11, recalibrated=11, folded=5, refused=6,
    ),
    "BasicUNet": Expected(
        lambda: M.BasicUNet(2, 1, 2, features=(4, 4, 8, 8, 8, 4), norm="batch"),
        (4, 1, 32, 32), 18, recalibrated=18, folded=18, stripped=18,
    ),
    "DynUNet": Expected(
        lambda: M.DynUNet(2, 1, 2, [3] * 3, [1, 2, 2], [2, 2], filters=[4, 8, 8], norm_name="batch"),
        (4, 1, 32, 32), 10, recalibrated=10, refused=10,
    ),
    "AttentionUnet": Expected(
        lambda: M.AttentionUnet(*UNET),
        (4, 1, 32, 32), 16, recalibrated=14, folded=12, refused=4, stripped=16,
    ),
    "SegResNet": Expected(lambda: M.SegResNet(2, 8, 1, 2), (2, 1, 16, 16), 25),
}  # fmt: skip


def given(shape: tuple[int, ...]) -> Any:
    g = torch.Generator().manual_seed(0)
    if shape == (4, 12):
        return {"input_ids": torch.randint(5, 60, shape, generator=g)}
    return torch.randn(shape, generator=g, dtype=torch.float64) * 2 + 1


def flat(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result] if result.is_floating_point() else []
    parts = (
        result.values() if isinstance(result, dict) else result if isinstance(result, list | tuple) else ()
    )
    return [tensor for part in parts for tensor in flat(part)]


@torch.no_grad()
def outputs(model: nn.Module, batch: Any) -> list[Tensor]:
    return flat(model(**batch) if isinstance(batch, dict) else model(batch))


def assert_equal_outputs(one: list[Tensor], other: list[Tensor], relative: float) -> None:
    assert one
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        error = float((a - b).abs().max() / a.abs().max())
        if not error <= relative:
            raise AssertionError(f"outputs differ by {error:.3g}")


def assert_sentences(report: Any) -> None:
    for item in (*report.done, *report.refused):
        assert item.where or len(list(report.model.children())) == 0
        assert len(item.why.split()) > 2
        assert "\n" not in item.why


@pytest.mark.parametrize("name", MODELS)
def test_real_models_are_examined_recalibrated_folded_and_stripped(name: str) -> None:
    right = MODELS[name]
    torch.manual_seed(0)
    model, batch = right.make().double().eval(), given(right.shape)
    state, modes = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]

    found = examine(model, batch)
    assert modes == [m.training for m in model.modules()]
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert len(found.sites) == right.norms
    assert right.unrecognized in (-1, len(found.unrecognized))
    assert len(found.having("initial-statistics")) == right.recalibrated
    assert {f.code for f in found.findings} <= {
        "initial-statistics", "dead-bias", "too-few-values", "unrecognized-norm", "no-norm",
    }  # fmt: skip

    report = recalibrate(model, batch)
    assert len(report.done) == right.recalibrated
    assert_sentences(report)
    assert not examine(model, batch).having("initial-statistics", "unwarmed-statistics", "stale-statistics")

    with torch.no_grad():  # γ, β and biases that no formula could get right by accident
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    before = outputs(copy.deepcopy(model), batch)

    folded = fold(model, batch)
    assert_sentences(folded)
    assert (len(folded.done), len(folded.refused)) == (right.folded, right.refused)
    if folded.done:
        assert folded.error <= folded.bound
        assert folded.model_error <= folded.model_bound
    assert_equal_outputs(before, outputs(folded.model, batch), 1e-9)

    stripped = strip_dead_bias(model, batch)
    assert_sentences(stripped)
    assert len(stripped.done) == right.stripped == len(found.having("dead-bias"))
    assert_equal_outputs(before, outputs(stripped.model, batch), 1e-9)
    assert_equal_outputs(before, outputs(model, batch), 0.0)


def test_standardized_weights_of_bit_are_no_small_batches() -> None:
    torch.manual_seed(0)
    config = T.BitConfig(embedding_size=8, hidden_sizes=[16, 16, 24, 32], depths=[1] * 4, num_groups=4)
    found = examine(T.BitForImageClassification(config).eval(), given((4, 3, 32, 32)).float())
    assert not found.having("too-few-values")
