"""HTML pages that need no other file, in light and in dark."""

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff;
       max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin-top: 2.5rem; }
h3 { font-size: 1rem; }
.caveats { color: #8a3b00; margin-top: 0.2rem; }
.scroll { overflow-x: auto; }
/* On a phone a figure scrolls: its words would be too small. */
svg { max-width: max(100%, 44rem); height: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.35rem 0.6rem; text-align: right; white-space: nowrap;
         border-bottom: 1px solid #8884; }
th { border-bottom: 2px solid #888; white-space: normal; vertical-align: bottom; }
.text { text-align: left; white-space: normal; }
ul { color: #444; padding-left: 1.3rem; }
pre { background: #8881; padding: 0.8rem; font-size: 0.85rem; white-space: pre-wrap;
      overflow-wrap: anywhere; max-height: 40rem; overflow-y: auto; }
@media (prefers-color-scheme: dark) {
  body { color: #e6e6e6; background: #161616; }
  .caveats { color: #ffb27a; }
  ul { color: #bbb; }
  /* A figure is drawn on white; its hues stay. */
  svg { filter: invert(0.91) hue-rotate(180deg); }
}
"""


def page(title: str, caveats: str, parts: Iterable[str]) -> str:
    """Returns a page from a title and caveats (texts) and parts (HTML)."""
    lines = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{html.escape(title)}</h1>",
        f'<p class="caveats">{html.escape(caveats)}</p>' if caveats else "",
        *parts,
        "</body></html>",
    ]
    return "\n".join(filter(None, lines)) + "\n"


def figure(svg: str) -> str:
    """Returns the part of a page that holds an SVG of matplotlib."""
    # Start at the tag: the XML prologue names a DTD on the web.
    return f'<div class="scroll">{svg[svg.index("<svg") :]}</div>'


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], *, texts: int) -> str:
    """Returns a table; the first `texts` columns are words, the others numbers."""
    lines = [_row("th", headings, texts), *(_row("td", row, texts) for row in rows)]
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def _row(tag: str, cells: Sequence[str], texts: int) -> str:
    found = []
    for number, text in enumerate(cells):
        kind = ' class="text"' if number < texts else ""
        found.append(f"<{tag}{kind}>{html.escape(text)}</{tag}>")
    return f"<tr>{''.join(found)}</tr>"


def items(texts: Iterable[str]) -> str:
    """Returns a list of sentences."""
    return f"<ul>{''.join(f'<li>{html.escape(text)}</li>' for text in texts)}</ul>"


def plain_json(value: Mapping[str, Any]) -> str:
    """Returns an object as JSON."""
    return f"<pre>{html.escape(json.dumps(value, indent=2, sort_keys=True))}</pre>"
