"""Self-contained HTML pages in one style, for light and dark windows, and figures that fit them."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable
from html import escape
from typing import TYPE_CHECKING, Any, ParamSpec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_P = ParamSpec("_P")

# Okabe and Ito's colours, told apart by colour-blind readers as well; the last three are added.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#b8a200", "#8c6d31", "#999999")
GRID = "#88888840"  # pale on light and on dark
_INK = "#010203"  # of figures; replaced by the page's own
_METADATA = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)
_STYLE = """
:root { color-scheme: light dark; --ink: #1d2530; --soft: #5c6672; --line: #d9dee4; --paper: #ffffff;
  --card: #f5f7f9; --accent: #0072b2; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ed; --soft: #9aa5b1; --line: #343c46;
  --paper: #14181d; --card: #1d232a; --accent: #56b4e9; } }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 0 auto;
  padding: 1.5rem 1rem 4rem; max-width: 72rem; }
h1 { font-size: 1.6rem; margin: 0 0 .6rem; } h2 { font-size: 1.2rem; margin: 2.4rem 0 .4rem; }
p { margin: .4rem 0; max-width: 60rem; } .note, footer { color: var(--soft); font-size: .9rem; }
svg.plot { width: 100%; min-width: 40rem; height: auto; display: block; color: var(--ink); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem; text-align: right; white-space: nowrap; } th { vertical-align: bottom; }
.text, .wrap { text-align: left; } .wrap { white-space: normal; min-width: 16rem; }
thead th { border-bottom: 1px solid var(--soft); } tbody tr:nth-child(even) { background: var(--card); }
"""


def page(title: str, body: Iterable[str], style: str = "") -> str:
    """Return a page as HTML text that needs nothing from the network; ``style`` adds to the common one."""
    head = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{_STYLE}{style}</style></head><body>",
    ]
    return "\n".join([*head, *body, "</body></html>", ""])


def drawn(make: Callable[_P, Figure | None], *args: _P.args, **kwargs: _P.kwargs) -> str:
    """Return the figure that a function makes as SVG text, the same text every time; "" if it makes none.

    Lines and letters take the page's text colour, so that they can be read on light and on dark.
    """
    import matplotlib

    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    salt = f"rowhaul {make.__name__}"  # no two figures of a page share the names of their parts
    settings: dict[Any, Any] = {"svg.hashsalt": salt, "svg.fonttype": "none", "font.size": 9}
    text = io.StringIO()
    with matplotlib.rc_context(settings | dict.fromkeys(inked, _INK)):
        figure = make(*args, **kwargs)
        if figure is None:
            return ""
        figure.savefig(text, format="svg", metadata={"Date": None}, transparent=True)
    drawing = text.getvalue()
    # The XML prologue and the metadata have no place inside a page.
    drawing = _METADATA.sub("", drawing[drawing.index("<svg") :]).replace(_INK, "currentColor")
    drawing = drawing.replace("<svg ", f'<svg class="plot" data-plot="{make.__name__}" ', 1)
    return f'<div class="scroll">{drawing}</div>'  # on a phone letters stay legible, and the plot scrolls
