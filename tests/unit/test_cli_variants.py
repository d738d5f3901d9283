"""`normalcy doctor --norm …` as a person uses it: what it prints, its JSON, its page and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from words.person import Said, normalcy

from normalcy import example
from normalcy.cli import variants
from normalcy.errors import ArgumentError

ASK = ("doctor", "--norm", "batch", "--batch", "4", "--steps", "3")


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> tuple[Said, Path]:
    folder = tmp_path_factory.mktemp("variants")
    return normalcy(*ASK, "--fail-on", "warning", "--html", "page.html", folder=folder), folder


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Said, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("variants")
    found = normalcy(*ASK, "--seed", "7", "--json", folder=folder)
    return found, json.loads(found.out)


def test_a_person_reads_losses_seed_by_seed_the_claim_the_noise_and_the_remedy(said):
    out = said[0].out
    for part in (
        "Variants of the embedded example: 3 steps in batches of 4, seeds 0, 1, 2",
        "Held-out loss (nats per character)",
        "seed 0  seed 1  seed 2    mean  spread",
        "\n  none ",
        "\n  batch before ",
        "Against none",
        "spread",
        "at batch 4 (here)",
        "warning  too-few-values",
        "remedy: Use layer, group or RMS norm",
        "The report is in page.html",
    ):
        assert part in out, part
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out
    assert "training batch before (36)" in said[0].err


def test_the_exit_code_follows_the_finding(said, machine):
    assert said[0].code == 1
    assert machine[0].code == 0  # a warning, and the default is error


def test_the_page_holds_the_comparison(said):
    page = (said[1] / "page.html").read_text()
    embedded = json.loads(page.split('id="checkup">')[1].split("</script>")[0])
    assert [variant["name"] for variant in embedded["variants"]] == ["none", "batch before"]
    assert "too-few-values" in page


def test_the_json_is_all_of_the_output_and_has_the_losses_of_the_seeds_asked_for(machine):
    made = machine[1]
    assert made["recipe"]["seeds"] == [7, 8, 9]
    assert (made["recipe"]["batch"], made["recipe"]["steps"]) == (4, 3)
    none, batch = made["variants"]
    assert none["against_none"] is None
    assert len(batch["losses"]) == len(set(batch["losses"])) == 3
    assert batch["mean"] == pytest.approx(sum(batch["losses"]) / 3)
    assert batch["spread"] == max(batch["losses"]) - min(batch["losses"])
    assert batch["against_none"]["difference"] == pytest.approx(batch["mean"] - none["mean"])
    assert batch["batch_norm"]["gap"] == batch["batch_norm"]["stored"] - batch["batch_norm"]["batch"]
    noise = {point["batch"]: point["noise"] for point in batch["batch_norm"]["neighbours"][0]["curve"]}
    assert noise[2] > noise[8] > noise[32] > noise[128]
    assert [finding["code"] for finding in made["findings"]] == ["too-few-values"]


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (("--norm", "instance"), "--norm instance; needed: one of none, batch, layer, group, rms, or all"),
        (("--norm", "batch,"), "--norm (empty)"),
        (("--norm", "batch", "--place", "under"), "--place under; needed: one of before, after, or all"),
        (("--norm", "batch", "--batch", "1"), "layer, group or rms norm"),
        (("--norm", "layer", "--batch", "0"), "batches of 0; needed: 1 to 2048 examples"),
        (("--norm", "layer", "--steps", "0"), "0 steps"),
        (("--norm", "layer", "--batch", "many"), "valid integer"),
        (("net.py:make", "--norm", "layer"), "--norm with a TARGET; needed: the embedded example alone"),
        (("net.py:make", "--batch", "2"), "--batch with a TARGET"),
        (("--place", "after", "--fix"), "--place with --fix"),
        (("--steps", "5", "--no-fold"), "--steps with --fold or --no-fold"),
        (("--norm", "layer", "--seed", "-1"), "seed=-1"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_sentence(argv, part, tmp_path):
    found = normalcy("doctor", *argv, folder=tmp_path)
    assert found.code == 2
    assert part in found.sentence
    assert found.out == ""
    assert "Traceback" not in found.err


def test_norms_are_named_with_commas_again_or_all():
    def asked(*norms: str, places: tuple[str, ...] = ()) -> variants.Asked | None:
        return variants.asked(norms, places, None, None, without={})

    assert asked() is None
    assert asked("batch,rms").norms == asked("batch", "RMS", "batch").norms == ("batch", "rms")
    assert asked("all").norms == variants.NORMS == example.NORMS
    assert asked("all").places == ("before",)
    assert asked("rms", places=("all",)).places == variants.PLACES == example.PLACES
    assert variants.asked([], [], 2, None, without={}).norms == ("batch", "layer")
    with pytest.raises(ArgumentError, match="--norm with --data"):
        variants.asked(["rms"], [], None, None, without={"--fix": False, "--data": True})


def test_an_examination_says_how_much_an_example_varies_with_its_neighbours(tmp_path):
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\nimport normalcy\n\n\ndef case():\n"
        "    torch.manual_seed(0)\n    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))\n"
        "    return normalcy.Case(model, lambda: (torch.randn(16, 4) + 3 for _ in range(16)))\n"
    )
    found = normalcy("doctor", "net.py:case", "--html", "page.html", folder=tmp_path)
    assert "One example and its neighbours in the batch" in found.out
    assert " at batch 16; at batch 2: 0." in found.out
    page = (tmp_path / "page.html").read_text()
    assert "One example and its neighbours" in page
    assert 'data-json="before.sites.0.neighbours.noise"' in page
