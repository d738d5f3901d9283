"""A checkup for a person at a terminal, or in a file: the values of the JSON, nothing computed.

Not for HTML: pages draw that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import StringIO
from typing import Any, Final

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

SEVERITIES: Final = ("note", "warning", "error")
_COLOURS: Final = {"error": "bold red", "warning": "yellow", "note": "cyan"}
_WIDEST = 100
_MOST_PLACES = 12
_MOST_TEXTS = 3
_EXPLAINED: Final = ("cause", "remedy")

Line = tuple[int, Text]


def rendered(checkup: Mapping[str, Any], *, width: int, colour: bool) -> str:
    """Give a checkup as text, at most 100 columns wide; lines are wrapped, never cut off.

    Example:
        >>> empty = {"findings": [], "sites": [], "unrecognized": [], "not_seen": [], "loss": None}
        >>> made = {"target": "model.py:make", "model": {"class": "Net", "parameters": 12, "norms": 0},
        ...         "before": empty, "after": None, "repair": None, "fold": None, "baselines": None,
        ...         "proved": None}
        >>> print(rendered(made, width=80, colour=False).splitlines()[0])
        model.py:make: Net, 12 parameters, 0 normalization layers
    """
    lines = [*_lines(_printable(checkup)), *_neighbours(checkup["before"]["sites"])]
    return printed(lines, width=width, colour=colour)


def printed(lines: Iterable[Line], *, width: int, colour: bool) -> str:
    """Give lines as text, at most 100 columns wide; they are wrapped, never cut off.

    Example:
        >>> print(printed([(2, Text("eight words that do not fit into width"))], width=20, colour=False))
          eight words that
          do not fit into
          width
        <BLANKLINE>
    """
    out = StringIO()
    console = Console(
        file=out,
        width=max(20, min(width, _WIDEST)),
        force_terminal=colour,
        color_system="standard" if colour else None,
        highlight=False,
        markup=False,
        emoji=False,
        legacy_windows=False,
    )
    for indent, line in lines:
        line.overflow = "fold"
        console.print(Padding(line, (0, 0, 0, indent)) if indent else line)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def number(value: object) -> str:
    """Write one value of the JSON for a terminal: four significant digits, words as they are.

    Example:
        >>> [number(v) for v in (None, 12345, 2.61049, 1.25e-7, "inf", True)]
        ['unknown', '12,345', '2.61', '1.25e-07', 'inf', 'yes']
    """
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def plain(text: str) -> str:
    r"""Give a text on one line, with signs that would steer a terminal or turn its direction as escapes.

    Example:
        >>> plain("net.\x1b[2J\nnorm")
        'net.\\x1b[2J norm'
    """
    spaced = " ".join(text.split("\n"))
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in spaced)


def _printable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_printable(key): _printable(item) for key, item in value.items() if key != "sites"}
    if isinstance(value, (list, tuple)):
        return [_printable(item) for item in value]
    return plain(value) if isinstance(value, str) else value


def _lines(checkup: Mapping[str, Any]) -> Iterator[Line]:
    model, before, after = checkup["model"], checkup["before"], checkup["after"]
    layers = _counted(model["norms"], "normalization layer")
    yield (
        0,
        Text(f"{checkup['target']}: {model['class']}, {number(model['parameters'])} parameters, {layers}"),
    )
    yield 0, _verdict(checkup)
    yield from _losses(checkup)
    title = "Found before the repair" if after is not None else "Found"
    yield from _examination(before, title)
    yield from _repair(checkup["repair"])
    if after is not None:
        yield from _examination(after, "Found after the repair", before)
    yield from _fold(checkup["fold"])
    for note in checkup.get("notes") or ():
        yield 0, Text()
        yield 0, Text(note)


def _verdict(checkup: Mapping[str, Any]) -> Text:
    before, after = checkup["before"], checkup["after"]
    if checkup["proved"] is False:
        return Text("A change could not be proved equal; it was taken back, and is named below.", "bold red")
    if not checkup["model"]["norms"]:
        others = " that is known" if before["unrecognized"] or before["not_seen"] else ""
        return Text(f"There is no normalization layer{others}: nothing to examine.", "bold")
    found = before if after is None else after
    left = _tally(found["findings"])
    if after is None:
        said = "in its weights; mode, wiring and data were not seen" if "checkpoint" in checkup else ""
        return (
            Text(f"Found: {left}.", "bold")
            if left
            else Text(f"No finding{f' {said}' if said else ': its normalization is in order'}.", "bold green")
        )
    was = _tally(before["findings"])
    if not was:
        return Text("No finding: there was nothing to repair.", "bold green")
    return Text(f"Found: {was}. After the repair: {left or 'none'}.", "bold" if left else "bold green")


def _tally(findings: Sequence[Mapping[str, Any]]) -> str:
    counts = {severity: sum(f["severity"] == severity for f in findings) for severity in reversed(SEVERITIES)}
    return ", ".join(_counted(count, severity) for severity, count in counts.items() if count)


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _losses(checkup: Mapping[str, Any]) -> Iterator[Line]:
    rows: list[tuple[str, object]] = list((checkup["baselines"] or {}).items())
    for when, key in (("before", "before"), ("after the repair", "after")):
        loss = (checkup[key] or {}).get("loss")
        if loss:
            only = "" if checkup["after"] is None else f", {when}"
            rows.append((f"evaluation{only}", loss["eval"]))
            rows.append((f"with batch statistics{only}", loss["batch"]))
    if not rows:
        return
    yield from heading("Loss (nats per character)" if checkup["baselines"] else "Loss")
    wide = max(len(name) for name, _ in rows)
    for name, value in rows:
        digits = f"{value:.4f}" if isinstance(value, float) else number(value)
        yield 2, Text(f"{name:<{wide}}  {digits:>8}")


def _examination(
    found: Mapping[str, Any], title: str, before: Mapping[str, Any] | None = None
) -> Iterator[Line]:
    yield from heading(title)
    if not found["findings"]:
        yield 2, Text("nothing")
    told = {finding[name] for finding in (before or {"findings": ()})["findings"] for name in _EXPLAINED}
    for group in grouped(found["findings"]):
        yield from finding_lines(group, told)
    if before is None:
        yield from _places("Not recognized", found["unrecognized"])
        yield from _places("Not seen in the recorded pass", found["not_seen"])
    for note in found.get("notes") or ():
        yield 2, Text(note)


def grouped(findings: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Findings of one kind together, the most severe kinds first."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for finding in sorted(findings, key=lambda f: -SEVERITIES.index(f["severity"])):
        groups.setdefault((finding["severity"], finding["code"]), []).append(finding)
    return list(groups.values())


def finding_lines(group: Sequence[Mapping[str, Any]], told: set[str]) -> Iterator[Line]:
    """One kind of finding: each place with its evidence; what was `told` before is not said again."""
    first = group[0]
    severity = first["severity"]
    yield (
        2,
        Text.assemble((severity, _COLOURS[severity]), "  ", (first["code"], "bold"), f"  {first['title']}"),
    )
    for finding in group[:_MOST_PLACES]:
        evidence = ", ".join(f"{name} {number(value)}" for name, value in finding["evidence"].items())
        yield (
            4,
            Text.assemble(
                (f"{finding['where'] or 'the model'}", "bold"), f": {evidence}" if evidence else ""
            ),
        )
    if len(group) > _MOST_PLACES:
        yield 4, Text(f"and {len(group) - _MOST_PLACES} more places; --json and --html have them all")
    for name in _EXPLAINED:
        texts = [text for text in dict.fromkeys(finding[name] for finding in group) if text not in told]
        for text in texts[:_MOST_TEXTS]:
            yield 4, Text.assemble((f"{name}: ", "dim"), text)
        if len(texts) > _MOST_TEXTS:
            yield 4, Text(f"and {len(texts) - _MOST_TEXTS} more, which --json and --html have")
        told.update(texts)


def _repair(repair: Mapping[str, Any] | None) -> Iterator[Line]:
    if repair is None:
        return
    yield from heading("Repaired")
    if not repair["done"] and not repair["refused"]:
        yield 2, Text("nothing: there was nothing that a repair could cure")
    for key, word in (("done", ""), ("refused", "refused: ")):
        for item in repair[key][:_MOST_PLACES]:
            place = item["where"] or "the model"
            yield (
                2,
                Text.assemble(
                    word, f"{item['what'].replace('_', ' ')}  ", (place, "bold"), f": {item['why']}"
                ),
            )
        if len(repair[key]) > _MOST_PLACES:
            yield 2, Text(f"and {len(repair[key]) - _MOST_PLACES} more {key}")


def _fold(fold: Mapping[str, Any] | None) -> Iterator[Line]:
    if fold is None:
        return
    yield from heading("Folded for inference (a copy)")
    if not fold["done"] and not fold["refused"]:
        yield 2, Text("nothing: there is no batch norm to fold")
    yield from _items(fold["done"])
    if fold["refused"]:
        yield 2, Text("refused:")
        yield from _items(fold["refused"], 4)
    if fold["proved"] is False:
        yield 2, Text("NOT all could be proved equal; what could not was taken back", "bold red")
    if fold["done"]:
        parts = f": error {number(fold['error'])}, bound {number(fold['bound'])}"
        if fold["model_error"] is not None:
            whole, bound = number(fold["model_error"]), number(fold["model_bound"])
            parts += f"; whole model in float64: {whole}, bound {bound}"
        yield 2, Text.assemble(("proved equal", "green"), parts)
    for note in fold["notes"]:
        yield 2, Text(note)


def _neighbours(sites: Sequence[Mapping[str, Any]]) -> Iterator[Line]:
    """How much one example's x̂ varies with its neighbours, where that was measured."""
    measured = [(site["where"], found) for site in sites if (found := site.get("neighbours"))]
    if not measured:
        return
    yield from heading("One example and its neighbours in the batch")
    said = "In training its x̂ varies with them by so many standard deviations; in evaluation not at all."
    yield 2, Text(said)
    for where, found in sorted(measured, key=lambda row: -row[1]["noise"])[:_MOST_PLACES]:
        few = found["curve"][0]
        other = f"; at batch {few['batch']}: {number(few['noise'])}" if few["batch"] != found["batch"] else ""
        here = f": {number(found['noise'])} at batch {number(found['batch'])}{other}"
        yield 2, Text.assemble((plain(where) or "the model", "bold"), here)
    if len(measured) > _MOST_PLACES:
        yield 2, Text(f"and {len(measured) - _MOST_PLACES} more layers; --json has them all")


def _places(title: str, items: Sequence[Mapping[str, str]]) -> Iterator[Line]:
    if items:
        yield 2, Text(f"{title}:")
        yield from _items(items, 4)


def _items(items: Sequence[Mapping[str, str]], indent: int = 2) -> Iterator[Line]:
    for item in items[:_MOST_PLACES]:
        yield indent, Text.assemble((item["where"] or "the model", "bold"), f": {item['why']}")
    if len(items) > _MOST_PLACES:
        yield indent, Text(f"and {len(items) - _MOST_PLACES} more; --json and --html have them all")


def heading(text: str) -> Iterator[Line]:
    """An empty line and a title."""
    yield 0, Text()
    yield 0, Text(text, "bold underline")
