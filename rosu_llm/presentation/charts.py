"""Kinds of pictures that several results share: lines along a setting, a frontier of models, a map of the parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Any, NamedTuple

from ..analysis.coupling.parts import ORDER, Part
from .blocks import Figure, Table, shown, text_table
from .drawing import dot, is_log, legend, short, widened

_LEVELS = ({"color": "0.5", "linestyle": "--"}, {"color": "C4", "linestyle": ":"})
_PRINTED = {"color": "0.5", "linestyle": "-.", "marker": "s", "markersize": 3, "linewidth": 1.1}


class Series(NamedTuple):
    """One line of a panel.

    Attributes:
        points: (x, mean, standard deviation or None).
        look: ``line``, ``cloud`` (points that differ in other settings, too) or ``paper`` (printed figures).
    """

    label: str
    points: Sequence[tuple[float, float, float | None]]
    look: str = "line"

    def draw(self, axes: Any, color: str) -> None:
        """A line with a band of one standard deviation, or as ``look`` says."""
        x, mean = [point[0] for point in self.points], [point[1] for point in self.points]
        spread = [point[2] or 0.0 for point in self.points]
        if self.look == "cloud":
            axes.scatter(x, mean, s=16, color=color, alpha=0.7, label=self.label)
        elif self.look == "paper":
            axes.plot(x, mean, label=self.label, **_PRINTED)
        else:
            axes.plot(x, mean, color=color, marker="o", markersize=4, linewidth=1.4, label=self.label, zorder=3)
            if any(spread):
                low, high = ([m + sign * s for m, s in zip(mean, spread, strict=True)] for sign in (-1, 1))
                axes.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0, zorder=2)


class Panel(NamedTuple):
    """One measure; ``levels`` are horizontal lines: the measure of models to compare with, by name."""

    title: str
    series: Sequence[Series]
    levels: Mapping[str, float]


def along(key: str, title: str, axis: str, panels: Sequence[Panel], data: Table) -> Figure:
    """Measures over one ``axis``, a panel for each; ``data`` is the table behind the figure."""
    values = sorted({x for panel in panels for series in panel.series for x, _, _ in series.points})
    columns = 1 if len(panels) <= 2 else 2
    rows = ceil(len(panels) / columns)

    def draw(figure: Any) -> None:
        drawn = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axes, panel in zip(drawn, panels, strict=False):
            for at, series in enumerate(panel.series):
                series.draw(axes, f"C{at}")
            for look, (label, level) in zip(_LEVELS, panel.levels.items(), strict=False):
                axes.axhline(level, linewidth=1.3, zorder=1, label=label, **look)
            if values and is_log(values):
                axes.set_xscale("log", base=2)
            if len(values) <= 8:
                axes.set_xticks(values, [f"{value:g}" for value in values])
                axes.minorticks_off()
            axes.set(ylim=widened(*axes.get_ylim()), xlabel=axis)
            axes.set_title(panel.title, fontsize=9)
        for axes in drawn[len(panels) :]:
            axes.remove()
        legend(figure, *drawn[: len(panels)])

    alt = f"{', '.join(panel.title for panel in panels)} over {axis}."
    return Figure(key, title, alt, draw, data, f"{title}. {alt}", (5.0 if columns == 1 else 6.4, 0.6 + 2.4 * rows))


class Point(NamedTuple):
    """A model.

    Attributes:
        place: number of the run, which gives its colour and mark.
        reference: a model to compare with.
        paper: a printed figure, drawn as a small cross with its name beside it.
        published: a model of others, drawn as a small diamond with its name beside it.
        goal: what the others should come close to: dotted lines go through it.
    """

    label: str
    x: float
    y: float
    place: int | None = None
    reference: bool = False
    paper: bool = False
    goal: bool = False
    published: bool = False


#: Of the vertical axis of a frontier, whose values are shares.
SMALLEST_SPAN = 0.1


def frontier(
    key: str,
    title: str,
    points: Sequence[Point],
    titles: tuple[str, str],
    paper: str = "the paper's figures",
    cloud: Sequence[tuple[float, float]] = (),
) -> Figure:
    """Forgetting against keeping; ``titles`` are those of x and y, ``paper`` says what printed points are.

    ``cloud`` are models of others, too many to name.
    """

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        if cloud:
            look_of_many = {"color": "0.72", "s": 11, "linewidth": 0, "zorder": 1}
            axes.scatter(*zip(*cloud, strict=True), label=f"{len(cloud)} published models", **look_of_many)
        for at, point in enumerate(points):
            if point.paper:  # names of neighbours in the table go to different sides
                axes.scatter(point.x, point.y, color="0.5", marker="+", s=30, linewidth=1, zorder=2)
                place = {"xytext": (4, -8 if at % 2 else 3), "textcoords": "offset points"}
                axes.annotate(point.label, (point.x, point.y), fontsize=7, color="0.5", **place)
                continue
            if point.published:
                axes.scatter(point.x, point.y, color="0.35", marker="D", s=16, linewidth=0, zorder=2)
                continue
            look: dict[str, Any] = {**dot(point.place or 0), "s": 70}
            if point.reference:
                first = at == 0 or point.label.startswith("Initial")
                others = point.label.endswith("(theirs)")
                look = {
                    "color": "0.75" if others else "0.5",
                    "marker": "X" if first else "*",
                    "s": 80 if others else 150,
                }
            axes.scatter(point.x, point.y, label=short(point.label), zorder=3, **look)
            if point.goal:
                line: dict[str, Any] = {"color": "0.5", "linestyle": ":", "linewidth": 1.2, "zorder": 1}
                axes.axvline(point.x, **line)
                axes.axhline(point.y, **line)
        axes.set(xlabel=titles[0], ylabel=titles[1])
        axes.margins(0.1)
        axes.ticklabel_format(useOffset=False)
        low, high = axes.get_ylim()
        if high - low < SMALLEST_SPAN:  # else rounding would look like a difference
            middle = (low + high) / 2.0
            axes.set_ylim(middle - SMALLEST_SPAN / 2.0, middle + SMALLEST_SPAN / 2.0)
        _name_apart(axes, points)
        legend(figure, axes)

    what = [_kind(point) for point in points]
    rows = [(p.label, shown(p.x), shown(p.y), source) for p, source in zip(points, what, strict=True)]
    data = text_table(title, ("model", *titles, "what"), rows)
    own = [point for point in points if not (point.paper or point.published)]
    said = "; ".join(f"{p.label} ({shown(p.x, 3)}, {shown(p.y, 3)})" for p in own)
    small = f" Small crosses: {paper}." if any(point.paper for point in points) else ""
    small += "".join(f" Dotted lines: {point.label}." for point in points if point.goal)
    if cloud:
        small += f" Grey dots: {len(cloud)} published models; diamonds: the best of each method by HM of both axes."
    alt = f"{titles[1]} against {titles[0]}: {said}."
    return Figure(key, title, alt, draw, data, f"{title}.{small}", (5.4, 3.8 + 0.08 * len(own)))


#: Where a name may stand, in points from its mark: the first place is taken where no other name is.
_PLACES = [(5, 4), (5, -9), *((side, -16 - 11 * row) for row in range(1, 12) for side in (16, -48))]


def _name_apart(axes: Any, points: Sequence[Point]) -> None:
    """Names of published models beside their marks, and where marks are crowded below them, with a line."""
    scale = 72.0 / axes.figure.dpi
    taken: list[tuple[float, float, float, float]] = []
    for point in points:
        x, y = (scale * value for value in axes.transData.transform((point.x, point.y)))
        size = 3.0 if point.published else 6.0
        taken.append((x - size, y - size, x + size, y + size))
    for point in sorted((point for point in points if point.published), key=lambda point: -point.x):
        x, y = (scale * value for value in axes.transData.transform((point.x, point.y)))
        for right, up in _PLACES:
            box = (x + right, y + up, x + right + 4.4 * len(point.label), y + up + 8.0)
            if not any(box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3] for b in taken):
                break
        taken.append(box)
        line = {"arrowstyle": "-", "color": "0.6", "linewidth": 0.6} if up < -9 else None
        place = {"xytext": (right, up), "textcoords": "offset points", "arrowprops": line}
        axes.annotate(point.label, (point.x, point.y), fontsize=7, color="0.25", zorder=4, **place)


def _kind(point: Point) -> str:
    if point.paper or point.published:
        return "paper" if point.paper else "published"
    return "reference" if point.reference else "run"


def layers_and_kinds(parts: Mapping[Part, Any]) -> tuple[list[int | None], list[str]]:
    """The layers in order, None (outside the layers) last, and the kinds in the order of a forward pass."""

    def place(kind: str) -> tuple[int, str]:
        stem = kind.partition(" ")[0]
        return (ORDER.index(stem) if stem in ORDER else len(ORDER), kind)

    layers = sorted({layer for layer, _ in parts}, key=lambda layer: (layer is None, layer))
    return layers, sorted({kind for _, kind in parts}, key=place)


def heat_map(
    parts: Mapping[Part, float | None], label: str, limits: tuple[float, float], *, log: bool = False
) -> tuple[Callable[[Any], None], tuple[float, float]]:
    """What draws a map of layers × kinds, colours from ``limits``, and its size in inches.

    On a logarithmic scale values of 0 stay empty, like absent ones.
    """
    layers, kinds = layers_and_kinds(parts)

    def draw(figure: Any) -> None:
        import numpy as np
        from matplotlib.colors import LogNorm, Normalize

        values = np.full((len(layers), len(kinds)), np.nan)
        for (layer, kind), value in parts.items():
            if value is not None and (value > 0 or not log):
                values[layers.index(layer), kinds.index(kind)] = value
        low, high = limits
        norm = LogNorm(low, high if high > low else low * 10) if log else Normalize(low, high)
        axes = figure.subplots()
        axes.set_facecolor("0.93")
        axes.grid(False)
        image = axes.imshow(values, aspect="auto", norm=norm, cmap="viridis" if log else "RdBu_r")
        for (y, x), value in np.ndenumerate(values):
            if np.isfinite(value) and not log and len(layers) <= 16:
                shade = "white" if abs(value) > 0.7 * high else "black"
                axes.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize=8, color=shade)
        axes.set_xticks(range(len(kinds)), kinds, rotation=30, ha="right")
        step = max(1, len(layers) // 16)
        labelled = [at for at, layer in enumerate(layers) if layer is None or layer % step == 0]
        axes.set_yticks(labelled, ["outside" if layers[at] is None else f"layer {layers[at]}" for at in labelled])
        figure.colorbar(image, ax=axes, label=label)

    return draw, (max(5.0, 1.6 + 0.55 * len(kinds)), min(6.0, max(2.4, 1.3 + 0.3 * len(layers))))
