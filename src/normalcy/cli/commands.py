"""The commands as Typer knows them: help, version, options and their mistakes.

Not for `trace` itself, which reads its own numbers; it stands here for `--help`.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from normalcy.cli import INTERRUPTED
from normalcy.cli.doctor import doctor
from normalcy.errors import ArgumentError

app = typer.Typer(
    name="normalcy",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(doctor)

# The base of every mistake that Typer finds; where it lives changed between Typer's versions.
_Mistake: type[Exception] = next(
    base
    for base in typer.BadParameter.__mro__
    if base.__name__ == "ClickException" and issubclass(base, Exception)
)


@app.callback(invoke_without_command=True)
def normalcy(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Show the version and leave.")] = False,
) -> None:
    """Normalization for neural networks that is fast, exact and honest about its statistics."""
    if show_version:
        import normalcy  # noqa: PLC0415 - only to say its version

        typer.echo(f"normalcy {normalcy.__version__}")
        raise typer.Exit(0)
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@app.command(
    add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_extra_args": True}
)
def trace() -> None:
    """Normalize a few numbers, step by step, with every number shown."""


def run(argv: list[str]) -> int:
    """Run the command named in `argv` and return its exit code.

    Raises:
        ArgumentError: an option or a value that there is not.
    """
    try:
        result: Any = app(args=argv, prog_name="normalcy", standalone_mode=False)
    except typer.Abort as error:
        raise KeyboardInterrupt from error
    except _Mistake as error:
        text = " ".join(str(getattr(error, "format_message", error.__str__)()).split())
        command = next((word for word in argv if not word.startswith("-")), "")
        names = [found.name or getattr(found.callback, "__name__", "") for found in app.registered_commands]
        which = f"normalcy {command}" if command in names else "normalcy"
        text = text.replace("Value error, ", "")  # the words of the library below Typer
        raise ArgumentError(text[:1].lower() + text[1:], do=f"see {which} --help") from error
    if result == INTERRUPTED:  # Typer turns Ctrl-C into this
        raise KeyboardInterrupt
    return result if isinstance(result, int) else 0
