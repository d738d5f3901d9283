"""Checkpoints alone: which files are read, which norms are found in them, and what is said about those."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pickle
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, update_bn

import normalcy
from normalcy.checkpoint import Entry, Weights, found_in, named, read
from normalcy.doctor import Examination, examine
from normalcy.doctor.state import examine_checkpoint
from normalcy.errors import MissingExtraError, TargetError

FORMS = ("pt", "legacy.pt", "safetensors")
State = dict[str, Tensor]


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.BatchNorm2d(6),
        nn.ReLU(), nn.Flatten(), nn.Linear(96, 12), nn.LayerNorm(12), nn.PReLU(12), nn.Linear(12, 3),
    )  # fmt: skip


def train(
    model: nn.Module, steps: int, *, seed: int = 0, shape: tuple[int, ...] = (16, 3, 8, 8)
) -> nn.Module:
    """Some steps of SGD on data whose mean is far from 0, so that statistics move away from their start."""
    torch.manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        target = torch.randint(0, 3, (shape[0],))
        nn.functional.cross_entropy(model(torch.randn(shape) * 3 + 7), target).backward()
        optimizer.step()
    return model


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    torch.manual_seed(0)
    return train(net(), 60)


@pytest.fixture
def state(trained: nn.Module) -> State:
    return {name: tensor.detach().clone() for name, tensor in trained.state_dict().items()}


def save(state: Any, folder: Path, form: str = "pt") -> Path:
    path = folder / f"model.{form}"
    if form == "safetensors":
        save_file(state, path)
    else:
        torch.save(state, path, _use_new_zipfile_serialization=form != "legacy.pt")
    return path


def found(state: Any, folder: Path, form: str = "pt") -> Examination:
    return examine_checkpoint(save(state, folder, form))


def places(examination: Examination, *, milder: bool = False) -> set[tuple[str, str, str]]:
    """Code, place and severity of each finding, notes only if asked for."""
    return {(f.code, f.where, f.severity) for f in examination.findings if milder or f.severity != "note"}


# What stands in a file


@pytest.mark.parametrize("form", FORMS)
def test_a_trained_model_is_in_order_and_its_norms_are_found(form, state, tmp_path):
    examination = found(state, tmp_path, form)
    assert not examination.findings
    assert [(s.where, s.kind, s.channels, s.updates) for s in examination.sites] == [
        ("1", "batch", 8, 60),
        ("4", "batch", 6, 60),
        ("8", "unknown", 12, None),
    ]
    assert not examination.unrecognized


def test_only_the_values_of_norms_are_read(state):
    read_names = []

    def entry(name: str, tensor: Tensor) -> Entry:
        def values() -> Tensor:
            read_names.append(name)
            return tensor

        return Entry(tuple(tensor.shape), str(tensor.dtype), tensor.is_floating_point(), True, values)

    weights = Weights({name: entry(name, tensor) for name, tensor in state.items()}, "safetensors")
    assert len(found_in(weights).layers) == 3
    assert {name.split(".")[0] for name in read_names} == {"1", "4", "8"}
    assert len(read_names) == len(set(read_names)) == 5 + 5 + 2


def sparse(path: Path, size: int, values: dict[str, Tensor]) -> None:
    """A file whose first tensor is a hole of `size` bytes."""
    header: dict[str, Any] = {
        "huge.weight": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}
    }
    at, held = size, b""
    for name, tensor in values.items():
        blob = tensor.numpy().tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [at, at + len(blob)]}
        at, held = at + len(blob), held + blob
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        try:
            file.seek(size, 1)
            file.write(held)
        except OSError:
            pytest.skip("this file system has no files of that size")


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory in use is read from /proc")
def test_of_a_large_file_only_what_is_needed_is_loaded(state, tmp_path):
    size, path = 1 << 31, tmp_path / "model.safetensors"
    sparse(
        path, size, {name: tensor for name, tensor in state.items() if name.startswith("4.") and tensor.dim()}
    )
    before = resident()
    (layer,) = found_in(read(path)).layers
    assert torch.equal(layer.running_var, state["4.running_var"])
    assert resident() - before < size // 8


def test_a_file_that_no_machine_can_map_is_refused_in_a_sentence(state, tmp_path):
    sparse(tmp_path / "model.safetensors", 1 << 43, {"bn.running_mean": state["1.running_mean"]})
    with contextlib.suppress(RuntimeError), safe_open(tmp_path / "model.safetensors", framework="pt"):
        pytest.skip("this machine promises memory that it does not have")
    with pytest.raises(TargetError, match="cannot be mapped into memory"):
        read(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: {"epoch": 3, "state_dict": s},
        lambda s: {"model": s, "loss": torch.tensor(0.3), "rng_state": torch.get_rng_state()},
        lambda s: {"model_state_dict": {f"module.{k}": v for k, v in s.items()}},
        lambda s: {"module." + k: v for k, v in s.items()},
        lambda s: {"module._orig_mod." + k: v for k, v in s.items()},
        lambda s: {"args": argparse.Namespace(lr=0.1, name="a run"), "net": s},
        lambda s: {"outer": {"inner": [s]}},
    ],
    ids=["nested", "with a loss", "nested and wrapped", "wrapped", "compiled", "with arguments", "in a list"],
)
def test_what_is_wrapped_around_a_state_dict_is_seen_through(wrap, state, tmp_path):
    state["4.running_var"][2] = -1.5
    examination = found(wrap(state), tmp_path)
    assert [s.where for s in examination.sites] == ["1", "4", "8"]
    assert places(examination) == {("negative-variance", "4", "error")}


def test_two_sets_of_weights_are_both_examined_and_told_apart(state, tmp_path):
    average = {name: tensor.clone() for name, tensor in state.items()}
    average["1.running_mean"][3] = torch.nan
    examination = found({"model": state, "ema": average}, tmp_path)
    assert [s.where for s in examination.sites] == [
        "model.1",
        "model.4",
        "model.8",
        "ema.1",
        "ema.4",
        "ema.8",
    ]
    assert places(examination) == {("non-finite-statistics", "ema.1", "error")}


def test_an_averaged_model_is_found_under_its_own_names(trained, tmp_path):
    examination = found(AveragedModel(trained).state_dict(), tmp_path)
    assert [s.where for s in examination.sites] == ["1", "4", "8"]


def test_the_state_of_an_optimizer_is_left_out_and_named(trained, tmp_path):
    optimizer = torch.optim.Adam(trained.parameters())
    optimizer.zero_grad()
    sum(parameter.square().sum() for parameter in trained.parameters()).backward()
    optimizer.step = optimizer.step  # its state is what matters
    kept = {
        "model": trained.state_dict(),
        "opt": optimizer.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
    }
    examination = found(kept, tmp_path)
    assert [s.where for s in examination.sites] == ["1", "4", "8"]
    assert "Not looked at: opt, optimizer_states (the state of an optimizer)." in examination.notes


def test_mappings_that_hold_themselves_end(state, tmp_path):
    turning: dict[str, Any] = {"model": state}
    for number in range(40):
        turning[f"again{number}"] = turning
    assert [s.where for s in found(turning, tmp_path).sites] == ["1", "4", "8"]


def test_values_that_names_share_count_once(tmp_path):
    tied = torch.randn(50, 8)
    state = {
        "emb.weight": tied,
        "head.weight": tied,
        "norm.weight": torch.rand(8),
        "norm.bias": torch.rand(8),
    }
    assert found_in(read(save(state, tmp_path))).trained == 50 * 8 + 16


def test_an_index_of_several_files_is_read_as_one(state, tmp_path):
    whole = examine_checkpoint(save(state, tmp_path, "safetensors"))
    for form in ("safetensors", "bin"):
        names = list(state)
        placed = {name: f"part-{i % 3}.{form}" for i, name in enumerate(names)}
        for file in set(placed.values()):
            part = {name: state[name] for name in names if placed[name] == file}
            save_file(part, tmp_path / file) if form == "safetensors" else torch.save(part, tmp_path / file)
        index = tmp_path / f"model.{form}.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": placed}))
        assert named(str(index))
        examination = examine_checkpoint(index)
        assert {(s.where, s.channels, s.updates) for s in examination.sites} == {
            (s.where, s.channels, s.updates) for s in whole.sites
        }
    (tmp_path / "part-1.bin").unlink()
    with pytest.raises(TargetError, match=r"names part-1\.bin, which is not there"):
        read(index)
    torch.save({}, tmp_path / "part-1.bin")
    with pytest.raises(TargetError, match="holds an empty mapping"):
        read(index)


def test_the_content_and_not_the_name_says_what_a_file_is(state, tmp_path):
    save_file(state, tmp_path / "weights.pt")
    torch.save(state, tmp_path / "weights.safetensors")
    torch.save(state, tmp_path / "weights.model")
    for name in ("weights.pt", "weights.safetensors", "weights.model"):
        assert named(str(tmp_path / name))
        examination = examine_checkpoint(tmp_path / name)
        assert len(examination.sites) == 3
        assert any("other programs may go by the name" in note for note in examination.notes) == (
            "model" not in name
        )


def test_an_archive_that_was_packed_anew_is_read_right(state, tmp_path):
    """Mapped into memory, compressed records would be read as if they were the values."""
    path = save(state, tmp_path)
    again = tmp_path / "again.pt"
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(again, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    layer = next(layer for layer in found_in(read(again)).layers if layer.where == "1")
    assert torch.equal(layer.running_mean, state["1.running_mean"])


def test_targets_that_are_no_checkpoints_are_left_to_others(tmp_path):
    (tmp_path / "net.py").write_text("x = 1")
    (tmp_path / "notes.txt").write_text("some words, more than a few")
    (tmp_path / "folder").mkdir()
    for target in ("net.py", "notes.txt", "folder", "net.py:make", "gone.py"):
        assert not named(str(tmp_path / target)), target
    for target in (
        "package.module:make",
        "package.module:weights.pt",
        "model.onnx",
        "",
        ".",
        "x" * 5000,
        "a\0b",
    ):
        assert not named(target), target
    assert named("gone.pt")


# What is refused, in a sentence


def _scripted(path: Path) -> None:
    torch.jit.trace(nn.Linear(2, 2), torch.randn(1, 2)).save(str(path))


def _cut(path: Path, keep: float, **options: Any) -> None:
    torch.save(nn.BatchNorm1d(50).state_dict(), path, **options)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep)])


def _cut_safetensors(path: Path) -> None:
    save_file(nn.BatchNorm1d(50).state_dict(), path)
    path.write_bytes(path.read_bytes()[:-7])


def _numpy_scalar(path: Path) -> None:
    import numpy as np

    torch.save({"best": np.float64(0.3), "model": nn.Linear(2, 2).state_dict()}, path)


def _arrays(path: Path) -> None:
    import numpy as np

    with path.open("wb") as file:
        np.savez(file, a=np.arange(3.0))


def _bytes(content: bytes) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(content)


REFUSED: list[tuple[str, Callable[[Path], Any], str]] = [
    ("empty.pt", _bytes(b""), "is empty"),
    ("words.pt", _bytes(b"some words"), "is named like a checkpoint and is none"),
    ("page.pth", _bytes(b"\n<!DOCTYPE html><html>"), "is a web page"),
    (
        "pointer.bin",
        _bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0"),
        "a pointer of Git LFS",
    ),
    ("keras.ckpt", _bytes(b"\x89HDF\r\n\x1a\n" + bytes(99)), "is an HDF5 file"),
    ("packed.pt", _bytes(b"\x1f\x8b" + bytes(99)), "is compressed; "),
    ("cut.pt", lambda path: _cut(path, 0.6), "is damaged or cut short"),
    ("cut_late.pt", lambda path: _cut(path, 0.99), "is damaged or cut short"),
    (
        "cut_old.pt",
        lambda path: _cut(path, 0.6, _use_new_zipfile_serialization=False),
        "is damaged or cut short",
    ),
    ("cut.safetensors", _cut_safetensors, "is damaged or cut short"),
    ("header.safetensors", _bytes(struct.pack("<Q", 9) + b'{"a": 1}}'), "is damaged or cut short"),
    (
        "whole.pt",
        lambda path: torch.save(nn.Linear(2, 2), path),
        "is a whole pickled model (torch.nn.modules.linear",
    ),
    ("scripted.pt", _scripted, "is a scripted model (TorchScript)"),
    ("scalar.pt", _numpy_scalar, "holds Python objects beside tensors (numpy."),
    ("arrays.bin", _arrays, "is an archive of NumPy arrays"),
    ("list.pt", lambda path: torch.save([torch.rand(2)], path), "holds an object of type list"),
    ("tensor.pt", lambda path: torch.save(torch.rand(2), path), "holds a single tensor without a name"),
    ("nothing.pt", lambda path: torch.save({}, path), "holds an empty mapping"),
    ("numbers.pt", lambda path: torch.save({"lr": 0.1}, path), "holds no tensor under a name"),
    ("folder.pt", Path.mkdir, "folder.pt is a folder"),
    ("gone.pt", Path.exists, "no such file"),
    ("a.index.json", _bytes(b"{}"), "is no index of a checkpoint"),
    ("b.index.json", _bytes(b"[not json"), "is no index of a checkpoint"),
    ("c.index.json", _bytes(b'{"weight_map": {"a": "b.pt"}}'), "names b.pt, which is not there"),
    ("d.index.json", _bytes(b'{"weight_map": {"a": "d.index.json"}}'), "names an index in its turn"),
    (
        "meta.pt",
        lambda path: torch.save(nn.BatchNorm1d(3, device="meta").state_dict(), path),
        "on the meta device",
    ),
]


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("name", "write", "given"), REFUSED, ids=[name for name, _, _ in REFUSED])
def test_what_is_no_checkpoint_is_refused_in_a_sentence(name, write, given, tmp_path):
    write(tmp_path / name)
    assert named(str(tmp_path / name)) == (name != "folder.pt")
    with pytest.raises(TargetError) as caught:
        examine_checkpoint(tmp_path / name)
    said = str(caught.value)
    assert given in said
    assert "\n" not in said
    assert "; needed: " in said
    assert said.endswith(".")
    for ugly in ("..", "None", "  ", "\x1b"):
        assert ugly not in said.replace("….", ""), said


def test_nothing_that_a_file_names_is_run(tmp_path):
    class Trap:
        def __reduce__(self):
            return Path.touch, (tmp_path / "sprung",)

    for number, keep in enumerate((pickle.dumps(Trap()), None)):
        path = tmp_path / f"trap{number}.pt"
        path.write_bytes(keep) if keep else torch.save({"weight": torch.rand(3), "more": Trap()}, path)
        with pytest.raises(TargetError, match=r"could run any code|damaged|not read safely"):
            read(path)
    assert not (tmp_path / "sprung").exists()


def test_a_folder_is_answered_with_the_checkpoint_in_it(state, tmp_path):
    path = save(state, tmp_path, "safetensors")
    assert named(str(tmp_path))
    with pytest.raises(TargetError, match=r"is a folder; .* Name .*model\.safetensors\."):
        read(tmp_path)
    (tmp_path / f"{path.name}.index.json").write_text("{}")
    with pytest.raises(TargetError, match=r"Name .*\.index\.json\."):
        read(tmp_path)


def test_without_the_package_safetensors_its_files_are_refused_with_a_remedy(state, tmp_path, monkeypatch):
    path = save(state, tmp_path, "safetensors")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(MissingExtraError, match="Run pip install safetensors"):
        read(path)
    assert len(examine_checkpoint(save(state, tmp_path)).sites) == 3


# Which norms are recognized


def has_values(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def real_models() -> dict[str, Callable[[], nn.Module]]:
    import monai.networks.nets as monai
    from transformers import (
        BertConfig,
        BertModel,
        ConvNextConfig,
        ConvNextModel,
        GemmaConfig,
        GemmaModel,
        GPT2Config,
        GPT2Model,
        LlamaConfig,
        LlamaModel,
        ResNetConfig,
        ResNetModel,
        T5Config,
        T5Model,
        Wav2Vec2Config,
        Wav2Vec2Model,
    )  # fmt: skip

    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    narrow = {"conv_dim": (8, 8), "conv_kernel": (3, 3), "conv_stride": (2, 2), "num_feat_extract_layers": 2,
              "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}  # fmt: skip
    gemma = GemmaConfig(**small, vocab_size=50, head_dim=8, num_key_value_heads=2)
    t5 = T5Config(d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=50)
    return {
        "monai resnet": lambda: monai.ResNet("basic", [2, 1, 1, 1], [4, 8, 8, 8], 2, num_classes=3),
        "monai unet": lambda: monai.UNet(2, 1, 2, (4, 8, 8), (2, 2), norm=("instance", {"affine": True})),
        "monai swin": lambda: monai.SwinUNETR(in_channels=1, out_channels=2, feature_size=12, spatial_dims=2),
        "bert": lambda: BertModel(BertConfig(**small, vocab_size=50)),
        "llama": lambda: LlamaModel(LlamaConfig(**small, vocab_size=50)),
        "gemma": lambda: GemmaModel(gemma),
        "gpt2": lambda: GPT2Model(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50)),
        "t5": lambda: T5Model(t5),
        "resnet": lambda: ResNetModel(ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1])),
        "convnext": lambda: ConvNextModel(ConvNextConfig(hidden_sizes=[4, 8], depths=[1, 1], num_stages=2)),
        "wav2vec2": lambda: Wav2Vec2Model(Wav2Vec2Config(**small, vocab_size=32, **narrow)),
    }  # fmt: skip


REAL = (
    "monai resnet",
    "monai unet",
    "monai swin",
    "bert",
    "llama",
    "gemma",
    "gpt2",
    "t5",
    "resnet",
    "convnext",
    "wav2vec2",
)


@pytest.mark.parametrize("name", REAL)
def test_exactly_the_norms_of_real_models_are_found_and_fresh_ones_get_notes_only(name, tmp_path):
    torch.manual_seed(0)
    model = real_models()[name]()
    norms = {
        path
        for path, module in model.named_modules()
        if "norm" in type(module).__name__.lower()
        and "parametriz" not in type(module).__module__
        and has_values(module)
    }
    examination = found(model.state_dict(), tmp_path)
    assert norms
    assert {site.where for site in examination.sites} == norms
    assert not places(examination)


def test_vectors_that_are_no_norms_are_not_taken_for_any(tmp_path):
    from torch.nn.utils.parametrizations import spectral_norm, weight_norm

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gamma = nn.Parameter(torch.rand(5))
            self.normal_head = nn.PReLU(5)
            self.scale = nn.Parameter(torch.rand(5))

    model = nn.ModuleDict(
        {
            "prelu": nn.PReLU(5),
            "linear": nn.Linear(5, 5),
            "one": nn.Linear(1, 1),
            "weight": weight_norm(nn.Linear(5, 5)),
            "spectral": spectral_norm(nn.Linear(5, 5)),
            "scaled": Scaled(),
            "attention": nn.MultiheadAttention(4, 2),
            "embedding": nn.Embedding(5, 5),
            "bare": nn.BatchNorm1d(5, affine=False, track_running_stats=False),
        }
    )
    examination = found(model.state_dict(), tmp_path)
    assert [f.code for f in examination.findings] == ["no-norm"]
    assert not examination.sites


def test_names_of_keras_and_flax_are_known_and_their_defaults_assumed(tmp_path):
    def values(*shape: int) -> Tensor:
        return torch.rand(shape) + 0.5

    keras = {f"bn/{name}:0": values(4) for name in ("gamma", "beta", "moving_mean", "moving_variance")}
    flax = {
        "params/bn/scale": values(4), "params/bn/bias": values(4), "params/dense/kernel": values(4, 3),
        "params/dense/bias": values(3), "batch_stats/bn/mean": values(4), "batch_stats/bn/var": values(4),
    }  # fmt: skip
    nested = {
        "params": {"bn": {"scale": values(4), "bias": values(4)}},
        "batch_stats": {"bn": {"mean": values(4), "var": values(4)}},
    }
    for state, framework in (
        (keras, "Keras 3's own: momentum 0.01"),
        (flax, "Flax's own"),
        (nested, "Flax's own"),
    ):
        examination = found(state, tmp_path)
        assert [(s.where, s.kind, s.channels) for s in examination.sites] == [("bn", "batch", 4)]
        assert framework in examination.notes[0]
        assert not examination.findings
    keras["bn/moving_variance:0"][1] = 1e-4  # below Keras' eps of 1e-3 and above PyTorch's of 1e-5
    assert places(found(keras, tmp_path), milder=True) == {("eps-decides", "bn", "note")}
    flax["batch_stats/bn/var"][1] = 1e-4
    assert not found(flax, tmp_path).findings


def test_half_a_norm_is_listed_with_the_reason(tmp_path):
    state = {
        "a.running_mean": torch.rand(3),
        "b.running_var": torch.rand(3),
        "c.running_mean": torch.rand(3), "c.running_var": torch.rand(4),
        "d.running_mean": torch.rand(2, 3), "d.running_var": torch.rand(2, 3),
        "e.running_mean": torch.zeros(0), "e.running_var": torch.ones(0),
        "f.running_mean": torch.arange(3), "f.running_var": torch.arange(3),
        "g.running_mean": torch.rand(3), "g.running_std": torch.rand(3),
        "h.running_mean": torch.rand(3, device="meta"), "h.running_var": torch.rand(3, device="meta"),
        "i.running_mean": torch.randn(3), "i.running_var": torch.rand(3) + 1,
    }  # fmt: skip
    examination = found(state, tmp_path)
    assert [site.where for site in examination.sites] == ["i"]
    reasons = {item.where: item.why for item in examination.unrecognized}
    for where, part in zip(
        "abcdefgh",
        ("no running variance", "no running mean", "running variance (4,)", "one value for each channel",
         "shape (0,)", "int64", "no mean and variance", "meta device"),
        strict=True,
    ):  # fmt: skip
        assert part in reasons[where], where
    assert {
        where for code, where, _ in places(examination, milder=True) if code == "unrecognized-norm"
    } == set("abcdefgh")


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str
)
@pytest.mark.parametrize("form", ["pt", "safetensors"])
def test_faults_are_found_in_every_width_of_numbers(dtype, form, state, tmp_path):
    state["1.running_var"][5] = -0.25
    state["4.running_mean"][2] = torch.nan
    cast = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in state.items()
    }
    assert places(found(cast, tmp_path, form)) == {
        ("negative-variance", "1", "error"),
        ("non-finite-statistics", "4", "error"),
    }


# What is found wrong


def fault(change: Callable[[State], None], code: str, where: str, severity: str, **evidence: float) -> Any:
    return pytest.param(change, code, where, severity, evidence, id=f"{code} {severity}")


def put(name: str, index: Any, value: float) -> Callable[[State], None]:
    return lambda state: state[name].__setitem__(index, value)


def reset(state: State) -> None:
    state["4.running_mean"].zero_()
    state["4.running_var"].fill_(1)


def reset_with_counter(state: State) -> None:
    reset(state)
    state["4.num_batches_tracked"].zero_()


def shrink(state: State) -> None:
    state["4.weight"].mul_(1e-6)


def scale_down(state: State) -> None:
    state["4.running_mean"].mul_(1e-5)
    state["4.running_var"].mul_(1e-10)


NON_FINITE, NEGATIVE, PARAMETERS = "non-finite-statistics", "negative-variance", "non-finite-parameters"
FAULTS = [
    fault(put("1.running_mean", 3, torch.nan), NON_FINITE, "1", "error", channels=1, of=8, first_channel=3),
    fault(put("4.running_var", [1, 2], torch.inf), NON_FINITE, "4", "error", channels=2, first_channel=1),
    fault(put("4.running_var", 2, -3e-6), NEGATIVE, "4", "error", channels=1, of=6, nan_channels=0),
    fault(
        put("4.running_var", [2, 5], -0.5), NEGATIVE, "4", "error", channels=2, lowest=-0.5, nan_channels=2
    ),
    fault(put("8.weight", 4, torch.nan), PARAMETERS, "8", "error", channels=1, of=12, first=4),
    fault(put("1.bias", 7, -torch.inf), PARAMETERS, "1", "error", channels=1, of=8, first=7),
    fault(reset, "initial-statistics", "4", "error", updates=60),
    fault(reset_with_counter, "initial-statistics", "4", "error", updates=0),
    fault(shrink, "decayed-norm", "4", "warning", channels=6, of=6, exactly_zero=0),
    fault(scale_down, "eps-decides", "4", "warning", channels=6, of=6, passing_nothing=0),
]


@pytest.mark.parametrize("form", ["pt", "safetensors"])
@pytest.mark.parametrize(("change", "code", "where", "severity", "evidence"), FAULTS)
def test_a_fault_is_found_where_it_is_and_nothing_else(
    change, code, where, severity, evidence, form, state, tmp_path
):
    change(state)
    examination = found(state, tmp_path, form)
    assert places(examination) == {(code, where, severity)}
    (finding,) = examination.having(code)
    assert {name: finding.evidence[name] for name in evidence} == pytest.approx(evidence)
    for text in (finding.cause, finding.remedy):
        assert text.endswith(".")


@pytest.mark.parametrize("steps", [3, 12, 43, 44])
def test_the_weight_left_is_told_at_both_momenta_and_judged_at_the_one_assumed(steps, tmp_path):
    torch.manual_seed(1)
    examination = found(train(net(), steps).state_dict(), tmp_path)
    left = {momentum: (1 - momentum) ** steps for momentum in (0.1, 0.01)}
    sentence = (
        f"After {steps} updates the initial state weighs {left[0.1]:.3g} at momentum 0.1 and {left[0.01]:.3g}"
    )
    assert any(note.startswith(sentence) for note in examination.notes)
    expected = "error" if left[0.1] > 0.5 else "warning" if left[0.1] > 0.01 else None
    assert places(examination) == (
        {("unwarmed-statistics", where, expected) for where in "14"} if expected else set()
    )
    for finding in examination.findings:
        assert finding.evidence["weight_left_at_momentum_0.1"] == pytest.approx(left[0.1], rel=1e-12)
        assert finding.evidence["weight_left_at_momentum_0.01"] == pytest.approx(left[0.01], rel=1e-12)
        assert finding.evidence["updates_for_1_percent"] == 44


def test_a_small_momentum_is_not_seen_but_its_weight_left_is_told(tmp_path):
    """After 300 updates nothing is left at momentum 0.1, and 0.049 at 0.01: which it was, no file says."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5, momentum=0.01), nn.Linear(5, 3))
    examination = found(train(model, 300, shape=(16, 4)).state_dict(), tmp_path)
    assert (
        "After 300 updates the initial state weighs 1.87e-14 at momentum 0.1 and 0.049 at momentum 0.01."
        in (examination.notes)
    )
    assert not examination.findings


