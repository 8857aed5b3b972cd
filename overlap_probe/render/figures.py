"""Draws the timeline of one rank's window as SVG that fits into a page.

The idea: a row a stream, and below them one row that shows what the report is about: the times at which an all-gather
ran and no compute did. Kinds of work differ in height as well as in colour. Everything of one kind in one row is one
path, and where there is too much to see, near neighbours are drawn as one, so a picture is small whatever the trace.
"""

from __future__ import annotations

import io
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from overlap_probe.intervals import EMPTY, Intervals, subtract, union
from overlap_probe.results import Lane

MAX_RECTANGLES = 3000
"""In one picture; where there are more, nearer neighbours are drawn as one until there are not."""


@dataclass(frozen=True, slots=True)
class Look:
    """How a kind of work is drawn."""

    title: str
    colour: str
    height: float
    """Share of the row."""


LOOKS: dict[str, Look] = {
    "gemm": Look("GEMM", "#3b6ea8", 0.82),
    "compute": Look("other compute", "#8fb0d6", 0.50),
    "memory": Look("copy or memset", "#9a9a9a", 0.24),
    "all_gather": Look("all-gather", "#d98a1f", 0.82),
    "reduce_scatter": Look("reduce-scatter", "#7a5ea6", 0.62),
    "other": Look("other collective", "#4d9a86", 0.42),
    "exposed": Look("exposed all-gather", "#c2362f", 0.82),
}
"""The legend, in its order. Each colour is a CSS variable ``--KIND`` in the SVG, with this value as fallback."""

_LEGEND = {
    "frameon": False,
    "borderaxespad": 0,
    "borderpad": 0.2,
    "handlelength": 1,
    "handleheight": 0.8,
    "columnspacing": 1.6,
}
_METADATA = ("Date", "Creator", "Format", "Type")
_TEXT, _LINES = "#5b626b", "#c9ced6"


def timeline_svg(lanes: Iterable[Lane], prefix: str, description: str, *, track: str = "stream") -> str:
    """An ``<svg>`` element of the lanes; times count from their first start, in ms.

    Every id in it begins with ``prefix``, so that a page may hold several; ``description`` is its accessible name. The
    SVG names no font and scales to the width that it is given. ``track`` names what a lane is (a CPU-only timeline has
    threads). Empty where there is nothing to draw.
    """
    rows = picture_rows(lanes, track)
    if not rows:
        return ""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": prefix, "font.size": 8, "axes.linewidth": 0.6}):
        figure = Figure(figsize=(11, 0.62 + 0.27 * len(rows)))
        _draw(figure.add_axes((0, 0, 1, 1)), figure, rows)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata=dict.fromkeys(_METADATA))
    return _embeddable(text.getvalue(), prefix, description)


def picture_rows(lanes: Iterable[Lane], track: str = "stream") -> list[tuple[str, dict[str, Intervals]]]:
    """Label and busy times by kind of each row: streams with compute first, with collectives next, exposure last."""
    streams: dict[int, dict[str, Intervals]] = defaultdict(dict)
    for lane in lanes:
        kind = lane.kind if lane.kind in LOOKS else "other"
        before = streams[lane.stream].get(kind, EMPTY)
        streams[lane.stream][kind] = _merged(before, _intervals(lane))
    order = list(LOOKS)
    rows = [
        (f"{track} {stream}", kinds)
        for stream, kinds in sorted(streams.items(), key=lambda s: (min(map(order.index, s[1])), s[0]))
        if any(len(times) for times in kinds.values())
    ]
    gathers, busy = EMPTY, EMPTY
    for _, kinds in rows:
        gathers = _merged(gathers, kinds.get("all_gather", EMPTY))
        busy = _merged(busy, kinds.get("gemm", EMPTY), kinds.get("compute", EMPTY))
    if len(gathers):
        rows.append(("exposed", {"exposed": subtract(gathers, busy)}))
    return _thinned(rows)


def _intervals(lane: Lane) -> Intervals:
    return union(np.asarray(lane.start_ns, np.int64), np.asarray(lane.end_ns, np.int64))


