"""The command as a person uses it: what it prints, its JSON, its exit codes, and what it writes."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from checkup_sample import hostile, many, nothing, sample, sparse
from words.person import normalcy, started

from normalcy.cli import render, writing
from normalcy.errors import OutputError

NET = """
import os
import sys

import torch
from torch import nn

import normalcy

print("printed while it is read")


def make():
    print("printed by the model's function")
    os.write(1, b"written past Python\\n")
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def data():
    torch.manual_seed(1)
    for _ in range(4):
        yield torch.randn(32, 4) * 3 + 5


def case():
    return normalcy.Case(make(), data, loss=lambda output, batch: output.square().mean())


def healthy():
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))


def nothing():
    return nn.Linear(4, 2)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(NET)
    return tmp_path


def codes(examination: dict[str, Any]) -> set[str]:
    return {finding["code"] for finding in examination["findings"]}


def test_json_is_all_of_the_standard_output_and_says_what_the_schema_says(folder):
    said = normalcy("doctor", "net.py:case", "--fix", "--json", folder=folder)
    made = json.loads(said.out)
    assert "printed by the model's function" in said.err
    assert "written past Python" in said.err
    assert set(made) >= {
        "normalcy",
        "torch",
        "target",
        "model",
        "baselines",
        "before",
        "repair",
        "after",
        "fold",
    }
    assert made["target"] == "net.py:case"
    assert (made["model"]["class"], made["model"]["norms"]) == ("Sequential", 1)
    for examination in (made["before"], made["after"]):
        assert set(examination) >= {"findings", "sites", "unrecognized", "not_seen", "loss"}
        for finding in examination["findings"]:
            assert set(finding) == {"code", "title", "severity", "where", "evidence", "cause", "remedy"}
    (site,) = made["before"]["sites"]
    assert (site["where"], site["kind"], site["channels"]) == ("1", "batch", 8)
    assert {"initial-statistics", "dead-bias"} <= codes(made["before"])
    assert not {"initial-statistics", "dead-bias"} & codes(made["after"])
    assert made["before"]["loss"]["eval"] != pytest.approx(made["before"]["loss"]["batch"], rel=1e-2)
    assert made["after"]["loss"]["eval"] == pytest.approx(made["after"]["loss"]["batch"], rel=1e-2)
    assert made["fold"]["proved"] is True
    assert made["fold"]["error"] <= made["fold"]["bound"]
    assert said.code == 0


def test_the_exit_code_follows_the_findings_that_remain(folder):
    def code(*argv: str) -> int:
        return normalcy("doctor", *argv, folder=folder).code

    assert code("net.py:case") == 1
    assert code("net.py:case", "--fail-on", "never") == 0
    assert code("net.py:case", "--fix") == 0
    assert code("net.py:healthy", "--fail-on", "warning") == 0
    found = json.loads(normalcy("doctor", "net.py:nothing", "--json", folder=folder).out)["before"]
    assert code("net.py:nothing") == 0
    assert code("net.py:nothing", "--fail-on", "note") == (1 if found["findings"] else 0)


def test_a_person_reads_verdict_losses_findings_repair_and_folding(folder):
    said = normalcy("doctor", "net.py:case", "--fix", folder=folder)
    for part in (
        "net.py:case: Sequential, ",
        " parameters, 1 normalization layer\n",
        "After the repair: none.",
        "Found before the repair",
        "error  initial-statistics",
        "cause: ",
        "remedy: ",
        "Repaired",
        "Folded for inference (a copy)",
        "proved equal: error",
    ):
        assert part in said.out, part
    assert max(map(len, said.out.splitlines())) <= 80
    assert "\x1b" not in said.out
    assert "printed by the model's function" not in said.out


def test_without_folding_there_is_none(folder):
    assert (
        json.loads(normalcy("doctor", "net.py:case", "--no-fold", "--json", folder=folder).out)["fold"]
        is None
    )


def test_the_page_is_written_and_the_place_named(folder):
    said = normalcy("doctor", "net.py:case", "--html", "report.html", folder=folder)
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page.lstrip().lower().startswith("<!doctype html")
    assert page.rstrip().endswith("</html>")
    assert "The report is in report.html" in said.out
    assert not list(folder.glob(".report*"))