def test_many_counters_are_told_by_their_extremes(tmp_path):
    model = nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(7)))
    for updates, norm in enumerate(model, 1):
        norm.num_batches_tracked.fill_(updates * 100)
        norm.running_mean.add_(updates)
    told = [
        note
        for note in found(model.state_dict(), tmp_path).notes
        if note.startswith(("After", "The counters"))
    ]
    assert [note.split(" the")[0] for note in told] == [
        "The counters differ between 7 values; told here are", "After 100 updates", "After 700 updates",
    ]  # fmt: skip


def test_a_checkpoint_and_its_model_are_judged_alike(state, trained, tmp_path):
    """Without data a model has nothing more to show than its file, but for its momentum and eps."""
    shared = ("initial-statistics", "non-finite-statistics", "negative-variance")
    for change, *_ in (row.values for row in FAULTS):
        broken = {name: tensor.clone() for name, tensor in state.items()}
        change(broken)
        model = net()
        model.load_state_dict(broken)
        ours, theirs = found(broken, tmp_path), examine(model.eval())
        assert {(f.code, f.where) for f in ours.having(*shared)} == {
            (f.code, f.where) for f in theirs.having(*shared)
        }


# What is no fault


def test_a_state_as_it_was_built_gets_notes_only(tmp_path):
    examination = found(net().state_dict(), tmp_path)
    assert places(examination, milder=True) == {
        ("initial-statistics", "1", "note"),
        ("initial-statistics", "4", "note"),
    }


