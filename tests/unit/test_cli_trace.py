"""`normalcy trace` as a person and as a machine use it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from golden.cases import Case, assert_close, cases

from normalcy.cli.trace import _MANY, _ONE, HELP, run
from normalcy.trace import KEYS

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
    code = "import sys; from normalcy.cli.trace import run; sys.exit(run(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", code, *argv],
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
    for option in (*_ONE, *_MANY, "json"):
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
    assert done.stderr.startswith("normalcy trace: the result cannot be written: ")
    assert done.stderr.count("\n") == 1
