"""`normalcy doctor` on a checkpoint, as a person uses it: what it prints, its JSON, exit codes and page."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from words.person import Said, normalcy

from normalcy.pages import lookup, number

MISTAKES = [
    (["--fix"], "--fix with a checkpoint alone: there is nothing to run"),
    (["--fix", "--save", "out.pt"], "--fix with a checkpoint alone"),
    (["--fold"], "--fold with a checkpoint alone: what feeds a norm"),
    (["--data", "net.py:data"], "--data with a checkpoint alone: there is no model"),
    (["--html", "trained.pt"], "--html trained.pt is the TARGET itself"),
    (["--html", "link.html"], "--html link.html is the TARGET itself"),
    (["--seed", "1"], "--seed with a TARGET"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three checkpoints of one net: trained for 12 steps, broken after it, and as it was built."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3), nn.LayerNorm(3))
    torch.save(model.state_dict(), tmp_path / "fresh.pt")
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    for _ in range(12):
        optimizer.zero_grad()
        model(torch.randn(32, 4) * 3 + 9).square().mean().backward()
        optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "trained.pt")
    (tmp_path / "link.html").symlink_to("trained.pt")
    broken = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    broken["1.running_var"][3] = -2.0
    broken["4.weight"][1] = torch.nan
    save_file(broken, tmp_path / "broken.safetensors")
    return tmp_path


def doctor(*argv: str, folder: Path) -> Said:
    return normalcy("doctor", *argv, folder=folder)


def test_the_exit_code_follows_the_findings_as_it_does_for_a_model(folder):
    codes = {
        ("fresh.pt",): 0,
        ("fresh.pt", "--fail-on", "note"): 1,
        ("trained.pt",): 0,
        ("trained.pt", "--fail-on", "warning"): 1,
        ("broken.safetensors",): 1,
        ("broken.safetensors", "--fail-on", "never"): 0,
        ("broken.safetensors", "--no-fold"): 1,
    }
    assert {argv: doctor(*argv, folder=folder).code for argv in codes} == codes


def test_a_person_reads_what_was_found_assumed_and_left_out(folder):
    said = doctor("trained.pt", folder=folder)
    text = " ".join(said.out.split())
    for part in (
        "trained.pt: Checkpoint, ",
        " parameters, 2 normalization layers ",
        "warning unwarmed-statistics",
        "1: updates 12, momentum_assumed 0.1, weight_left_at_momentum_0.1 0.2824",
        "Momentum and eps are not in a checkpoint; assumed are PyTorch's own: momentum 0.1",
        "After 12 updates the initial state weighs 0.282 at momentum 0.1 and 0.886 at momentum 0.01.",
        "0 taken for norms by name, 1 as weight and bias have one shape",
        "The weights lie under 'model'.",
        "Not looked at: optimizer (the state of an optimizer).",
    ):
        assert part in text, part
    assert "Nothing was folded" not in text
    assert not said.err


def test_no_finding_does_not_claim_more_than_was_seen(folder):
    torch.save(nn.LayerNorm(7).state_dict(), folder / "fine.pt")
    said = doctor("fine.pt", folder=folder)
    assert "No finding in its weights; mode, wiring and data were not seen." in said.out
    assert "in order" not in said.out


def test_json_has_the_keys_of_a_models_checkup_and_what_was_assumed(folder):
    said = doctor("broken.safetensors", "--json", folder=folder)
    made = json.loads(said.out)
    (folder / "net.py").write_text("from torch import nn\n\n\ndef make():\n    return nn.BatchNorm1d(3)\n")
    model = json.loads(doctor("net.py:make", "--json", folder=folder).out)
    assert set(made) == {*model, "checkpoint"}
    assert set(made["before"]) == set(model["before"])
    assert {key for site in made["before"]["sites"] for key in site} == set(model["before"]["sites"][0])
    assert {f["code"] for f in made["before"]["findings"]} >= {"negative-variance", "non-finite-parameters"}
    assert made["model"] == {"class": "Checkpoint", "parameters": 20 + 5 + 10 + 15 + 3 + 6, "norms": 2}
    assert made["checkpoint"] == {
        "form": "safetensors",
        "tensors": 11,
        "assumed": [{"convention": "PyTorch", "momentum": 0.1, "eps": 1e-5}],
        "warmup": [
            {
                "updates": 12,
                "norms": 1,
                "weight_left_at_momentum_0.1": pytest.approx(0.9**12, rel=1e-12),
                "weight_left_at_momentum_0.01": pytest.approx(0.99**12, rel=1e-12),
            }
        ],
    }
    assert made["proved"] is None
    assert made["fold"] is None


class Values(HTMLParser):
    """The text of each element that carries an address."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[tuple[str, str]] = []
        self.address: str | None = None

    def handle_starttag(self, _tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.address = dict(attrs).get("data-json")

    def handle_data(self, data: str) -> None:
        if self.address:
            self.shown.append((self.address, data))
            self.address = None


def test_every_number_of_the_page_is_one_of_the_json(folder):
    pytest.importorskip("altair")
    said = doctor("trained.pt", "--json", "--html", "report.html", folder=folder)
    made, page = json.loads(said.out), (folder / "report.html").read_text(encoding="utf-8")
    reader = Values()
    reader.feed(page)
    for address, text in reader.shown:
        assert number(lookup(made, address)) == text, address
    told = {address for address, _ in reader.shown}
    assert {"checkpoint.tensors", "checkpoint.warmup.0.updates", "model.parameters"} <= told
    assert sum("weight_left_at_momentum" in address for address in told) == 2 + 2  # a table and a finding
    for part in ("Weights alone", "Checkup of Checkpoint", "The weights lie under"):
        assert part in page
    for never in (">None<", "What could not be done"):
        assert never not in page.split("<script")[0], never


@pytest.mark.parametrize(("options", "given"), MISTAKES, ids=[" ".join(options) for options, _ in MISTAKES])
def test_what_cannot_be_had_without_a_model_is_refused(options, given, folder):
    before = (folder / "trained.pt").read_bytes()
    said = doctor("trained.pt", *options, folder=folder)
    assert said.code == 2
    assert said.out == ""
    assert said.sentence.startswith(f"normalcy: {given}")
    assert said.sentence.endswith(".")
    assert (folder / "trained.pt").read_bytes() == before
    assert not (folder / "out.pt").exists()


@pytest.mark.parametrize("name", ["cut.pt", "whole.pt", "empty.safetensors", "gone.ckpt", "model.onnx", "."])
def test_what_cannot_be_read_is_one_sentence_and_exit_code_2(name, folder):
    (folder / "cut.pt").write_bytes((folder / "fresh.pt").read_bytes()[:500])
    torch.save(nn.Linear(2, 2), folder / "whole.pt")
    (folder / "empty.safetensors").touch()
    (folder / "model.onnx").write_bytes(b"\x08\x08\x12\x07pytorch")
    said = doctor(name, folder=folder)
    assert said.code == 2
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert said.sentence.startswith("normalcy: ")
    assert ("not supported yet" in said.sentence) == (name == "model.onnx")


def test_a_hostile_name_is_shown_escaped(folder):
    torch.save(
        {"n\x1b[2Jorm<b>.running_mean": torch.rand(3), "n\x1b[2Jorm<b>.running_var": -torch.rand(3)},
        folder / "h.pt",
    )
    said = doctor("h.pt", "--html", "h.html", folder=folder)
    assert said.code == 1
    assert "\x1b" not in said.out
    assert "orm<b>" not in (folder / "h.html").read_text(encoding="utf-8").split("<script")[0]