@pytest.mark.parametrize(
    ("init", "severity"), [(nn.init.zeros_, "note"), (lambda w: nn.init.normal_(w, 1, 0.02), "warning")]
)
def test_a_fresh_state_with_an_initialization_of_its_own_is_no_error(init, severity, tmp_path):
    model = net()
    init(model[1].weight)
    got = places(found(model.state_dict(), tmp_path), milder=True)
    assert ("initial-statistics", "1", severity) in got
    assert "error" not in {level for _, _, level in got}


def test_an_averaged_model_after_update_bn_is_not_called_unwarmed_for_certain(trained, tmp_path):
    averaged = AveragedModel(trained)
    update_bn([torch.randn(16, 3, 8, 8) * 50 for _ in range(5)], averaged)
    examination = found(averaged.state_dict(), tmp_path)
    assert "error" not in {finding.severity for finding in examination.findings}


@pytest.mark.parametrize("counter", [torch.tensor(-3), torch.tensor(2 + 1j)])
def test_a_counter_that_counts_nothing_is_taken_for_none(counter, state, tmp_path):
    state["1.num_batches_tracked"] = counter
    said = " ".join(found(state, tmp_path).notes)
    assert "After -3" not in said


def test_a_part_that_training_never_ran_is_a_warning_beside_trained_ones(state, tmp_path):
    spare = nn.BatchNorm1d(3).state_dict()
    examination = found(state | {f"spare.{name}": tensor for name, tensor in spare.items()}, tmp_path)
    assert places(examination) == {("initial-statistics", "spare", "warning")}


