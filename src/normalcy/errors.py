"""Every exception of the library: what was given, what is needed, what to do.

Not the place for warnings or for findings of the doctor.
"""

from __future__ import annotations


class NormalcyError(Exception):
    """Base of every error raised on purpose.

    The text is one or two sentences for the person who made the mistake: what was given, what is
    needed, and what to do. It contains no line break, so that a command can print it as it is.

    Example:
        >>> str(ShapeError("x has 3 channels", "4 channels, as the layer was built", "check the layout"))
        'x has 3 channels; needed: 4 channels, as the layer was built. Check the layout.'
    """

    def __init__(self, given: str, needed: str = "", do: str = "") -> None:
        self.given, self.needed, self.do = given, needed, do
        text = f"{given.rstrip('.')}; needed: {needed}" if needed else given
        sentences = [text, f"{do[:1].upper()}{do[1:]}"] if do else [text]
        super().__init__(" ".join(_ended(" ".join(sentence.split())) for sentence in sentences))

    def __reduce__(self) -> tuple[type[NormalcyError], tuple[str, str, str]]:
        return type(self), (self.given, self.needed, self.do)


def _ended(sentence: str) -> str:
    return sentence if sentence.endswith(("?", "!")) else sentence.rstrip(".") + "."


class ShapeError(NormalcyError, ValueError, RuntimeError):
    """A shape does not fit. Both a ValueError and a RuntimeError, as PyTorch's layers raise either."""


class TooFewValuesError(ShapeError):
    """A statistic would be computed from one value, in training; nothing was changed."""


class TypeMismatchError(NormalcyError, TypeError, RuntimeError):
    """A dtype or a kind of object does not fit."""


class ArgumentError(NormalcyError, ValueError):
    """An argument's value does not fit, or two arguments contradict one another."""


class TargetError(NormalcyError):
    """What was named for examination cannot be loaded or called."""


class DataError(NormalcyError, ValueError):
    """The data given cannot be used: wrong shape, not finite, or none at all."""


class OutputError(NormalcyError, OSError):
    """A result cannot be written; what stood there before stands there still."""


class ProofError(NormalcyError):
    """Nothing can be proved about a model, and nothing was changed."""


class MissingExtraError(NormalcyError, ImportError):
    """An optional dependency is needed and not installed."""
