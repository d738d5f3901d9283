"""`normalcy trace` as a person and as a machine use it."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden.cases import Case, assert_close, cases

from normalcy.cli.trace import HELP, asking, reading, run
from normalcy.trace import ARRAY_KEYS, KEYS, trace

ROOT = Path(__file__).parents[2]
OPTIONS = {"running_mean": "--running-mean", "running_var": "--running-var", "batch_means": "--updates"}
EXAMPLE = [
    "2",
    "4",
    "6",
    "8",
    "--gamma",
    "3",
    "--beta",
    "-1",
    "--eps",
    "0",
    "--dy",
    "0.1",
    "-0.2",
    "0.3",
    "-0.4",
]


def machine(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    """Run with --json and return what was printed; raise unless it is strict JSON and the exit code is 0."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    code = run([*argv, "--json"])
    printed = capsys.readouterr()
    assert (code, printed.err) == (0, "")
    return dict(json.loads(printed.out, parse_constant=refuse))


def person(*argv: str, out: Any = subprocess.PIPE, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run in a process of its own, as the command does."""
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "normalcy", "trace", *argv],
        stdout=out,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONIOENCODING": "utf-8", **environment},
    )


def arguments(case: Case) -> list[str]:
    """Write a case as a person would type it."""
    words = []
    for key, value in case.given.items():
        if key in {"x", "before_bias", "bias"}:
            continue
        words.append(OPTIONS.get(key, f"--{key}"))
        words += map(repr, value if isinstance(value, list) else [value])
    return [*map(repr, case.given.get("x", [])), *words]


@pytest.mark.parametrize("case", cases("worked", "field", through="trace"), ids=str)
def test_every_case_comes_out_of_the_command_as_worked_by_hand(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    got = machine(capsys, *arguments(case))
    assert_close(got, case.right, scale=max(map(abs, case.given.get("dy", [0]))))


def test_the_keys_are_the_documented_ones(capsys: pytest.CaptureFixture[str]) -> None:
    keys = [
        "mean",
        "var",
        "xhat",
        "y",
        "normalized_variance",
        "skewness",
        "kurtosis",
        "distinct",
        "dgamma",
        "dbeta",
        "dx",
    ]
    assert list(machine(capsys, *EXAMPLE)) == keys
    extras = [
        "--running-mean",
        "10",
        "--running-var",
        "16",
        "--momentum",
        "0.2",
        "--updates",
        "10",
        "12",
        "8",
    ]
    got = machine(capsys, *EXAMPLE, *extras)
    assert tuple(got) == KEYS
    assert all(key in HELP for key in (*KEYS, *got["update"], *got["after"][0]))
    assert_close(
        got["update"]["weight_of_new"], {"running_mean": 9.0, "running_var": 0.8 * 16 + 0.2 * 20 / 3}
    )
    assert_close(
        got["update"]["weight_of_old"], {"running_mean": 6.0, "running_var": 0.2 * 16 + 0.8 * 20 / 3}
    )
    assert_close([a["running"] for a in got["after"]], [2.0, 4.0, 4.8])
    assert_close({"a": got["a"], "c": got["c"]}, {"a": 0.75, "c": -8.5})


@pytest.mark.parametrize(
    "argv",
    [
        "-1e-3 -2 0.5 4E+1 --dy 1 -2 -3e-1 .5 --beta -1",
        "--dy 1 -2 -3e-1 .5 --beta -1 -1e-3 -2 0.5 4E+1",
        "--beta -1 -1e-3 -2 --dy=1,-2,-3e-1,.5 0.5 4E+1",
        "--dy=1 -2 -3e-1 .5 --beta=-1 -- -1e-3 -2 0.5 4E+1",
        "--beta -1e0 -.001 -2 --dy=1 --dy=-2 --dy=-3e-1,.5 .5 40",
        "-1e-3 --json -2 --dy 1 -2 -- 0.5 4E+1 --dy -3e-1 .5 --beta=-1",
    ],
)
def test_numbers_may_be_negative_and_stand_anywhere(argv: str, capsys: pytest.CaptureFixture[str]) -> None:
    got = machine(capsys, *argv.split())
    first = machine(capsys, *["-0.001", "-2", "0.5", "40", "--beta", "-1", "--dy", "1", "-2", "-0.3", "0.5"])
    assert got == first
    assert_close(got["mean"], 9.62475)
    assert_close(got["dbeta"], -0.8)


def test_numbers_are_printed_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    assert machine(capsys, "0.1", "0.1", "0.1")["mean"] == 0.1
    assert run(["--updates", "10", "12", "8", "--json"]) == 0
    assert "11.052631578947" in capsys.readouterr().out


def test_what_is_not_defined_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    got = machine(capsys, "7", "7", "7")
    assert got["xhat"] == got["y"] == [0, 0, 0]
    assert got["skewness"] is got["kurtosis"] is None
    assert machine(capsys, "18", "--eps", "0", "--running-mean", "10", "--running-var", "16")["xhat"] is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("", "there are no values"),
        ("--json", "there are no values"),
        ("--gamma 3", "no values for --gamma"),
        ("--updates 1 2 --gamma 3", "no values for --gamma"),
        ("1 nan", "nan is given for the values"),
        ("1 -inf", "-inf is given for the values"),
        ("1 2 --gamma 1e999", "inf is given for --gamma"),
        ("1 2 --dy 1 NaN", "nan is given for --dy"),
        ("1 2 three", "'three' is no number"),
        ("1,2", "'1,2' is no number"),
        ("1 2 --dy 1", "dy has length 1; needed: 2"),
        ("1 2 --dy", "--dy is given without a number"),
        ("1 2 --dy --json", "--dy is given without a number"),
        ("1 2 --dy=", "--dy got ''"),
        ("1 2 --dy=1,x", "--dy got 'x'"),
        ("1 2 --gamma=1,2", "--gamma got several numbers"),
        ("1 2 --gamma 1 --gamma 2", "--gamma is given twice"),
        ("1 2 --json=yes", "--json takes no value"),
        ("1 2 --eps -1", "eps is -1"),
        ("2 2 --eps 0", "a variance is 0 and eps is 0"),
        ("1 2 --momentum 1.5", "momentum is 1.5; needed: a weight from 0 to 1"),
        ("1 2 --momentum -0.1", "momentum is -0.1"),
        ("1 --momentum 0.1", "the variance of n = 1"),
        ("1 2 --momentum 0.1 --correction 0.5", "--correction is 0.5"),
        ("1 2 --correction 1", "--correction is given without --momentum"),
        ("1 2 --initial 1", "--initial is given without --updates"),
        ("1 2 --running-mean 1", "--running-mean is given without --running-var"),
        ("1 2 --running-var 1", "--running-var is given without --running-mean"),
        ("1 2 --running-mean 1 --running-var -1", "the running variance is -1"),
        ("1 2 --gama 3", "Perhaps --gamma is meant"),
        ("1 2 --running_mean 3", "Perhaps --running-mean is meant"),
        ("1 2 -x", "there is no option -x"),
        ("1e200 -1e200", "too large for float64"),
        ("--updates 1 --momentum 2", "momentum is 2"),
        ("--html page.html", "no values for --html"),
        ("--updates 1 2 --html page.html", "no values for --html"),
        ("1 2 --norm", "--norm is given without a word"),
        ("1 2 --norm=", "--norm is empty; needed: the name of a norm"),
        ("1 2 --norm --json", "--norm is given without a word"),
        ("1 2 --norm weight", "no norm named 'weight'"),
        ("1 2 --norm layer --norm rms", "--norm is given twice"),
        ("1 2 --norm group --groups 0.5", "--groups is 0.5; needed: a whole number"),
        ("[[1,2]] --norm group --groups 3", "2 channels in 3 groups"),
        ("[[1,2]] --norm layer --axis 5", "different axes that x has"),
        ("[[1,2]] --axis 1", "batch norm is given axes"),
        ("[[1,2]] 3", "the values are given twice"),
        ("3 [[1,2]]", "the values are given twice"),
        ("[1,2] --gamma [1] --gamma 2", "--gamma is given twice"),
        ("[1,2] --weight 1 --gamma 2", "--gamma is given twice"),
        ("[1,2] --dy [1,2] --dy 1", "--dy is given twice"),
        ("[1,2] --dy 1 --dy [1,2]", "--dy is given twice"),
        ("- --dy -", "two arrays are to come from -"),
        ("[1,2] --eps [1]", "--eps is given without a number"),
        ("[1,2] --explain=all", "--explain takes no value"),
        ("[[1,2],[3]]", "item [1] of the argument has 1 value, item [0] 2"),
        ("[[1,2],3]", "item [1] of the argument is a number and item [0] is a list"),
        ("[1,[2]]", "item [1] of the argument is a list and item [0] is a number"),
        ("[1,true]", "item [1] of the argument is true; needed: numbers alone"),
        ("[1,null]", "item [1] of the argument is null"),
        ('[1,"2"]', "item [1] of the argument is the text '2'"),
        ("[1,NaN]", "NaN is among the numbers of the argument"),
        ("[1,-Infinity]", "-Infinity is among the numbers"),
        ("[1,1e999]", "item [1] of the argument is too large for float64"),
        (f"[1,1{'0' * 400}]", "item [1] of the argument is too large for float64"),
        (f"[1,{'1' * 5000}]", "the argument has a number that is too long"),
        ("[1,2", "the argument is no JSON (expecting ',' delimiter at line 1, column 5)"),
        ("[]", "the argument is an empty list"),
        ("[[],[]]", "item [0] of the argument is an empty list"),
        ('{"x":[1]}', "the argument is an object; needed: nested lists of numbers"),
        (f"{'[' * 20}1{']' * 20}", "nested too deeply"),
        (f"{'[' * 100000}", "nested too deeply"),
        ("missing.csv", "there is no file missing.csv"),
        ("/", "/ cannot be read (Is a directory)"),
        ("1 2 --mask 1 0 1", "the mask has shape (3,)"),
        ("[[1,2],[3,4]] --mask [[true,2]]", "other values than true and false"),
        ("[[1,2],[3,4]] --mask [[0,0]]", "leaves no value"),
        ("[[1,2],[3,4]] --dy 1 2", "dy has shape (2,)"),
        ("[[1,2],[3,4]] --gamma [1,2,3]", "gamma has shape (3,)"),
        ("[[1,2],[3,4]] --norm rms --bias 1", "rms norm got a β"),
        ("[[1,2],[3,4]] --norm layer --momentum 0.1", "layer norm is given a momentum"),
        ("[[1,2],[3,4]] --gamma 1 2 3", "gamma has shape (3,)"),
        ("[[1,2],[3,4]] --gamma 1 nan", "nan is given for the values"),
        ("[[1,2],[3,4]] --gamma [1,2] 3", "the values are given twice"),
        ("[[1,2],[3,4]] --eps 1 2", "the values are given twice"),
        ("[[1,2],[3,4]] --gamma 1 --json 2", "the values are given twice"),
        ("1 2 --running-mean=1,2 --running-var 1", "--running-mean got several numbers"),
        ("1 2 --momentum 0.1 --correction -1", "a whole number from 0. Give 1 for PyTorch's store"),
        ("[[1,2],[3,4]] --eps=1,2", "--eps got several numbers"),
        ("1 2 --html /", "is a folder"),
        ("1 2 --html /nowhere/page.html", "which is no folder"),
    ],
)
def test_a_mistake_is_answered_by_one_sentence_and_exit_code_2(
    argv: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(argv.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("normalcy trace: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert printed.err.endswith(".\n")
    assert not any(glued in printed.err for glued in ("..", "?.", "{", "  "))


def test_help_names_every_option_and_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["-h"], ["1", "--help", "nonsense"]):
        assert run(words) == 0
        assert capsys.readouterr().out == HELP
    assert max(map(len, HELP.splitlines())) <= 80
    for option in (*asking.ONE, *asking.MANY, *asking.TEXTS, *asking.FLAGS, *asking.ALIASES):
        assert f"--{option}" in HELP


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_table_shows_every_step_at_any_width(width: int) -> None:
    done = person(
        *EXAMPLE, "--running-mean", "10", "--running-var", "16", "--momentum", "0.1", COLUMNS=str(width)
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= width + 4  # a combining hat is a character without a column
    assert not any(line != line.rstrip() for line in lines)
    assert "\x1b" not in done.stdout
    words = done.stdout.split()
    for number in ("-1.34164", "3.02492", "0.341641", "-0.447214", "1.64", "0.75", "-8.5", "9.5", "5.5"):
        assert number in words
    for formula in ("E[x̂³]/Var^(3/2)", "Σdy·x̂", "β"):
        assert formula in done.stdout


def test_a_long_list_is_cut_in_the_table_and_says_where_it_is_whole(
    capsys: pytest.CaptureFixture[str],
) -> None:
    values = [str(v * v - 7) for v in range(100)]
    assert run(values) == 0
    assert "(100 in all, every one with --json)" in " ".join(capsys.readouterr().out.split())
    assert len(machine(capsys, *values)["xhat"]) == 100


def test_it_runs_in_a_process_of_its_own_whatever_the_encoding() -> None:
    done = person(*EXAMPLE, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert_close(json.loads(done.stdout)["dgamma"], -0.4472135954999579)
    plain = person(*EXAMPLE, PYTHONIOENCODING="ascii")
    assert (plain.returncode, plain.stderr) == (0, "")
    assert "-1.34164" in plain.stdout
    wrong = person("1", "2", "--dy", "1")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "Traceback" not in wrong.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device here")
def test_a_full_device_is_answered_by_one_sentence() -> None:
    with Path("/dev/full").open("w") as full:
        done = person(*EXAMPLE, out=full)
    assert done.returncode == 2
    assert done.stderr.startswith("normalcy trace: the standard output cannot be written (")
    assert done.stderr.count("\n") == 1


GRID_AXES = {
    "grid-layer_over_channels_and_positions": ["--axis", "1", "2"],
    "grid-layer_over_channels": ["--axis=-2"],
    "grid-rms_over_channels": ["--axis", "1"],
}


@pytest.mark.parametrize("way", ["arguments", "files"])
@pytest.mark.parametrize("case", cases("grid", through="trace"), ids=str)
def test_every_array_comes_out_of_the_command_as_worked_by_hand(
    case: Case, way: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--norm", case.given["norm"], "--eps", repr(case.given["eps"]), *GRID_AXES.get(case.id, [])]
    if case.given["groups"]:
        words += ["--groups", str(case.given["groups"])]
    for key, option in {"x": "", "dy": "--dy", "weight": "--weight", "bias": "--bias"}.items():
        if case.given[key] is None:
            continue
        text = json.dumps(case.given[key])
        if way == "files":
            (tmp_path / f"{key}.json").write_text(text, encoding="utf-8")
            text = str(tmp_path / f"{key}.json")
        words += [word for word in (option, text) if word]
    got = machine(capsys, *words)
    named = {"y": got["y"], "dx": got["dx"], "dweight": got["dgamma"], "dbias": got["dbeta"]}
    assert set(case.right) == set(named)
    assert_close(named, case.right)
    assert [key for key in ARRAY_KEYS if key in got] == list(ARRAY_KEYS)
    assert all(key in HELP for key in ARRAY_KEYS)


MATRIX = [[1000.5, -2.25, 3e-3], [1003.25, 7.0, 0.5], [998.0, -1.5, 2.0]]
TABLES = {
    "commas": "1000.5,-2.25,3e-3\n1003.25,7.0,0.5\n998,-1.5,2\n",
    "semicolons": "1000.5;-2.25;3e-3\n1003.25;7.0;0.5\n998;-1.5;2\n",
    "tabs": "1000.5\t-2.25\t3e-3\r\n1003.25\t7.0\t0.5\r\n998\t-1.5\t2",
    "spaces": "1000.5 -2.25  3e-3\n 1003.25 7.0 0.5\n998 -1.5 2\n",
    "names of columns": 'height,"a ""b"", c",x1\n1000.5,-2.25,3e-3\n1003.25,7.0,0.5\n998,-1.5,2\n',
    "quoted": '"1000.5","-2.25","3e-3"\n"1003.25","7.0","0.5"\n"998","-1.5","2"\n',
    "comments and blank lines": "# a, b\n\n1000.5, -2.25, 3e-3\n1003.25, 7.0, 0.5\n\n998, -1.5, 2\n\n",
    "byte order mark": "\ufeff1000.5,-2.25,3e-3\n1003.25,7.0,0.5\n998,-1.5,2\n",
    "JSON": "\ufeff [[1000.5, -2.25, 3e-3], [1003.25, 7.0, 0.5], [998, -1.5, 2]]\n",
}


def saved(array: Any) -> bytes:
    """What numpy.save writes."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def standard_input(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="ascii"))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
@pytest.mark.parametrize("way", ["a .csv file", "a file of no type", "the standard input"])
@pytest.mark.parametrize("text", TABLES.values(), ids=TABLES)
def test_a_matrix_is_read_however_it_is_written(
    text: str,
    way: str,
    encoding: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = (text.lstrip("\ufeff") if encoding == "utf-16" else text).encode(encoding)
    word = "-"
    if way == "the standard input":
        standard_input(monkeypatch, content)
    else:
        is_json = "[" in text
        name = "table" if way == "a file of no type" else "table.json" if is_json else "table.csv"
        (tmp_path / name).write_bytes(content)
        word = str(tmp_path / name)
    assert machine(capsys, word, "--norm", "layer") == json.loads(
        json.dumps(trace(MATRIX, norm="layer").as_dict())
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"  \n\n", "is empty"),
        (b"# nothing\n", "has no line with numbers"),
        (b"1,2\n3\n", "line 2 of NAME has 1 value and line 1 has 2 values; needed: rows of one length"),
        (b"a,b\n\n1,2\n3,4,5\n", "line 4 of NAME has 3 values and line 3 has 2 values"),
        (b"1,2\n3,\n", "line 2, column 2 of NAME is empty; needed: a number"),
        (b"1,2\n3,x\n", "line 2, column 2 of NAME is 'x'"),
        (
            b"1,2\n3,nan\n",
            "line 2, column 2 of NAME is nan; needed: finite numbers. Write 0 there, and mask it",
        ),
        (b"1,2\n3,-inf\n", "line 2, column 2 of NAME is -inf"),
        (b"1,5;2,5\n3;4\n", "line 1, column 1 of NAME is '1,5'; needed: a number. Write a point"),
        (b"1,true\n2,false\n", "line 1, column 2 of NAME is 'true'"),
        (b'1,"2\n3,4\n', "line 1 of NAME is no CSV"),
        (b"a,b\n", "line 1, column 1 of NAME is 'a'"),
        (b"\x93NUMPY\x01\x00v\x00", "NAME is no whole .npy file of numbers"),
        (saved(np.arange(40.0))[:-8], "NAME is no whole .npy file of numbers"),
        (saved(np.arange(3.0)).replace(b"(3,), ", b"(3e9,)"), "NAME is no whole .npy file of numbers"),
        (saved(np.array([1, "a", None], object)), "NAME is no whole .npy file of numbers"),
        (saved(np.array([1 + 2j])), "NAME has values of type complex128; needed: real numbers"),
        (saved(np.array([True, False])), "NAME has values of type bool"),
        (saved(np.float64(7.5)), "NAME has the shape (); needed: at least one number"),
        (saved(np.zeros((0, 3))), "NAME has the shape (0, 3)"),
        (saved(np.array([[7.5, 1], [2, np.nan]])), "item [1, 1] of NAME is not finite"),
        (b"1,2\x00\n3,4\n", "NAME is not text"),
        (bytes(range(256)), "NAME is not text"),
        (b"[[1,2],[3]]", "item [1] of NAME has 1 value, item [0] 2"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("way", ["file", "standard input"])
def test_a_file_that_is_no_array_is_answered_by_one_sentence(
    content: bytes,
    message: str,
    way: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    word = "-"
    if way == "file":
        word = str(tmp_path / "table")
        Path(word).write_bytes(content)
    else:
        standard_input(monkeypatch, content)
    assert run([word]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message.replace("NAME", "the standard input" if word == "-" else word) in printed.err
    assert printed.err.count("\n") == 1
    assert "Traceback" not in printed.err


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="there is no endless device here")
def test_an_endless_or_huge_file_is_refused_before_it_fills_the_memory(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(["/dev/zero"]) == 2
    assert "/dev/zero is larger than 16 MiB; needed: at most 16 MiB" in capsys.readouterr().err
    monkeypatch.setattr(reading, "LARGEST", 2**20)
    (tmp_path / "big.csv").write_text("1.25,2.5\n" * 200_000, encoding="utf-8")
    assert run([str(tmp_path / "big.csv")]) == 2
    assert "is larger than 1 MiB" in capsys.readouterr().err


def test_more_values_than_are_followed_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "big.csv").write_text("1,2\n" * 125_001, encoding="utf-8")
    assert run([str(tmp_path / "big.csv")]) == 2
    assert "there are 250,002 values; needed: at most 250,000" in capsys.readouterr().err


def test_what_may_not_be_read_is_answered_by_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Path, *args: Any, **options: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refused)
    assert run(["table.csv"]) == 2
    assert (
        "table.csv cannot be read (Permission denied); needed: a file that can be read"
        in capsys.readouterr().err
    )
    monkeypatch.setattr(sys, "stdin", None)
    assert run(["-"]) == 2
    assert "the standard input is closed" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--gamma 1 -0.5 2", "--gamma=1,-0.5,2", "--weight [1,-0.5,2]"])
@pytest.mark.parametrize("first", [True, False])
def test_several_numbers_for_an_array_are_one_per_channel_wherever_they_stand(
    words: str, first: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    rest = ["--beta", "3", "-1", "0", "--running-mean=1000,2,1", "--running-var", "4", "9", "1"]
    array = [json.dumps(MATRIX)]
    got = machine(capsys, *array * first, *words.split(), *rest, *array * (not first))
    right = trace(MATRIX, gamma=[1, -0.5, 2], beta=[3, -1, 0], running=([1000, 2, 1], [4, 9, 1]))
    assert got == json.loads(json.dumps(right.as_dict()))


def test_several_numbers_are_one_per_place_of_layer_norm_over_plain_numbers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    got = machine(capsys, "1000", "1002", "1007", "--norm", "layer", "--gamma=1,-2,3")
    assert got == trace([1000, 1002, 1007], norm="layer", gamma=[1, -2, 3]).as_dict()
    # After one number the others are values, as they always were where the values are written out.
    assert machine(capsys, "--gamma", "2", "1000", "1002") == machine(capsys, "1000", "1002", "--gamma", "2")


@pytest.mark.parametrize("way", ["a .npy file", "a file of no type", "the standard input"])
@pytest.mark.parametrize("dtype", ["<f8", ">f4", "<f2", "<i4", "|u1"])
def test_what_numpy_saved_is_read_to_the_last_digit(
    dtype: str,
    way: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = np.asfortranarray(np.random.default_rng(4).uniform(100, 140, (3, 4, 2)).astype(dtype))
    (tmp_path / "mask.npy").write_bytes(saved(x > 110))
    word = "-"
    if way == "the standard input":
        standard_input(monkeypatch, saved(x))
    else:
        word = str(tmp_path / ("x.npy" if way == "a .npy file" else "x"))
        Path(word).write_bytes(saved(x))
    got = machine(capsys, word, "--norm", "instance", "--mask", str(tmp_path / "mask.npy"))
    assert got == json.loads(json.dumps(trace(x, norm="instance", mask=x > 110).as_dict()))


def test_a_name_that_promises_numpy_is_taken_at_its_word(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "x.npy").write_text("1,2\n3,4\n", encoding="utf-8")
    assert run([str(tmp_path / "x.npy")]) == 2
    assert "x.npy is no .npy file; needed: what numpy.save wrote" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["", "--dy", "--mask", "--gamma"])
def test_a_page_is_never_written_over_an_array_that_the_command_reads(
    option: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    x, other = tmp_path / "x.json", tmp_path / "other.json"
    x.write_text(json.dumps(MATRIX), encoding="utf-8")
    other.write_text("[1, 1, 1]" if option == "--gamma" else "[[1, 1, 1], [1, 1, 1], [1, 1, 1]]")
    (tmp_path / "link.html").symlink_to(other if option else x)
    before = x.read_bytes(), other.read_bytes()
    read = [str(x), *([option, str(other)] if option else [])]
    for page in (other if option else x, tmp_path / "link.html"):
        assert run([*read, "--html", str(page)]) == 2
        assert f"is the {option or 'input'} itself; needed: another file" in capsys.readouterr().err
        assert (x.read_bytes(), other.read_bytes()) == before
    assert run([*read, "--html", str(tmp_path / "page.html")]) == 0


def test_masks_and_running_statistics_come_as_arrays_too(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mask = [[True, False, True], [True, True, False], [True, True, True]]
    options = {"running": ([1000.0, 2.0, 1.0], 4.0), "momentum": 0.1, "dy": MATRIX}
    right = json.loads(json.dumps(trace(MATRIX, mask=mask, **options).as_dict()))
    (tmp_path / "mask.csv").write_text("true,FALSE,True\n1,1,0\ntrue,1,true\n", encoding="utf-8")
    rest = [
        "--running-mean",
        "[1000,2,1]",
        "--running-var=4",
        "--momentum",
        "0.1",
        f"--dy={json.dumps(MATRIX)}",
    ]
    for written in (json.dumps(mask), "[[1,0,1],[1,1,0],[1,1,1]]", str(tmp_path / "mask.csv")):
        assert machine(capsys, json.dumps(MATRIX), "--mask", written, *rest) == right
    assert machine(capsys, "2", "4", "6", "1000", "--mask", "1", "1", "1", "0")["mean"] == 4


def test_reasons_are_printed_and_given_to_machines(capsys: pytest.CaptureFixture[str]) -> None:
    plain = machine(capsys, *EXAMPLE)
    got = machine(capsys, *EXAMPLE, "--explain", "--updates", "10", "12")
    made = trace([2, 4, 6, 8], gamma=3, beta=-1, eps=0, dy=[0.1, -0.2, 0.3, -0.4], explain=True).as_dict()
    assert {key: got[key] for key in plain} == plain
    assert {key: why for key, why in got["why"].items() if key != "warm-up"} == made["why"]
    assert run([*EXAMPLE, "--explain"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    for sentences in got["why"].values():
        if sentences != got["why"]["warm-up"]:
            assert all(" ".join(sentence.split()) in printed for sentence in sentences)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_an_array_stays_within_the_screen_and_says_what_it_leaves_out(width: int, tmp_path: Path) -> None:
    rows = [[1000.0 + 0.001 * i * i - 7.5 * c for c in range(40)] for i in range(30)]
    (tmp_path / "x.json").write_text(json.dumps(rows), encoding="utf-8")
    done = person(str(tmp_path / "x.json"), "--explain", "--dy", str(tmp_path / "x.json"), COLUMNS=str(width))
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert max(len(line) - line.count("\u0302") for line in lines) <= width
    joined = " ".join(done.stdout.split())
    assert "12 of 30 rows and" in joined
    cut = re.findall(r"12 of 30 rows and (\d+) of 40 columns; all of them with --json\)", joined)
    labelled = [line.split() for line in lines if line.lstrip().startswith("[")]
    assert [len(words) - 1 for words in labelled] == [int(columns) for columns in cut for _ in range(12)]
    assert min(map(int, cut)) >= (1 if width == 60 else 3)
    assert "[11]" in joined
    assert "[12]" not in joined


def test_a_masked_cell_is_called_so_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["[[1, 2], [3, 5], [4, 9]]", "--mask", "[[1, 0], [1, 1], [1, 1]]", "--explain"]) == 0
    printed = capsys.readouterr().out
    assert len(re.findall(r"^ +\[0\] .* masked$", printed, re.MULTILINE)) == 2  # in x and in what it shares
    assert "Masked: 1 cell;" in printed
    assert "not defined" not in printed


def test_a_page_is_written_and_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "trace.html"
    assert run([json.dumps(MATRIX), "--norm", "layer", "--explain", "--html", str(page)]) == 0
    assert capsys.readouterr().out.endswith(f"\nThe page is in {page}\n")
    text = page.read_text(encoding="utf-8")
    assert "Layer norm" in text
    assert "The mean comes before the variance" in text
    quiet = machine(capsys, json.dumps(MATRIX), "--norm", "layer", f"--html={page}")
    assert quiet == json.loads(json.dumps(trace(MATRIX, norm="layer").as_dict()))
    assert page.read_text(encoding="utf-8") != text
