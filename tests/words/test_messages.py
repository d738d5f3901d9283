"""Every mistake on the command line ends in one sentence: what was given, what is needed, what to do."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from words.person import Said, normalcy, started

NET = """
import sys
import time

import torch
from torch import nn

import normalcy

print("printed by the file")


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


def data():
    torch.manual_seed(1)
    for _ in range(4):
        yield torch.randn(32, 4) * 3 + 5


def seven_features():
    return torch.randn(32, 7) + 5


def with_a_nan():
    x = torch.randn(32, 4) + 5
    x[3, 1], x[4, 2] = float("nan"), float("inf")
    return x


def nothing_at_all():
    return []


def one_batch_as_a_list():
    return [torch.randn(32, 4), torch.randn(32)]


def stumbles():
    yield torch.randn(32, 4) + 5
    raise KeyError("the second file")


def needs(width, depth=2):
    return nn.Linear(width, depth)


def fails():
    return make().nowhere


def gives_a_class():
    return nn.Linear


def gives_nothing():
    make()


def gives_a_state():
    return dict(make().state_dict())


def gives_a_pair():
    return make(), data()


def leaves():
    sys.exit(3)


def sleeps():
    print("asleep", file=sys.stderr, flush=True)
    time.sleep(60)


def sleepy_data():
    yield torch.randn(32, 4) + 5
    sleeps()


def alone():
    return torch.randn(1, 4)


