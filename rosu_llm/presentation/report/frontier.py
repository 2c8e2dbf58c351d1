"""Forgetting against keeping, one point per model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .blocks import Figure, Grid, shown
from .figures import dot, short


@dataclass(frozen=True)
class Point:
    """A model.

    Attributes:
        place: number of the run, which gives its colour and mark.
        reference: a model to compare with.
        paper: a printed figure, drawn small, with its name beside it.
    """

    label: str
    x: float
    y: float
    place: int | None = None
    reference: bool = False
    paper: bool = False


def frontier(
    key: str, title: str, points: Sequence[Point], titles: tuple[str, str], paper: str = "the paper's figures"
) -> Figure:
    """The figure; ``titles`` are those of x and y, ``paper`` says what printed points are."""

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for at, point in enumerate(points):
            if point.paper:
                _printed(axes, point, above=at % 2 == 0)
                continue
            if point.reference:
                look: dict[str, Any] = {"color": "0.5", "marker": "*" if at else "X", "s": 150}
            else:
                look = {**dot(point.place or 0), "s": 70}
            axes.scatter(point.x, point.y, label=short(point.label), zorder=3, **look)
        axes.set_xlabel(titles[0])
        axes.set_ylabel(titles[1])
        axes.margins(0.1)
        figure.legend(loc="outside lower center", ncols=2)

    rows = tuple((p.label, shown(p.x), shown(p.y), _source(p)) for p in points)
    data = Grid(title, ("model", titles[0], titles[1], "what"), rows)
    said = "; ".join(f"{p.label} ({shown(p.x, 3)}, {shown(p.y, 3)})" for p in points if not p.paper)
    small = f" Small crosses: {paper}." if any(p.paper for p in points) else ""
    size = (5.4, 3.8 + 0.08 * sum(not p.paper for p in points))
    return Figure(key, title, f"{titles[1]} against {titles[0]}: {said}.", draw, data, f"{title}.{small}", size)


def _printed(axes: Any, point: Point, *, above: bool) -> None:
    """A small cross with its name; names of neighbours in the table go to different sides."""
    axes.scatter(point.x, point.y, color="0.5", marker="+", s=30, linewidth=1, zorder=2)
    place = {"xytext": (4, 3 if above else -8), "textcoords": "offset points"}
    axes.annotate(point.label, (point.x, point.y), fontsize=7, color="0.5", **place)


def _source(point: Point) -> str:
    return "paper" if point.paper else "reference" if point.reference else "run"
