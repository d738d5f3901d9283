"""One look for every page: the template environment, the style sheet and what makes a page safe to embed in.

Not for anything about models: a page is given finished values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cache
from importlib import resources

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from normalcy.pages.numbers import lookup, number

MOST_EMBEDDED = 1_000_000
_LISTED = ("before", "stored", "batch")
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def render(template: str, **context: object) -> str:
    """Render one template of this package, with the style sheet inlined and every text escaped.

    Example:
        >>> "&lt;b&gt;" in render("base.html", title="<b>")
        True
    """
    style = resources.files(__package__).joinpath("style.css").read_text("utf-8")
    page = _environment().get_template(template).render(style=Markup(style), **context)  # noqa: S704 - our own file
    return page.encode("utf-8", "replace").decode("utf-8")  # a lone surrogate could not be written to a file


def shown(checkup: Mapping[str, object], address: str, tag: str = "span") -> Markup:
    """Write one value of a checkup as HTML that says where it came from.

    Example:
        >>> shown({"loss": {"eval": 2.61049}}, "loss.eval")
        Markup('<span data-json="loss.eval">2.61</span>')
    """
    return Markup('<{0} data-json="{1}">{2}</{0}>').format(tag, address, number(lookup(checkup, address)))


def embedded(checkup: Mapping[str, object]) -> tuple[Markup, bool]:
    r"""Write a checkup as JSON that no markup can end, and say whether it is the whole of it.

    It is, up to a million characters. Beyond that the lists that are only drawn are left empty: sampled
    activations (`before`, `stored` and `batch` of a `sample`) and `warmup`. No number shown is among them.

    Example:
        >>> embedded({"where": "</script>"})
        (Markup('{"where":"\\u003c/script\\u003e"}'), True)
    """
    text = _json(checkup)
    whole = len(text) <= MOST_EMBEDDED
    if not whole:
        text = _json(_without_lists(checkup))
    for sign, escape in _ESCAPES.items():
        text = text.replace(sign, escape)
    return Markup(text), whole  # noqa: S704 - the three signs that could end the element are escaped


def _json(value: object) -> str:
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(_spelled(value), separators=(",", ":"), allow_nan=False)


def _spelled(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _spelled(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spelled(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _without_lists(value: object, inside: str = "") -> object:
    if isinstance(value, Mapping):
        drawn = {"sample": _LISTED, "sites": ("warmup",)}.get(inside, ())
        return {
            key: [] if key in drawn and item else _without_lists(item, key) for key, item in value.items()
        }
    return [_without_lists(item, inside) for item in value] if isinstance(value, list) else value


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("normalcy", "pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
