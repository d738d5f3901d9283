"""However a run is left, by the target, by Ctrl-C or by a mistake, one sentence and the code say how."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from words.person import normalcy, started

from normalcy.cli import main, writing
from normalcy.errors import ArgumentError, OutputError

NET = """
import atexit
import os
import sys

import torch
from torch import nn

import normalcy


class Gone(BaseException):
    pass


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def data():
    torch.manual_seed(1)
    return (torch.randn(32, 4) * 3 + 5 for _ in range(2))


class Leaves(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.norm, self.how = nn.BatchNorm1d(4), how

    def forward(self, x):
        self.how()
        return self.norm(x)


def left():
    sys.exit(0)


def gone():
    raise Gone("away")


def yielding(how):
    yield torch.randn(32, 4)
    how()


def in_forward():
    return Leaves(left)


def in_generator():
    return normalcy.Case(make(), yielding(left))


def in_data_function():
    return normalcy.Case(make(), left)


def in_loss():
    return normalcy.Case(make(), data, loss=lambda output, batch: left())


def in_call():
    return normalcy.Case(make(), data, call=lambda model, batch: left())


def strange_forward():
    return normalcy.Case(Leaves(gone), data)


def strange_generator():
    return normalcy.Case(make(), yielding(gone))
"""

CHATTY = """
atexit.register(print, "printed at exit")
atexit.register(lambda: print("by its name at exit", file=sys.__stdout__))
atexit.register(os.write, 1, b"by its number at exit\\n")
atexit.register(os.system, "echo by a child at exit")
print("held back", file=sys.__stdout__, end="")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "leaves.py").write_text("import sys\n\nsys.exit(0)\n")
    (tmp_path / "raises.py").write_text("class Gone(BaseException):\n    pass\n\n\nraise Gone\n")
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("import sys\n\nsys.exit(0)\n")
    (tmp_path / "pack" / "net.py").write_text("")
    (tmp_path / "computed.py").write_text("import sys\n\n\ndef __getattr__(name):\n    sys.exit(0)\n")
    return tmp_path


EXITS = {
    "net.py:left": "left() in net.py called sys.exit(0) (net.py, line 37)",
    "net.py:in_forward": "the model (Leaves) called sys.exit(0), given float32 (32, 4)",
    "net.py:in_generator": "the data (generator) called sys.exit(0) when batch 2 was asked for",
    "net.py:in_data_function": "the data function left() called sys.exit(0)",
    "net.py:in_loss": "loss(output, batch) called sys.exit(0)",
    "net.py:in_call": "call(model, batch) called sys.exit(0)",
    "leaves.py:make": "leaves.py called sys.exit(0) (leaves.py, line 3)",
    "pack.net:make": "pack.net called sys.exit(0) (pack/__init__.py, line 3)",
    "computed.py:make": "looking up make in computed.py called sys.exit(0) (computed.py, line 5)",
}


@pytest.mark.parametrize("target", EXITS)
def test_a_target_that_leaves_the_process_is_told_where_and_code_2(folder, target):
    arguments = ["--data", "net.py:data"] if target in ("net.py:in_forward", "net.py:left") else []
    said = normalcy("doctor", target, *arguments, "--json", folder=folder)
    assert said.code == 2
    assert said.sentence.startswith(f"normalcy: {EXITS[target]}")
    assert said.out == ""
    assert "Traceback" not in said.err


@pytest.mark.parametrize("target", ["net.py:gone", "net.py:strange_forward", "net.py:strange_generator"])
def test_what_is_no_exception_is_told_where_and_code_2(folder, target):
    said = normalcy("doctor", target, folder=folder)
    assert (said.code, said.out) == (2, "")
    assert said.sentence.startswith(
        "normalcy: what was given raised Gone, which is no Exception (net.py, line 41); needed: code that"
    )
    assert "Traceback" not in said.err
    said = normalcy("doctor", "raises.py:make", folder=folder)
    assert (said.code, "raised Gone, which is no Exception (raises.py, line 5)" in said.sentence) == (2, True)


@pytest.mark.parametrize("error", [SystemExit(0), SystemExit("bye"), SystemExit()], ids=repr)
def test_sys_exit_from_anywhere_else_ends_in_a_sentence_too(monkeypatch, capsys, error):
    def leave(_: object) -> int:
        raise error

    monkeypatch.setattr("normalcy.cli._run", leave)
    assert main(["doctor"]) == 2
    shown = "" if error.code is None else repr(error.code)
    assert f"what was given called sys.exit({shown}) (test_leaving.py, line" in capsys.readouterr().err