def test_the_embedded_example_is_worse_than_bigrams_before_and_better_after(folder):
    said = normalcy("doctor", "--fix", "--json", "--fail-on", "never", folder=folder)
    made = json.loads(said.out)
    assert said.code == 0
    assert made["target"] == "the embedded example"
    assert made["before"]["loss"]["eval"] > made["baselines"]["bigram"] + 0.03
    assert made["after"]["loss"]["eval"] < made["baselines"]["bigram"] - 0.03
    assert "training the example (300)" in said.err


def test_help_names_the_commands_and_no_command_is_a_mistake(folder):
    said = normalcy("--help", folder=folder)
    assert said.code == 0
    assert "doctor" in said.out
    assert "trace" in said.out
    bare = normalcy(folder=folder)
    assert (bare.code, bare.out) == (2, said.out)
    assert "--fail-on" in normalcy("doctor", "--help", folder=folder).out
    assert normalcy("--version", folder=folder).out.startswith("normalcy 0.")


def test_negative_numbers_reach_trace(folder):
    said = normalcy("trace", "-2", "4", "-6e-1", "--dy", "-0.2", "0.1", "0.1", "--json", folder=folder)
    assert said.code == 0
    assert json.loads(said.out)["mean"] == pytest.approx(1.4 / 3, rel=1e-12)


def test_a_fault_of_our_own_asks_to_be_reported(folder):
    # A result that JSON cannot hold can only come from this package.
    (folder / "odd.py").write_text(
        "from normalcy import checkup\nfrom net import make\n\n\ndef broken(self):\n"
        "    return {'x': float('nan')}\n\n\ncheckup.Checkup.as_dict = broken\n"
    )
    said = normalcy("doctor", "odd.py:make", "--json", folder=folder)
    assert said.code == 70
    assert said.out == ""
    assert said.sentence.startswith("normalcy: a fault in normalcy, not in what was given: ValueError: ")
    assert "Please report it" in said.sentence
    assert "Traceback" not in said.err