def _merged(*sets: Intervals, gap_ns: int = 0) -> Intervals:
    """The union; gaps of less than ``gap_ns`` are closed."""
    start = np.concatenate([s.start_ns for s in sets])
    end = np.concatenate([s.end_ns for s in sets]) + gap_ns
    joined = union(start, end)
    return Intervals(joined.start_ns, joined.end_ns - gap_ns)


def _thinned(rows: list[tuple[str, dict[str, Intervals]]]) -> list[tuple[str, dict[str, Intervals]]]:
    """The same rows with at most MAX_RECTANGLES intervals."""
    gap_ns = 1
    while sum(len(times) for _, kinds in rows for times in kinds.values()) > MAX_RECTANGLES:
        gap_ns *= 2
        rows = [(name, {k: _merged(times, gap_ns=gap_ns) for k, times in kinds.items()}) for name, kinds in rows]
    return rows


def _draw(axes: Axes, figure: Figure, rows: list[tuple[str, dict[str, Intervals]]]) -> None:
    shown = [times for _, kinds in rows for times in kinds.values() if len(times)]
    origin = min(int(times.start_ns[0]) for times in shown)
    span = max(int(times.end_ns[-1]) for times in shown) - origin
    height = figure.get_size_inches()[1]
    axes.set_position((0.075, 0.36 / height, 0.92, 1 - 0.62 / height))
    hairline = span / 2200  # what is shorter than about a third of a pixel would not be seen
    for at, (_, kinds) in enumerate(rows):
        for kind, times in kinds.items():
            start = times.start_ns - origin
            width = np.maximum(times.end_ns - times.start_ns, hairline)
            axes.add_patch(_rectangles(start / 1e6, (start + width) / 1e6, at, LOOKS[kind]))
    axes.set_xlim(0, span / 1e6)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.xaxis.set_major_formatter("{x:g} ms")
    axes.tick_params(axis="y", length=0, labelcolor=_TEXT)
    axes.tick_params(axis="x", length=3, width=0.6, color=_LINES, labelcolor=_TEXT)
    axes.grid(axis="x", color=_LINES, linewidth=0.4)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_LINES)
    used = [kind for kind in LOOKS if any(kind in kinds for _, kinds in rows)]
    handles = [PathPatch(Path([(0, 0)]), facecolor=LOOKS[kind].colour, linewidth=0) for kind in used]
    titles = [LOOKS[kind].title for kind in used]
    figure.legend(
        handles, titles, loc="upper left", bbox_to_anchor=(0.068, 1), ncols=len(used), labelcolor=_TEXT, **_LEGEND
    )


def _rectangles(start: npt.NDArray[np.float64], end: npt.NDArray[np.float64], at: int, look: Look) -> PathPatch:
    """All rectangles of one kind in one row as one path."""
    low, high = at + look.height / 2, at - look.height / 2
    corners = [(start, low), (end, low), (end, high), (start, high), (start, low)]
    points = np.empty((len(start), 5, 2))
    for corner, (x, y) in enumerate(corners):
        points[:, corner, 0], points[:, corner, 1] = x, y
    codes = np.tile([Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY], len(start))
    return PathPatch(Path(points.reshape(-1, 2), codes), facecolor=look.colour, linewidth=0)


def _embeddable(svg: str, prefix: str, description: str) -> str:
    """The bare element: unique ids, no fixed size or font, colours as variables, and an accessible name."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<(metadata|style).*?</\1>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    svg = re.sub(r" ?font-family: [^;\"]*;?", "", svg)
    for kind, look in LOOKS.items():
        svg = svg.replace(look.colour, f"var(--{kind.replace('_', '-')}, {look.colour})")
    svg = svg.replace(_TEXT, f"var(--quiet, {_TEXT})").replace(_LINES, f"var(--line, {_LINES})")
    head = re.sub(r' (?:width|height)="[^"]*"', "", svg[: svg.index(">")])
    name = description.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
    return f'{head} role="img" aria-label="{name}"{svg[svg.index(">") :]}'.strip()