def test_an_interrupt_is_130_and_the_end_of_a_generator_passes(monkeypatch):
    for error, code in ((KeyboardInterrupt, 130), (GeneratorExit, None)):

        def leave(_: object, error: type[BaseException] = error) -> int:
            raise error

        monkeypatch.setattr("normalcy.cli._run", leave)
        if code is None:
            with pytest.raises(GeneratorExit):
                main(["doctor"])
        else:
            assert main(["doctor"]) == code


def test_what_the_target_prints_at_exit_is_not_in_the_json(folder):
    (folder / "net.py").write_text(NET + CHATTY)
    process = started(
        "doctor", "net.py:make", "--data", "net.py:data", "--fail-on", "never", "--json",
        folder=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0
    assert json.loads(out)["target"] == "net.py:make"
    told = (
        "printed at exit",
        "by its name at exit",
        "by its number at exit",
        "by a child at exit",
        "held back",
    )
    assert [words for words in told if words not in err] == []


def test_the_page_on_the_standard_output_is_not_lost_while_it_is_reserved(folder):
    process = started(
        "doctor", "net.py:make", "--data", "net.py:data", "--fail-on", "never", "--html", "/dev/stdout",
        folder=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert out.startswith("<!DOCTYPE html>")
    assert "The report is in /dev/stdout" in out


def test_in_a_longer_process_the_standard_output_is_as_before_after_it_was_reserved():
    code = """
import os, sys
from normalcy.cli import writing
print("before")
with writing.reserved_stdout():
    print("theirs")
    print("by its name", file=sys.__stdout__)
    os.write(1, b"by its number\\n")
    writing.write_out("ours\\n")
print("after", flush=True)
os.write(1, b"number after\\n")
assert writing.standard_output() is sys.stdout is sys.__stdout__
"""
    env = os.environ | {"PYTHONPATH": str(Path(writing.__file__).parents[2]), "PYTHONUNBUFFERED": ""}
    said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert said.stdout.split("\n") == ["before", "ours", "after", "number after", ""]
    assert sorted(said.stderr.splitlines()) == ["by its name", "by its number", "theirs"]


# One file named twice

SPELLINGS = {
    "the same": "page.html",
    "with a dot": "./page.html",
    "by way of a folder": "sub/../page.html",
    "by a link": "link.html",
    "by a linked folder": "here/page.html",
}


@pytest.mark.parametrize("spelled", SPELLINGS)
@pytest.mark.parametrize("exists", [False, True])
def test_two_results_for_one_file_are_refused_before_any_work(folder, spelled, exists):
    (folder / "link.html").symlink_to("page.html")
    (folder / "here").symlink_to(".", target_is_directory=True)
    (folder / "sub").mkdir()
    if exists:
        (folder / "page.html").write_text("old")
    said = normalcy(
        "doctor", "net.py:left", "--fix", "--save", SPELLINGS[spelled], "--html", str(folder / "page.html"),
        folder=folder,
    )  # fmt: skip
    assert said.code == 2
    assert said.err == (
        f"normalcy: --save {Path(SPELLINGS[spelled])} is the file that --html is written to; "
        "needed: another file. Name a new one.\n"
    )
    assert (folder / "page.html").exists() is exists


@pytest.mark.parametrize("option", ["--save", "--html"])
def test_no_result_is_written_over_what_is_read(folder, option):
    (folder / "link.py").symlink_to("net.py")
    (folder / "feed.py").write_text("from net import data\n")
    for place, what in (("net.py", "TARGET"), ("link.py", "TARGET"), ("feed.py", "data")):
        said = normalcy(
            "doctor", "net.py:make", "--data", "feed.py:data", "--fix", option, place, folder=folder
        )
        assert said.code == 2
        assert said.sentence.startswith(
            f"normalcy: {option} {place} is the {what} itself; needed: another file"
        )
    assert (folder / "net.py").read_text() == NET


def test_two_results_may_go_nowhere_or_to_two_files_of_one_name(tmp_path):
    (tmp_path / "a").mkdir()
    apart = [
        (Path(os.devnull), Path(os.devnull)),
        (tmp_path / "x", tmp_path / "a" / "x"),
        (None, None),
        (tmp_path / "x", None),
    ]
    for html, save in apart:
        writing.apart({"--html": html, "--save": save}, {"TARGET": "torch.nn:Identity", "data": None})
    with pytest.raises(ArgumentError, match="--save /dev/fd/1 is the file that --html is written to"):
        writing.apart({"--html": Path("/dev/stdout"), "--save": Path("/dev/fd/1")}, {})
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OutputError, match="symbolic links"):
        writing.apart({"--html": tmp_path / "loop"}, {})


# Ctrl-C


def test_before_the_command_can_catch_an_interrupt_torch_is_not_loaded():
    code = "import sys, normalcy.cli; print('torch' in sys.modules, 'numpy' in sys.modules)"
    env = os.environ | {"PYTHONPATH": str(Path(writing.__file__).parents[2])}
    said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["False", "False"]


def test_an_interrupt_while_torch_is_loaded_is_a_sentence(folder):
    # The interrupt comes from a module that PyTorch's import would find first: no race with a clock.
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(
        "import os, signal\n\nos.kill(os.getpid(), signal.SIGINT)\nraise ImportError('too late')\n"
    )
    code = (
        "import sys; sys.path.insert(0, '.'); from normalcy.cli import main; "
        "sys.exit(main(['doctor', 'net.py:make']))"
    )
    env = os.environ | {"PYTHONPATH": str(Path(writing.__file__).parents[2])}
    said = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=folder, capture_output=True, text=True, check=False
    )
    assert said.returncode == 130
    assert said.stderr == "normalcy: interrupted; nothing was left half-written.\n"