def test_statistics_folded_into_a_frozen_norm_without_a_counter_are_no_error(state, tmp_path):
    reset(state)
    del state["4.num_batches_tracked"]
    examination = found(state, tmp_path)
    assert places(examination) == {("initial-statistics", "4", "warning")}
    assert "1 of 2 norms with running statistics have no counter" in " ".join(examination.notes)


def test_dead_and_pruned_channels_get_notes(state, tmp_path):
    """As weight decay and pruning leave them: nothing comes in, and γ lets nothing out."""
    state["1.running_var"][2], state["1.running_mean"][2], state["1.weight"][2] = 1e-30, 1e-18, 3e-9
    state["1.running_var"][5], state["1.weight"][5], state["1.bias"][5] = 0.0, 0.0, 0.0
    state["4.weight"][1] = 0.0  # pruned alone, its input alive
    examination = found(state, tmp_path)
    assert places(examination, milder=True) == {
        ("eps-decides", "1", "note"), ("decayed-norm", "1", "note"), ("decayed-norm", "4", "note"),
    }  # fmt: skip
    (small,) = examination.having("eps-decides")
    assert (small.evidence["channels"], small.evidence["passing_nothing"]) == (2, 2)
    assert "eps decides nothing" in small.cause


def test_one_live_channel_below_eps_is_a_note_that_names_it(state, tmp_path):
    state["4.running_var"][3], state["4.weight"][3] = 2e-7, 0.8
    examination = found(state, tmp_path)
    assert places(examination, milder=True) == {("eps-decides", "4", "note")}
    assert examination.findings[0].evidence["first_channel"] == 3