def test_a_terminal_that_knows_only_ascii_gets_escapes(folder):
    process = started(
        "trace", "2", "4", "8", folder=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={"PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    out, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (0, "")
    assert out.isascii()
    assert "mean" in out


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("make", [sample, nothing, many, sparse, hostile], ids=lambda make: make.__name__)
def test_a_rendering_keeps_to_its_width_and_loses_no_word(make, width):
    checkup = make()
    text = render.rendered(checkup, width=width, colour=False)
    widths = [len(line) for line in text.splitlines()]
    assert max(widths) <= max(width, 20)
    squeezed = "".join(text.split())
    for finding in checkup["before"]["findings"][:1]:
        for word in (finding["title"], finding["remedy"], finding["where"]):
            assert "".join(render.plain(word).split()) in squeezed
    assert "\x1b" not in text


def test_a_rendering_has_the_numbers_of_the_json():
    checkup = sample()
    text = " ".join(render.rendered(checkup, width=100, colour=False).split())
    for when in ("before", "after"):
        assert f"{checkup[when]['loss']['eval']:.4f}" in text
    assert f"error {checkup['fold']['error']:.4g}, bound {checkup['fold']['bound']:.4g}" in text
    assert "Found: 2 errors, 2 warnings, 1 note. After the repair: 1 note." in text
    assert text.count(checkup["before"]["findings"][0]["cause"]) == 1


def test_a_failed_proof_is_the_verdict():
    checkup = sample()
    checkup["proved"] = checkup["fold"]["proved"] = False
    text = " ".join(render.rendered(checkup, width=80, colour=False).split())
    assert "could not be proved equal; it was taken back" in text
    assert "NOT all could be proved equal" in text


def test_a_failed_proof_ends_with_1_whatever_fail_on_says():
    from normalcy.cli.doctor import FailOn, code_of

    for level in FailOn:
        assert code_of("note", proved=False, fail_on=level) == 1
        assert code_of(None, proved=True, fail_on=level) == 0
    levels = [FailOn(level) for level in ("never", "error", "warning", "note")]
    codes_of = [code_of(severity, proved=None, fail_on=level)
                for severity in ("note", "warning", "error") for level in levels]  # fmt: skip
    assert codes_of == [0, 0, 0, 1, 0, 0, 1, 1, 0, 1, 1, 1]


def test_a_colour_terminal_gets_colours():
    assert "\x1b[1;31merror" in render.rendered(sample(), width=80, colour=True)


def test_a_file_appears_whole_with_the_mode_that_umask_gives(tmp_path):
    before = os.umask(0o027)
    try:
        with writing.atomic(tmp_path / "new.html") as file:
            file.write("γ" * 10)
            assert not (tmp_path / "new.html").exists()
    finally:
        os.umask(before)
    assert (tmp_path / "new.html").read_text(encoding="utf-8") == "γ" * 10
    assert stat.S_IMODE((tmp_path / "new.html").stat().st_mode) == 0o640
    assert [path.name for path in tmp_path.iterdir()] == ["new.html"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, ValueError, MemoryError])
def test_a_failure_while_writing_leaves_the_old_file_and_nothing_else(tmp_path, failure):
    path = tmp_path / "report.html"
    path.write_text("the old one")
    path.chmod(0o604)

    def halfway() -> None:
        with writing.atomic(path) as file:
            file.write("half")
            raise failure

    with pytest.raises(failure):
        halfway()
    assert path.read_text() == "the old one"
    assert [left.name for left in tmp_path.iterdir()] == ["report.html"]
    with writing.atomic(path) as file:
        file.write("the new one")
    assert path.read_text() == "the new one"
    assert stat.S_IMODE(path.stat().st_mode) == 0o604


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link.html").symlink_to(tmp_path / "elsewhere" / "page.html")
    for text in ("first", "second"):
        with writing.atomic(tmp_path / "link.html") as file:
            file.write(text)
        assert (tmp_path / "link.html").is_symlink()
        assert (tmp_path / "elsewhere" / "page.html").read_text() == text


def test_devices_and_pipes_are_written_to_and_stay_what_they_are(tmp_path):
    import threading

    with writing.atomic(Path("/dev/null")) as file:
        file.write("gone")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    with (
        pytest.raises(OutputError, match="/dev/full cannot be written"),
        writing.atomic(Path("/dev/full")) as file,
    ):
        file.write("x")
    assert stat.S_ISCHR(Path("/dev/full").stat().st_mode)
    os.mkfifo(tmp_path / "pipe")
    read = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    with writing.atomic(tmp_path / "pipe") as file:
        file.write("through")
    reader.join(30)
    assert read == ["through"]


def test_the_standard_output_redirected_to_a_file_takes_a_page_without_losing_what_it_has(tmp_path):
    out = tmp_path / "out"
    spare = os.dup(1)
    try:
        with out.open("w") as file:
            os.dup2(file.fileno(), 1)
        os.write(1, b"before\n")
        with writing.atomic(Path("/dev/stdout")) as file:
            file.write("page\n")
        os.write(1, b"after\n")
    finally:
        os.dup2(spare, 1)
        os.close(spare)
    assert out.read_text() == "before\npage\nafter\n"


def test_a_check_beforehand_changes_nothing(tmp_path):
    (tmp_path / "old.html").write_text("old")
    for name in ("old.html", "new.html"):
        writing.check(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["old.html"]
    for path, why in ((tmp_path, "is a folder"), (tmp_path / "no" / "r.html", "which is no folder"),
                      (tmp_path / "old.html" / "r.html", "which is no folder")):  # fmt: skip
        with pytest.raises(OutputError, match=why):
            writing.check(path)


def test_the_repaired_weights_load_into_the_model_as_built_and_evaluate_as_repaired(folder):
    import torch
    from torch import nn

    said = normalcy("doctor", "net.py:case", "--fix", "--save", "fixed.pt", "--json", folder=folder)
    made = json.loads(said.out)
    assert said.code == 0
    assert {"recalibrate", "strip_dead_bias"} == {item["what"] for item in made["repair"]["done"]}
    built = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    built.load_state_dict(torch.load(folder / "fixed.pt", weights_only=True))
    torch.manual_seed(1)
    batches = [torch.randn(32, 4) * 3 + 5 for _ in range(4)]
    with torch.no_grad():
        loss = sum(float(built.eval()(x).square().mean()) for x in batches) / 4
    assert loss == pytest.approx(made["after"]["loss"]["eval"], rel=1e-5)


def test_saving_without_a_repair_is_refused(folder):
    said = normalcy("doctor", "net.py:case", "--save", "fixed.pt", folder=folder)
    assert said.code == 2
    assert "--save without --fix" in said.err
    assert not (folder / "fixed.pt").exists()