@pytest.mark.parametrize("moment", ["created", "opened", "written"])
def test_an_interrupt_while_a_file_is_made_leaves_none(tmp_path, monkeypatch, moment):
    path = tmp_path / "report.html"
    real_open, real_text = os.open, writing._text

    def created(*args: object, **kwargs: object) -> int:
        number = real_open(*args, **kwargs)
        if str(args[0]).endswith(".part"):
            os.close(number)
            raise KeyboardInterrupt
        return number

    def opened(file: object) -> object:
        real_text(file).close()
        raise KeyboardInterrupt

    if moment == "created":
        monkeypatch.setattr(os, "open", created)
    elif moment == "opened":
        monkeypatch.setattr(writing, "_text", opened)

    def write() -> None:
        with writing.atomic(path) as file:
            file.write("half")
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        write()
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


# The package is loaded piece by piece


@pytest.mark.parametrize(
    "statement",
    [
        "import normalcy; normalcy.nn.BatchNorm2d(3)",
        "from normalcy import nn; nn.BatchNorm2d(3)",
        "from normalcy import batch_norm, Moments, Case, doctor; doctor.examine",
        "import normalcy; normalcy.batch_norm; normalcy.Moments.of; normalcy.functional.rms_norm",
        "import normalcy.nn; normalcy.nn.LayerNorm(3); normalcy.conventions.TORCH",
        "from normalcy import *; batch_norm, nn, surgery, errors",
        "import normalcy; assert set(normalcy.__all__) <= set(dir(normalcy)); normalcy.errors.ShapeError",
        "import normalcy as n; assert not hasattr(n, 'nowhere'); assert n.Moments is n.Moments",
    ],
)
def test_every_way_to_a_name_works_in_a_fresh_interpreter(statement):
    ast.parse(statement)
    env = os.environ | {"PYTHONPATH": str(Path(writing.__file__).parents[2])}
    subprocess.run([sys.executable, "-W", "error", "-c", statement], env=env, check=True)


def test_a_compiled_function_may_be_the_first_to_use_the_package():
    code = (
        "import normalcy, torch; "
        "f = torch.compile(lambda x: normalcy.layer_norm(x, (4,)) + 1, fullgraph=True, backend='eager'); "
        "x = torch.randn(3, 4) + 9; print((f(x) - 1 - torch.layer_norm(x, (4,))).abs().max().item() < 1e-5)"
    )
    env = os.environ | {"PYTHONPATH": str(Path(writing.__file__).parents[2])}
    said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["True"]


@pytest.mark.parametrize(
    "words", [["doctor", "weights.pt"], ["doctor", "weights.pt", "--json"], ["trace", "2", "4"]]
)
def test_a_reader_that_has_gone_is_silence_and_its_own_code(words: list[str], tmp_path: Path) -> None:
    torch.save(torch.nn.BatchNorm1d(3).state_dict(), tmp_path / "weights.pt")
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "normalcy", *words],
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            check=False,
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, "")