number = 3
"""

BUILDS = "file.py:callable, where the callable builds the model"
STATE = "a state dict, as torch.save(model.state_dict(), …) or safetensors writes it"

# what is typed · what was given · what is needed · what to do
TARGETS = [
    ("", "the target is empty", BUILDS, ""),
    (":", "':' names no file", BUILDS, ""),
    ("net", "'net' has no colon", BUILDS, "Add a colon"),
    ("net.py", "net.py says no callable", "net.py:callable", "It defines make"),
    ("net.py:", "names nothing after the colon", "net.py:callable", "Write the name alone"),
    ("net.py:make()", "names 'make()'", "net.py:callable", "without parentheses"),
    ("net.py:mak", "net.py has no 'mak'", "the name of a callable", "There is make"),
    ("net.py:number", "number in net.py is an int", "something to call", "Name the function"),
    (
        "net.py:needs",
        "needs the argument width",
        "without required arguments",
        "Write a function that calls needs",
    ),
    (
        "net.py:fails",
        "raised AttributeError: 'Sequential' object has no attribute 'nowhere'",
        "a model",
        f"(net.py, line {NET[: NET.index('nowhere')].count(chr(10)) + 1})",
    ),
    (
        "net.py:gives_a_class",
        "gave the class Linear, not an instance",
        "a torch.nn.Module",
        "Return the built model",
    ),
    ("net.py:gives_nothing", "gave None", "a torch.nn.Module or a normalcy.Case", "Return the built model"),
    ("net.py:gives_a_state", "gave a state dict", "a torch.nn.Module", "Return the built model"),
    ("net.py:gives_a_pair", "gave a tuple", "a torch.nn.Module", "Return normalcy.Case(model, data=…)"),
    ("net.py:leaves", "leaves() in net.py called sys.exit(3)", "code that returns", "(net.py, line"),
    ("nte.py:make", "nte.py: no such file", BUILDS, "There is net.py"),
    ("nothing/at/all.py:make", "nothing/at/all.py: no such file", BUILDS, "Check the path"),
    (
        "no_module_of.this_name:make",
        "there is no module 'no_module_of.this_name'",
        "package.module:callable",
        "Check the name",
    ),
    ("bad.py:make", "bad.py, line 2 is no valid Python (", "a file that Python can run", ""),
    (
        "imports.py:make",
        "ModuleNotFoundError: No module named 'nowhere_at_all' (imports.py, line 1)",
        "a file that",
        "",
    ),
    ("through.py:make", "bad.py, line 2 is no valid Python", "a file that Python can run", ""),
    ("null.py:make", "no valid Python", "a file that Python can run", ""),
    (
        "exits.py:make",
        "exits.py called sys.exit('usage')",
        "code that returns",
        "Guard what is for the command line",
    ),
    ("notes.txt", "notes.txt is neither Python nor a checkpoint", BUILDS, ""),
    ("notes.txt:make", "notes.txt is no Python file", BUILDS, ""),
    ("folder", "folder is a folder", BUILDS, ""),
    ("folder:make", "folder is a folder", BUILDS, ""),
    ("junk.pt", "junk.pt is named like a checkpoint and is none", STATE, "Check what wrote it"),
    (
        "junk.safetensors",
        "junk.safetensors is named like a checkpoint and is none",
        STATE,
        "Check what wrote it",
    ),
    ("real.pt:make", "real.pt is a checkpoint, which is weights without a model", BUILDS, "examine it alone"),
    ("real.onnx", "real.onnx is an ONNX file, which is not supported yet", BUILDS, "Write a function"),
    ("gone.safetensors", "gone.safetensors: no such file", STATE, "Check the path"),
    ("gone.safetensors:make", "gone.safetensors: no such file", BUILDS, ""),
]

DATA = [
    (
        "net.py:seven_features",
        "cannot be multiplied (32x7 and 4x8) at 0 (Linear), given float32 (32, 7)",
        "a batch in the form that the model takes",
        "Check shape and dtype",
    ),
    (
        "net.py:with_a_nan",
        "the batch has 2 of 128 values not finite: 1 NaN, 1 infinite",
        "finite values",
        "Find where",
    ),
    ("net.py:nothing_at_all", "the data (a list of 0) have no batch", "at least one", "Check whether"),
    (
        "net.py:one_batch_as_a_list",
        "2 tensors with one common first dimension (32)",
        "no doubt",
        "Give a tuple",
    ),
    (
        "net.py:stumbles",
        "raised KeyError: 'the second file' when batch 2 was asked for",
        "walked to the end",
        "Walk the data",
    ),
    (
        "net.py:needs",
        "--data: needs in net.py needs the argument width",
        "without required arguments",
        "Write a function",
    ),
    (
        "net.py:gives_nothing",
        "--data: net.py:gives_nothing returned None",
        "a batch, or batches",
        "return statement",
    ),
    ("net.py:leaves", "--data: leaves() in net.py called sys.exit(3)", "code that returns", ""),
    ("net.py:make", "the data are a Sequential", "a tensor, dict or tuple (one batch)", ""),
    ("net.py:number", "the data are an int", "a tensor, dict or tuple (one batch)", ""),
    (
        "gone.py:data",
        "--data: gone.py: no such file",
        "file.py:callable, where the callable returns data",
        "Check the path",
    ),
]

USAGE = [
    (["nope"], "no such command 'nope'", "", "See normalcy --help"),
    (["doctor", "--foldd"], "no such option: --foldd", "--fold", "See normalcy doctor --help"),
    (["doctor", "a", "b"], "unexpected extra argument", "", "See normalcy doctor --help"),
    (["doctor", "--fail-on", "maybe"], "'maybe' is not one of", "'never'", "See normalcy doctor --help"),
    (["doctor", "--seed", "x"], "invalid value for '--seed'", "integer", "See normalcy doctor --help"),
    (["doctor", "--data", "net.py:data"], "--data without a TARGET", "a model for the data", "Name it as"),
    (["doctor", "net.py:make", "--seed", "1"], "--seed with a TARGET", "the embedded example", "Set seeds"),
    (
        ["doctor", "net.py:make", "--html", "gone/r.html"],
        "gone/r.html lies in",
        "a folder that is there",
        "Create it",
    ),
    (
        ["doctor", "net.py:make", "--html", "folder"],
        "folder is a folder",
        "the name of a file",
        "Write to folder/",
    ),
    (
        ["doctor", "net.py:make", "--html", "/proc/r.html"],
        "/proc/r.html cannot be written",
        "can be written",
        "elsewhere",
    ),
    (["doctor", "net.py:make", "--html", "x" * 300], "File name too long", "can be written", "elsewhere"),
    (
        ["doctor", "net.py:make", "--html", "loop.html"],
        "loop.html cannot be written (Too many levels",
        "can be written",
        "elsewhere",
    ),
    (["trace"], "there are no values", "at least one number", ""),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    import torch

    files = {
        "net.py": NET,
        "bad.py": "x = 1\ndef f(:\n",
        "imports.py": "import nowhere_at_all\n",
        "through.py": "import bad\n",
        "exits.py": "import sys\nsys.exit('usage')\n",
        "null.py": "x = 1\0\n",
        "notes.txt": "some words",
        "junk.pt": "some words",
        "junk.safetensors": "some words",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop.html").symlink_to("loop.html")
    torch.save({"weight": torch.ones(2)}, tmp_path / "real.pt")
    (tmp_path / "real.onnx").write_bytes(b"\x08\x08\x12\x07pytorch")
    return tmp_path


def assert_one_sentence(said: Said, given: str, needed: str, do: str) -> None:
    sentence = said.sentence
    assert said.code == 2, said
    assert sentence.startswith("normalcy"), sentence
    assert "Traceback" not in said.err, said.err
    for part in (given, needed, do):
        assert part in sentence, f"{part!r} is missing in: {sentence}"
    assert sentence.endswith("."), sentence
    for ugly in ("..", "?.", " .", " ;", ":.", "None.", "  "):
        assert ugly not in sentence.replace("('..", ""), f"{ugly!r} in: {sentence}"
    assert said.out == "", "a mistake prints nothing where results go"
    others = [line for line in said.err.splitlines()[:-1] if line.startswith("normalcy")]
    assert not others, f"more than one sentence: {others}"


@pytest.mark.parametrize(
    ("typed", "given", "needed", "do"), TARGETS, ids=[row[0] or "empty" for row in TARGETS]
)
def test_a_target_that_cannot_be_loaded_ends_in_one_sentence(folder, typed, given, needed, do):
    assert_one_sentence(normalcy("doctor", "--json", typed, folder=folder), given, needed, do)


@pytest.mark.parametrize(("typed", "given", "needed", "do"), DATA, ids=[row[0] for row in DATA])
def test_data_that_cannot_be_used_end_in_one_sentence(folder, typed, given, needed, do):
    assert_one_sentence(
        normalcy("doctor", "net.py:make", "--json", "--data", typed, folder=folder), given, needed, do
    )


@pytest.mark.parametrize(
    ("argv", "given", "needed", "do"), USAGE, ids=[" ".join(row[0])[:60] for row in USAGE]
)
def test_a_command_that_is_mistyped_ends_in_one_sentence(folder, argv, given, needed, do):
    assert_one_sentence(normalcy(*argv, folder=folder), given, needed, do)


def test_a_model_given_one_example_is_examined_and_the_missing_statistics_are_named(folder):
    said = normalcy("doctor", "net.py:make", "--data", "net.py:alone", "--fail-on", "never", folder=folder)
    assert said.code in (0, 2), said
    assert "one value per channel" in said.out + said.err
    assert "1 (BatchNorm1d)" in said.out + said.err
    assert "Traceback" not in said.err


def test_a_full_standard_output_is_one_sentence(folder):
    said = normalcy("doctor", "net.py:make", folder=folder, out=Path("/dev/full"))
    assert_one_sentence(
        said, "the standard output cannot be written (No space left on device)", "room", "Redirect"
    )


def test_a_full_standard_output_is_one_sentence_in_trace_and_help_too(folder):
    for argv in (["trace", "2", "4"], ["--help"], ["doctor", "--help"], ["--version"]):
        said = normalcy(*argv, folder=folder, out=Path("/dev/full"))
        assert said.code == 2, (argv, said)
        assert said.sentence.startswith("normalcy"), said
        assert "No space left on device" in said.sentence
        assert "Traceback" not in said.err
        assert "Exception ignored" not in said.err


def test_a_full_device_for_the_page_is_one_sentence(folder):
    said = normalcy("doctor", "net.py:make", "--html", "/dev/full", folder=folder)
    assert_one_sentence(
        said, "/dev/full cannot be written (No space left on device)", "can be written", "Free some room"
    )


def test_a_file_size_limit_leaves_the_old_page_as_it_was(folder):
    (folder / "report.html").write_text("the old one")
    said = normalcy("doctor", "net.py:make", "--html", "report.html", folder=folder, largest=4096)
    assert_one_sentence(
        said, "report.html cannot be written (File too large)", "can be written", "Free some room"
    )
    assert "what stood there before stands there still" in said.sentence
    assert (folder / "report.html").read_text() == "the old one"
    assert not list(folder.glob(".report*"))


@pytest.mark.parametrize(
    "typed", [["net.py:sleeps"], ["net.py:make", "--data", "net.py:sleepy_data"]], ids=str
)
def test_ctrl_c_ends_with_130_and_leaves_the_old_page_as_it_was(folder, typed):
    (folder / "report.html").write_text("the old one")
    process = started(
        "doctor",
        *typed,
        "--html",
        "report.html",
        folder=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        lines = []
        while "asleep" not in (lines[-1] if lines else ""):
            lines.append(process.stderr.readline())
            assert lines[-1], f"it ended before it slept: {lines}"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130, err
    assert err.splitlines()[-1] == "normalcy: interrupted; nothing was left half-written."
    assert "Traceback" not in err
    assert "Found" not in out
    assert (folder / "report.html").read_text() == "the old one"
    assert not list(folder.glob(".report*"))


def test_a_reader_that_leaves_is_no_error(folder):
    reader, writer = os.pipe()
    os.close(reader)
    process = started("trace", "2", "4", "6", folder=folder, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    _, err = process.communicate(timeout=120)
    assert (process.returncode, err) == (141, "")


def test_a_traceback_comes_only_where_it_is_asked_for(folder):
    said = normalcy("doctor", "net.py:fails", folder=folder, env={"NORMALCY_TRACEBACK": "1"})
    assert said.code == 2
    assert "Traceback" in said.err
    assert "return make().nowhere" in said.err
    assert said.sentence.startswith("normalcy: fails() in net.py raised")


def test_nothing_is_left_beside_somebodys_file(folder):
    before = sorted(path.name for path in folder.iterdir())
    normalcy("doctor", "net.py:make", "--data", "net.py:data", folder=folder)
    left = {path.name for path in folder.iterdir()} - set(before) - {".out", ".err"}
    assert not left
