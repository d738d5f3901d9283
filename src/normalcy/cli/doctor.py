"""`normalcy doctor`: parse, call the checkup, render, and say by exit code how it went.

Not for programs: they call `normalcy.doctor.examine` or `normalcy.checkup.run`.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

from normalcy.cli import render, variants, writing
from normalcy.errors import ArgumentError

if TYPE_CHECKING:
    from normalcy.measure import Progress


class FailOn(StrEnum):
    """The least severe finding that makes the exit code 1."""

    never = "never"
    error = "error"
    warning = "warning"
    note = "note"


def doctor(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[TARGET]",
            help="file.py:callable or package.module:callable, giving a module or a normalcy.Case; or a "
            "checkpoint (.safetensors, .pt), of which the weights alone are examined. "
            "Without it: an embedded example, trained on the spot.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:CALLABLE", help="What gives the data: one batch, or batches.", show_default=False
        ),
    ] = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Repair what can be repaired, and examine again.")
    ] = False,
    fold: Annotated[
        bool | None,
        typer.Option(
            "--fold/--no-fold",
            help="Fold a copy for inference and prove it equal [default: fold].",
            show_default=False,
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a report page.", show_default=False)
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --fix: write the repaired state dict; it loads into the model as it was built.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
    fail_on: Annotated[
        FailOn, typer.Option(help="Exit with 1 if a finding at least this severe remains.")
    ] = FailOn.error,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the embedded example [default: 0].", show_default=False)
    ] = None,
    norm: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NORM",
            help="Train the embedded example with other norms over three seeds and compare held-out losses: "
            "none, batch, layer, group, rms or all; several with commas, or the option again.",
            show_default=False,
        ),
    ] = None,
    place: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PLACE",
            help="With --norm: before or after the activation, or all [default: before].",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(help="With --norm: examples in a batch [default: 128].", show_default=False),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="With --norm: training steps [default: 300].", show_default=False)
    ] = None,
) -> int:
    """Examine a model's normalization; repair, fold and prove it; leave a report.

    With --norm, --place, --batch or --steps it compares variants of the embedded example instead: half a
    minute for each on two processors.

    Exit code: 0 nothing found at or above --fail-on, 1 something found or a proof failed, 2 the command or
    what it names cannot be used, 130 interrupted.
    """
    others = {"a TARGET": target is not None, "--data": data is not None, "--fix": fix}
    others |= {"--save": save is not None, "--fold or --no-fold": fold is not None}
    asked = variants.asked(norm or (), place or (), batch, steps, without=others)
    _contradictions(target, data, seed, save, fix=fix)
    writing.apart({"--html": html, "--save": save}, {"TARGET": target, "data": data})
    if save is not None:
        writing.check(save)
    if html is not None:
        from normalcy import pages  # noqa: PLC0415 - needs an optional dependency

        pages.require()
        writing.check(html)
    with contextlib.ExitStack() as stack:
        stack.enter_context(writing.reserved_stdout())  # what the target prints is no part of the report
        progress = stack.enter_context(_progress())
        if asked:
            checkup = asked.compared(seed or 0, progress)
        else:
            checkup = _checkup(target, data, seed or 0, fix, fold, progress)
        made = checkup.as_dict()
        page = "" if html is None else (pages.render_variants if asked else pages.render_checkup)(made)
    if html is not None:
        with writing.atomic(html) as file:
            file.write(page)
    if save is not None:
        with writing.atomic(save) as file:
            file.buffer.write(_saved(checkup))  # a text file's own buffer takes bytes
    if as_json:
        writing.write_out(json.dumps(made, indent=2, allow_nan=False) + "\n")
    else:
        console = Console(file=writing.standard_output())
        colour = console.is_terminal and not console.no_color
        text = (variants if asked else render).rendered(made, width=console.width, colour=colour)
        writing.write_out(text + _written(html, save))
    return code_of(checkup.worst(), proved=checkup.proved, fail_on=fail_on)


def _contradictions(
    target: str | None, data: str | None, seed: int | None, save: Path | None, *, fix: bool
) -> None:
    if target is None and data is not None:
        raise ArgumentError("--data without a TARGET", "a model for the data", "name it as file.py:callable")
    if target is not None and seed is not None:
        raise ArgumentError(
            "--seed with a TARGET", "the embedded example for it", "set seeds in your own function"
        )
    if save is not None and not fix:
        raise ArgumentError("--save without --fix", "something repaired to save", "add --fix")


def _written(html: Path | None, save: Path | None) -> str:
    said = [f"The report is in {html}"] if html is not None else []
    said += [f"The repaired weights are in {save}"] if save is not None else []
    return "".join(f"\n{line}\n" for line in said)


def _saved(checkup: Any) -> bytes:
    import torch  # noqa: PLC0415 - as below

    file = io.BytesIO()
    torch.save(checkup.state(), file)
    return file.getvalue()


def _checkup(
    target: str | None,
    data: str | None,
    seed: int,
    fix: bool,
    fold: bool | None,
    progress: Progress,
) -> Any:
    from normalcy import case, checkpoint, checkup  # noqa: PLC0415 - the whole library; help comes without it

    if target is not None and checkpoint.named(target):
        from normalcy.checkup import checkpoint as alone  # noqa: PLC0415 - as above

        alone.refuse({"--fix": fix, "--fold": fold is True, "--data": data is not None})
        return alone.examined(target)
    if target is None:
        made, further = checkup.embedded(seed, progress)
    else:
        made, further = case.load(target, data), {"target": target}
    return checkup.run(made, fix=fix, folding=fold is not False, progress=progress, **further)


def code_of(worst: str | None, *, proved: bool | None, fail_on: FailOn) -> int:
    """The exit code: 1 for a failed proof, or a finding that is as severe as `fail_on` or more; else 0."""
    if proved is False:
        return 1
    if worst is None or fail_on is FailOn.never:
        return 0
    return int(render.SEVERITIES.index(worst) >= render.SEVERITIES.index(fail_on.value))


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    """Bars on the standard error where it is a terminal; one line for each kind of work where it is none."""
    console = Console(stderr=True, highlight=False, markup=False)
    if not console.is_terminal:
        last = ""

        def line(what: str, _done: int, of: int | None) -> None:
            nonlocal last
            if what != last:
                print(f"{what}{f' ({of:,})' if of else ''} …", file=sys.stderr)
            last = what

        yield line
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=console, transient=True) as bars:
        tasks: dict[str, Any] = {}

        def bar(what: str, done: int, of: int | None) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=of)
            bars.update(tasks[what], completed=done, total=of)

        yield bar