def test_a_norm_pruned_whole_or_started_at_zero_is_a_note(state, tmp_path):
    state["4.weight"].zero_()
    state["8.weight"].mul_(1e-7)  # of a layer norm: it may be stored as what is added to 1
    assert places(found(state, tmp_path), milder=True) == {
        ("decayed-norm", "4", "note"),
        ("decayed-norm", "8", "note"),
    }


def test_statistics_that_were_computed_anew_are_not_called_unwarmed(tmp_path):
    torch.manual_seed(3)
    few, batches = train(net(), 5), [torch.randn(16, 3, 8, 8) * 0.3 + 7 for _ in range(6)]
    assert places(found(few.state_dict(), tmp_path))
    normalcy.surgery.recalibrate(few, batches)
    assert not places(found(few.state_dict(), tmp_path))
    again = train(net(), 5)
    normalcy.surgery.debias(again)
    assert not places(found(again.state_dict(), tmp_path))
    averaged = AveragedModel(train(net(), 5))
    update_bn(
        batches, averaged
    )  # cumulative: its counter is 6, and a variance below 0.9^6 shows that it is no blend
    assert float(averaged.state_dict()["module.4.running_var"].min()) < 0.9**6
    assert not [f for f in found(averaged.state_dict(), tmp_path).findings if f.where == "4"]


def test_a_counter_that_was_averaged_or_is_no_number_is_survived(state, tmp_path):
    state["1.num_batches_tracked"] = torch.tensor(59.6)
    state["4.num_batches_tracked"] = torch.tensor(torch.nan)
    examination = found(state, tmp_path)
    assert [site.updates for site in examination.sites] == [60, None, None]
    assert not examination.findings
