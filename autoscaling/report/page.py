"""One HTML file that needs no other file and no network: headings, tables, figures. Knows nothing of what it shows."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

_STYLE = """
:root { color-scheme: light dark; --text: #1c1e21; --faint: #666b73; --back: #fff; --line: #dfe2e6; --card: #f6f7f9 }
@media (prefers-color-scheme: dark) {
  :root { --text: #e4e6ea; --faint: #9aa0a8; --back: #16181b; --line: #33373d; --card: #1f2226 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 80rem;
  margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem; margin: 0 0 1rem } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
.scroll { overflow-x: auto } table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }
td, th { padding: .2rem .6rem; border-bottom: 1px solid var(--line); text-align: right }
th { color: var(--faint); font-weight: 500 } td:first-child, th:first-child, td.text { text-align: left }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: .75rem }
.card { background: var(--card); border-radius: 8px; padding: .7rem .9rem }
.card b { display: block; font-size: 1.35rem } .card span { color: var(--faint); font-size: .82rem }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 560px), 1fr)); gap: 1rem }
svg { display: block; width: 100%; height: auto; background: #fff; border-radius: 8px } summary { cursor: pointer }
pre { background: var(--card); padding: 1rem; overflow-x: auto; border-radius: 8px; font-size: 13px }
"""


def page(title: str, sections: Iterable[tuple[str, str]]) -> str:
    """The whole file. `sections`: a heading (plain text; empty for none) and the HTML below it. Its style knows
    `<div class="figures">` around several figures and `<div class="cards">` around `<div class="card">`."""
    body = "".join(f"{f'<h2>{escape(heading)}</h2>' if heading else ''}\n{html}\n" for heading, html in sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{body}</body></html>\n"
    )


def table(heads: Iterable[str], rows: Iterable[Iterable[str]], text: Iterable[int] = ()) -> str:
    """All cells are plain text. The first column and those numbered in `text` are aligned left, the others right."""
    left = set(text)
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join(
        f"<tr>{''.join(f'<td{_KIND[i in left]}>{escape(cell)}</td>' for i, cell in enumerate(row))}</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


_KIND = {True: ' class="text"', False: ""}


def bullets(lines: Iterable[str]) -> str:
    """A list of plain text lines."""
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"
