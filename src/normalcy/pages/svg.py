"""From an Altair chart to the SVG that a page holds: small, in the page's colours, readable aloud.

Not for files: an SVG on its own needs the namespace and the colours that are left to the page here.
"""

from __future__ import annotations

import importlib
import unicodedata
from types import ModuleType
from typing import Any
from xml.etree import ElementTree as ET

from markupsafe import Markup

from normalcy.errors import MissingExtraError

BEFORE, AFTER, BATCH = "#c2501a", "#1f6fb2", "#12836a"
INK, MUTED, RULE, QUIET = "#1c2430", "#5b6672", "#dfe3e8", "#7b8591"
COLOURS = (BEFORE, AFTER, BATCH, INK, MUTED, RULE, QUIET)
WIDTH = 400
# signs that would turn the rest of a line around
_TURNS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_DROPPED = {"class", "role", "pointer-events", "font-family", "stroke-miterlimit"}


def require() -> None:
    """See that charts can be drawn, before long work starts.

    Raises:
        MissingExtraError: Altair or vl-convert is not installed.

    Example:
        >>> require()
    """
    altair()


def altair() -> ModuleType:
    """Import Altair only when a chart is drawn, or say which package is missing."""
    try:
        importlib.import_module("vl_convert")
        return importlib.import_module("altair")
    except ImportError as missing:
        raise MissingExtraError(
            f"the HTML page needs {missing.name or 'altair'} for its charts, and it is not installed",
            do="pip install 'normalcy[report]'",
        ) from None


def inline(chart: Any, height: float, says: str) -> Markup:
    """Give a chart as SVG to put into a page; `says` is what a screen reader reads in its place."""
    quiet = {"labelColor": MUTED, "titleColor": MUTED, "labelFontSize": 12, "titleFontSize": 12}
    chart = chart.properties(width=WIDTH, height=height, autosize={"type": "fit-x", "contains": "padding"})
    chart = chart.configure(background="transparent", font="sans-serif", padding=2)
    chart = chart.configure_axis(
        gridColor=RULE, domain=False, tickColor=RULE, titleFontWeight="normal", tickCount=5, **quiet
    ).configure_view(stroke=None)
    spec = chart.to_dict(validate=False)  # checking it against the schema takes longer than drawing
    version = ".".join(str(spec["$schema"]).rpartition("/v")[2].split(".")[:2])
    return _tidy(importlib.import_module("vl_convert").vegalite_to_svg(spec, vl_version=version), says)


def printable(text: str, most: int = 52) -> str:
    """Make any text safe to draw and at most so long, keeping its end (the telling part of a path).

    The converter ends the whole process on a character that XML does not know, so those are replaced.

    Example:
        >>> printable("encoder.layers.11.attention.norm", 16)
        '….attention.norm'
    """
    clean = "".join(
        "\ufffd" if unicodedata.category(c) in {"Cc", "Cs", "Cn"} or c in _TURNS else c for c in text
    )
    return clean if len(clean) <= most else f"…{clean[-most + 1 :]}"


def _tidy(svg: str, says: str) -> Markup:
    """Keep only what is seen; name the whole for a screen reader, and each mark for a pointer."""
    # inside an HTML page the namespace is understood, and without it the tags are read by their plain names
    root = ET.fromstring(svg.replace(' xmlns="http://www.w3.org/2000/svg"', "", 1))  # noqa: S314 - drawn above
    for parent in list(root.iter()):
        for child in list(parent):
            hidden = child.get("opacity") == "0" or child.get("display") == "none"
            if hidden or (child.get("class") in {"background", "foreground"}):
                parent.remove(child)
    for node in root.iter():
        label = node.get("aria-label", "")
        for name in [key for key in node.attrib if key.startswith("aria-") or key in _DROPPED]:
            del node.attrib[name]
        if node.get("opacity") == "1":
            del node.attrib["opacity"]
        address, _, title = label.partition(" ")
        if not address.startswith("@"):  # Vega's own words for a mark that was given none
            continue
        if node.tag == "text":
            node.set("data-json", address[1:])
        else:
            ET.SubElement(node, "title").text = title
    root.attrib = {
        "class": "chart",
        "role": "img",
        "aria-label": printable(says, 400),
        "viewBox": root.attrib["viewBox"],
    }
    return Markup(ET.tostring(root, encoding="unicode"))  # noqa: S704 - serialized just here, text escaped
