"""`report.html`: one file with everything in it, readable without a network."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from thrust_rllib.reporting.final_numbers import Table

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; color: #1d2330; background: #fff;
  max-width: 1200px; margin: 0 auto; padding: 1rem 1.2rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: .6rem 0 .2rem; overflow-wrap: anywhere; }
h2, h3 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; overflow-wrap: anywhere; }
h2.part { font-size: 1.4rem; border-top: 2px solid #9aa3b5; margin-top: 3rem; padding-top: .8rem; }
.lead, figcaption { color: #5a6374; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .9rem .35rem 0; text-align: right; border-bottom: 1px solid #e4e7ee; vertical-align: top; }
th { font-weight: 600; color: #5a6374; border-bottom-color: #9aa3b5; }
th:first-child, td:first-child, .texts th, .texts td { text-align: left; }
td:first-child { min-width: 9rem; max-width: 26rem; overflow-wrap: break-word; font-weight: 600; }
td span { white-space: nowrap; }
.notes { background: #fff7e0; border-left: 4px solid #e2b33c; padding: .5rem .9rem; margin: 1rem 0; }
.notes ul { margin: 0; padding-left: 1.1rem; }
figure { margin: 0 0 1.2rem; }
figure img { display: block; width: 100%; min-width: 720px; height: auto; }
figure.narrow img { width: auto; max-width: 100%; min-width: min(100%, 460px); }
figcaption { font-size: .9rem; margin-top: .4rem; }
pre { background: #f5f6f9; padding: .6rem .8rem; overflow-x: auto; font-size: .85rem; }
"""


@dataclass(frozen=True)
class PageFigure:
    """A figure of the page.

    Args:
        title: its heading.
        caption: what is drawn.
        picture: a PNG; None where there is nothing to draw, which the caption explains.
        narrow: as wide as it was drawn, instead of as wide as the page.
    """

    title: str
    caption: str
    picture: Path | None
    narrow: bool = False


@dataclass(frozen=True)
class PageSection:
    """Tables, then figures, which belong together.

    Args:
        heading: above; None where the page has no other section.
        tables: first.
        figures: then.
    """

    heading: str | None
    tables: Sequence[Table]
    figures: Sequence[PageFigure]


def page(
    title: str,
    lead: str,
    notes: Sequence[str],
    sections: Sequence[PageSection],
    details: Sequence[Table],
    commands: str,
) -> str:
    """The HTML text: headline, sections, then where the runs are and how they were made.

    Args:
        title: headline.
        lead: a sentence below it.
        notes: what a reader has to know before the numbers.
        sections: one for each environment.
        details: tables of texts at the end.
        commands: shown as they are, at the end.
    """
    parts = [f"<h1>{escape(title)}</h1>", f'<p class="lead">{escape(lead)}</p>']
    if notes:
        items = "".join(f"<li>{escape(note)}</li>" for note in notes)
        parts.append(f'<div class="notes"><ul>{items}</ul></div>')
    parts += [_section(section) for section in sections]
    if any(section.heading for section in sections):
        parts.append('<h2 class="part">All runs</h2>')
    parts += [_table(table, "h2") for table in details]
    parts.append(f"<h2>Commands and versions</h2><pre>{escape(commands)}</pre>")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n{''.join(parts)}</body></html>\n"
    )


def _section(section: PageSection) -> str:
    head = "" if section.heading is None else f'<h2 class="part">{escape(section.heading)}</h2>'
    level = "h2" if section.heading is None else "h3"
    parts = [_table(table, level) for table in section.tables] + [_figure(figure, level) for figure in section.figures]
    return head + "".join(parts)


def _table(table: Table, level: str) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    cell = _number if table.kind == "numbers" else escape
    body = "".join(
        f"<tr><td>{escape(row[0])}</td>{''.join(f'<td>{cell(text)}</td>' for text in row[1:])}</tr>"
        for row in table.rows
    )
    return (
        f'<{level}>{escape(table.title)}</{level}><div class="wide"><table class="{table.kind}">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _number(text: str) -> str:
    """A number, which may have a line break before its error only."""
    return "<span>" + "</span> <span>± ".join(escape(part) for part in text.split(" ± ")) + "</span>"


def _figure(figure: PageFigure, level: str) -> str:
    heading, caption = f"<{level}>{escape(figure.title)}</{level}>", escape(figure.caption)
    if figure.picture is None:
        return f'{heading}<p class="lead">{caption}</p>'
    data = base64.b64encode(figure.picture.read_bytes()).decode("ascii")
    return (
        f'{heading}<figure class="{"narrow" if figure.narrow else "full"}"><div class="wide">'
        f'<img alt="{escape(figure.title)}" src="data:image/png;base64,{data}"></div>'
        f"<figcaption>{caption}</figcaption></figure>"
    )
