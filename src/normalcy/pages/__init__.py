"""The one look of every HTML page: offline, without a script, every number traceable to its JSON.

Not for terminals, and no model is in sight here: a page is given finished values.
"""

from normalcy.pages.checkup import render_checkup
from normalcy.pages.numbers import lookup, number
from normalcy.pages.svg import require
from normalcy.pages.trace import render_trace
from normalcy.pages.variants import render_variants

__all__ = ["lookup", "number", "render_checkup", "render_trace", "render_variants", "require"]
