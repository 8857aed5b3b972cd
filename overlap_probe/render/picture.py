"""Draws the timelines of a run as one picture: an SVG file that stands alone, one timeline a rank."""

from __future__ import annotations

import re
from html import escape

from overlap_probe.errors import OverlapProbeError
from overlap_probe.render import summary
from overlap_probe.render.words import clean
from overlap_probe.results import RunAnalysis, Verdict

MOST_RANKS = 8
MARGIN, TITLE = 10, 18
"""Around the picture, and above each timeline, in its own units (points)."""


def render(run: RunAnalysis, verdict: Verdict | None = None) -> str:
    """The SVG text. Raises OverlapProbeError where there is nothing to draw (a result read back has no timelines)."""
    from overlap_probe.render.figures import timeline_svg

    parts: list[str] = []
    width, height = 0.0, float(MARGIN)
    for label, rank in list(zip(summary.rank_labels(run), run.ranks, strict=True))[:MOST_RANKS]:
        track = "thread" if any(c.mechanism == "cpu" for c in rank.whole.collectives) else "stream"
        title = f"{summary.named(label)}, {clean(rank.pictured)}"
        svg = timeline_svg(rank.lanes, f"t{len(parts)}", title, track=track)
        box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
        if not box:
            continue
        size = f'x="{MARGIN}" y="{height + TITLE:.0f}" width="{box[1]}" height="{box[2]}"'
        text = f'<text x="{MARGIN}" y="{height + 11:.0f}" font-size="11" font-weight="bold">{escape(title)}</text>'
        parts.append(text + svg.replace("<svg", f"<svg {size}", 1))
        width, height = max(width, float(box[1])), height + TITLE + float(box[2])
    if not parts:
        raise OverlapProbeError("nothing to draw: no timeline in this run; give the traces themselves, not a result")
    outer = f'viewBox="0 0 {width + 2 * MARGIN:.0f} {height + MARGIN:.0f}" font-family="sans-serif"'
    background = '<rect width="100%" height="100%" fill="#fff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {outer}>{background}{"".join(parts)}</svg>\n'
