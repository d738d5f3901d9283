"""How data, objects and other people's exceptions are named in a sentence.

Not for numbers: a report writes those.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

_LONGEST = 300
_MOST_PARTS = 4


def a(noun: object) -> str:
    """Put the article before a noun.

    Example:
        >>> a("dict"), a("int")
        ('a dict', 'an int')
    """
    word = str(noun)
    return f"{'an' if word[:1].lower() in set('aeiou') else 'a'} {word}"


def described(value: object) -> str:
    """Name a value by what matters of it: dtype and shape of tensors, the type of everything else.

    Example:
        >>> import torch
        >>> described((torch.zeros(2, 3), {"y": torch.zeros(2, dtype=torch.int64)}, None))
        '(float32 (2, 3), {y: int64 (2,)}, None)'
    """
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + _listed([f"{key}: {described(part)}" for key, part in value.items()]) + "}"
    if isinstance(value, (tuple, list)):
        marks = "()" if isinstance(value, tuple) else "[]"
        return marks[0] + _listed([described(part) for part in value]) + marks[1]
    return "None" if value is None else a(type(value).__name__)


def raised(error: BaseException) -> str:
    r"""Name an exception by its type and text, on one line of bounded length.

    Example:
        >>> raised(ValueError("one\ntwo"))
        'ValueError: one two'
    """
    try:
        text = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 - an exception of somebody else's may fail even at this
        text = ""
    if len(text) > _LONGEST:
        text = text[:_LONGEST].rstrip() + " …"
    text = text.rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def did(error: BaseException) -> str:
    """Say what somebody else's code did: raised an exception, or asked for the end of the process.

    Example:
        >>> did(KeyError("x")), did(SystemExit(0)), did(SystemExit())
        ("raised KeyError: 'x'", 'called sys.exit(0)', 'called sys.exit()')
    """
    if isinstance(error, SystemExit):
        code = "" if error.code is None else " ".join(repr(error.code).split())
        return f"called sys.exit({code[:_LONGEST]})"
    return f"raised {raised(error)}"


def _listed(parts: list[str]) -> str:
    more = [f"… {len(parts) - _MOST_PARTS} more"] if len(parts) > _MOST_PARTS else []
    return ", ".join(parts[:_MOST_PARTS] + more)
