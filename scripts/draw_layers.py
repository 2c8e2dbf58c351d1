"""Draw docs/layers.svg: the folders of the package and who imports whom. A test compares it with the import rules."""

from __future__ import annotations

import sys
from pathlib import Path

#: Name → column, row, columns covered, what it is for.
BOXES: dict[str, tuple[int, int, int, str]] = {
    "cli": (0, 0, 3, "one file per verb; parses, calls, prints"),
    "toys": (2, 1, 1, "toy inputs of --smoke"),
    "presentation": (0, 2, 2, "documents → tables, figures, pages; report/"),
    "vision": (0, 3, 2, "image classifiers: data, models, tables"),
    "analysis": (0, 4, 2, "coupling/  orthogonality/  safeguards  sensitivity"),
    "experiments": (0, 5, 2, "train, measure, record: ablate/  sweep/  demo/"),
    "recipes": (0, 6, 1, "settings → a prepared run"),
    "openunlearning": (1, 6, 1, "the bridge to its trainers"),
    "representation": (0, 7, 1, "Algorithm 3"),
    "evaluation": (2, 7, 1, "benchmarks: tofu/  wmdp/"),
    "training": (0, 8, 1, "configuration and Trainer"),
    "step": (0, 9, 1, "passes, pull, schedules"),
    "losses": (1, 9, 1, "plain functions in a registry"),
    "data": (2, 9, 1, "pairs, corpora, chat formats"),
    "space": (0, 10, 1, "where tensors live: one per layout"),
    "geometry": (0, 11, 1, "float64 maths; methods/"),
    "errors files compat": (0, 12, 3, "messages, atomic writes, versions of dependencies"),
}

#: A folder → those it imports; it may also import whatever they may.
ARROWS: dict[str, tuple[str, ...]] = {
    "cli": ("toys",),
    "toys": ("presentation",),
    "presentation": ("vision",),
    "vision": ("analysis",),
    "analysis": ("experiments",),
    "experiments": ("recipes", "evaluation"),
    "recipes": ("representation",),
    "openunlearning": ("representation", "evaluation"),
    "representation": ("training",),
    "training": ("step", "losses", "data"),
    "evaluation": ("losses", "data"),
    "step": ("space",),
    "space": ("geometry",),
    "geometry": ("errors files compat",),
    "losses": ("errors files compat",),
    "data": ("errors files compat",),
}

WIDTH, HEIGHT, COLUMN, ROW, LEFT, TOP = 270, 42, 300, 70, 15, 12


def frame(name: str) -> tuple[float, float, float]:
    """Left, top and width of a box."""
    column, row, span, _ = BOXES[name]
    return LEFT + column * COLUMN, TOP + row * ROW, WIDTH + (span - 1) * COLUMN


def arrow(start: str, end: str) -> str:
    """From the lower edge of the importing box to the upper edge of the imported one, as steep as both allow."""
    (x0, y0, w0), (x1, y1, w1) = frame(start), frame(end)
    left, right = max(x0, x1) + 20, min(x0 + w0, x1 + w1) - 20
    if left <= right:
        begin = finish = (left + right) / 2
    else:
        begin, finish = (x0 + w0 - 20, x1 + 20) if x0 < x1 else (x0 + 20, x1 + w1 - 20)
    return f'<path d="M{begin:g} {y0 + HEIGHT:g}L{finish:g} {y1 - 3:g}" marker-end="url(#head)"/>'


def picture() -> str:
    """The whole picture."""
    width, height = 2 * LEFT + 2 * COLUMN + WIDTH, 2 * TOP + 12 * ROW + HEIGHT
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#607d8b"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        '<g stroke="#607d8b" stroke-width="1.5" fill="none">',
        *(arrow(start, end) for start, ends in ARROWS.items() for end in ends),
        "</g>",
    ]
    for name, (_, _, _, text) in BOXES.items():
        x, y, w = frame(name)
        lines += [
            f'<rect x="{x}" y="{y}" width="{w}" height="{HEIGHT}" rx="5" fill="#eceff1" stroke="#607d8b"/>',
            f'<text x="{x + w / 2:g}" y="{y + 18}" text-anchor="middle" font-size="15" font-weight="bold" '
            f'fill="#263238">{name}</text>',
            f'<text x="{x + w / 2:g}" y="{y + 34}" text-anchor="middle" font-size="12" fill="#37474f">{text}</text>',
        ]
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent / "docs" / "layers.svg"
    target.write_text(picture(), encoding="utf-8")
