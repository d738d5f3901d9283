"""What the words after `normalcy trace` ask for.

Not for other commands: it parses its own numbers, because values may be negative and come in any order.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from normalcy.cli.trace import reading
from normalcy.errors import ArgumentError

ARRAYS: Final = ("gamma", "beta", "dy", "mask", "running-mean", "running-var")
ONE: Final = (
    *("gamma", "beta", "eps", "groups"),
    *("running-mean", "running-var", "momentum", "correction", "initial"),
)
MANY: Final = ("dy", "mask", "axis", "updates")
TEXTS: Final = ("norm", "html")
FLAGS: Final = ("json", "explain", "help")
ALIASES: Final = {"weight": "gamma", "bias": "beta"}
_OPTIONS: Final = tuple(dict.fromkeys((*ONE, *MANY, *TEXTS, *FLAGS, *ALIASES)))


@dataclass(slots=True)
class Asked:
    """What the command line says, by option; the values are under ""."""

    numbers: dict[str, list[float]] = field(default_factory=lambda: {"": []})
    sources: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    flags: set[str] = field(default_factory=set)

    def __contains__(self, name: str) -> bool:
        return name in self.numbers or name in self.sources or name in self.texts

    def one(self, name: str) -> float | None:
        """The number of an option, or None."""
        return self.numbers[name][0] if name in self.numbers else None

    def or_else(self, name: str, default: float) -> float:
        """The number of an option, or what it is without."""
        given = self.one(name)
        return default if given is None else given

    def array(self, name: str) -> reading.Nested | float | None:
        """An option's array, its numbers, its one number, or None."""
        if name in self.sources:
            return reading.read(self.sources[name], truths=name == "mask")
        given = self.numbers.get(name)
        return given[0] if given is not None and len(given) == 1 and name in ONE else given

    def whole(self, name: str, lowest: int | None = None, do: str = "") -> list[int] | None:
        """The numbers of an option, as whole ones; `do` is the advice where they are not."""
        given = self.numbers.get(name)
        for number in given or ():
            if number != int(number) or (lowest is not None and number < lowest):
                needed = "a whole number" if lowest is None else f"a whole number from {lowest}"
                raise ArgumentError(f"--{name} is {number:g}", needed, do)
        return None if given is None else [int(number) for number in given]


def parse(argv: Sequence[str]) -> Asked:
    """Read the arguments: an option takes the word after it, a list every number up to the next option.

    Where the values are one array, no number is a value: all that follow γ, say, are one per channel.

    Raises:
        ArgumentError: a word fits nowhere, or an option is given twice or without what it needs.
    """
    asked = Asked()
    taker, just_named = "", False  # whose word comes next ("" is the values), and whether it is the first
    before, loose = "", list[tuple[str, float]]()  # the array whose one number is there; what follows such
    for word in argv:
        number = _number(word)
        if taker in TEXTS and not word.startswith("--"):
            _text(asked, taker, word)
            taker = ""
        elif number is not None and not taker:
            loose.append((before, _within(number, "the values")))
        elif number is not None:
            _take(asked, taker, number)
            before = taker if taker in ARRAYS else ""
            taker = taker if taker in MANY else ""
        elif reading.is_source(word) and (taker in ARRAYS or not just_named):
            _source(asked, taker if just_named else "", word)
            taker = before = ""
        else:
            _not_waiting(asked, taker)
            taker = _word(asked, word)
            just_named, before = bool(taker) and "=" not in word, ""
            continue
        just_named = False
    _not_waiting(asked, taker)
    for name, number in loose:
        _take(asked, name if "" in asked.sources else "", number, more=True)
    if list(asked.sources.values()).count("-") > 1:
        raise ArgumentError("two arrays are to come from -", "one on the standard input", "name files")
    return asked


def _word(asked: Asked, word: str) -> str:
    if word == "--":
        return ""
    if word.startswith("-"):
        return _option(asked, word)
    needed = "numbers, an array as JSON or in a file, and options that begin with --"
    raise ArgumentError(f"{word[:60]!r} is no number", needed, "see --help")


def _option(asked: Asked, word: str) -> str:
    """Read one option, with what follows its "=" where there is one; return who takes the next word."""
    name, equals, inline = word.removeprefix("--").partition("=")
    if not word.startswith("--") or name not in _OPTIONS:
        close = difflib.get_close_matches(name.lstrip("-").replace("_", "-"), _OPTIONS, n=1)
        do = f"perhaps --{close[0]} is meant" if close else "see --help"
        raise ArgumentError(f"there is no option {word.partition('=')[0]}", "", do)
    name = ALIASES.get(name, name)
    if name in FLAGS:
        if equals:
            raise ArgumentError(f"--{name} takes no value and got {inline!r}", f"--{name} alone")
        asked.flags.add(name)
        return ""
    if name in asked and (name not in MANY or name in asked.sources):
        raise ArgumentError(f"--{name} is given twice", _needed(name), "leave one out")
    if not equals:
        if name not in TEXTS:
            asked.numbers.setdefault(name, [])
        return name
    if name in TEXTS:
        _text(asked, name, inline)
        return ""
    if name in ARRAYS and reading.is_source(inline):
        _source(asked, name, inline)
        return ""
    return _inline(asked, name, inline.split(","))


def _inline(asked: Asked, name: str, parts: Sequence[str]) -> str:
    asked.numbers.setdefault(name, [])
    for part in parts:
        number = _number(part)
        if number is None:
            raise ArgumentError(f"--{name} got {part!r}", "a number", "write it with digits, as in -1e-3")
        _take(asked, name, number, more=name in ARRAYS)
    return name if name in MANY and len(parts) == 1 else ""


def _take(asked: Asked, name: str, number: float, *, more: bool = False) -> None:
    where = f"--{name}" if name else "the values"
    _within(number, where)
    if name in asked.sources:
        raise _either(where)
    if name in ONE and asked.numbers[name] and not more:
        raise several(name)
    asked.numbers[name].append(number)


def _within(number: float, where: str) -> float:
    if math.isfinite(number):
        return number
    raise ArgumentError(f"{number} is given for {where}", "finite numbers", "take it out")


def several(name: str) -> ArgumentError:
    """The sentence for numbers where there is room for one."""
    return ArgumentError(f"--{name} got several numbers", "one number", "leave the others out")


def _source(asked: Asked, name: str, word: str) -> None:
    where = f"--{name}" if name else "the values"
    if asked.numbers.pop(name, None) or name in asked.sources:
        raise _either(where)
    asked.sources[name] = word


def _either(where: str) -> ArgumentError:
    given = f"{where} {'is' if where.startswith('--') else 'are'} given twice, as an array and beside it"
    return ArgumentError(given, "one array, or numbers", "leave one out")


def _text(asked: Asked, name: str, word: str) -> None:
    if not word:
        raise ArgumentError(f"--{name} is empty", _needed(name))
    asked.texts[name] = word


def _not_waiting(asked: Asked, taker: str) -> None:
    if not taker or asked.numbers.get(taker) or taker in asked.sources:
        return
    if taker in TEXTS:
        raise ArgumentError(f"--{taker} is given without a word", f"{_needed(taker)} after it", "see --help")
    raise ArgumentError(f"--{taker} is given without a number", "a number after it", "see --help")


def _needed(name: str) -> str:
    return {"norm": "the name of a norm", "html": "the name of a file"}.get(name, "one number")


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
