"""Draws docs/geometry.png, the README's picture: where the two perturbations go, in the plane of f and r.

python scripts/draw_geometry.py [FILE]
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot as plt

RHO = 0.62
f, r = np.array([1.05, 0.78]), np.array([1.25, 0.0])
q = f - (f @ r) / (r @ r) * r
standard, neutral = RHO * f / np.linalg.norm(f), RHO * q / np.linalg.norm(q)


def arrow(axes: plt.Axes, tip: np.ndarray, color: str, width: float) -> None:
    axes.annotate(
        "",
        xy=tuple(tip),
        xytext=(0, 0),
        arrowprops={"arrowstyle": "-|>", "color": color, "lw": width, "shrinkA": 0, "shrinkB": 0},
    )


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent / "docs" / "geometry.png"
    figure, axes = plt.subplots(figsize=(7.6, 4.3), layout="constrained")
    axes.axvspan(0, 2.2, color="#fdecea", zorder=0)
    axes.axvline(0, color="#2e7d32", lw=1.6, ls="--", zorder=1)
    axes.add_patch(plt.Circle((0, 0), RHO, fill=False, color="0.55", lw=1.1, ls=":"))
    axes.plot([f[0], 0], [f[1], q[1]], color="0.5", lw=1.0, ls=":")
    arrow(axes, r, "#1565c0", 2.0)
    arrow(axes, f, "0.25", 2.0)
    arrow(axes, standard, "#c62828", 3.2)
    arrow(axes, neutral, "#2e7d32", 3.2)
    axes.plot(0, 0, "o", color="black", ms=6, zorder=5)
    axes.plot(*q, "o", color="0.25", ms=4, zorder=5)
    axes.text(-0.05, -0.1, "w", ha="right", fontsize=13, style="italic")
    axes.text(r[0] + 0.03, 0.0, "r: retain gradient", color="#1565c0", va="center", fontsize=11)
    axes.text(f[0] + 0.03, f[1], "f: forget gradient", color="0.25", va="center", fontsize=11)
    axes.text(
        standard[0] + 0.16, standard[1] - 0.04, r"standard: $\delta=\rho\,f/\|f\|$" + "\nraises the retain loss",
        color="#c62828", va="top", fontsize=11,
    )  # fmt: skip
    axes.text(
        neutral[0] - 0.07, neutral[1] + 0.27, r"ROSU: $\delta=\rho\,q/\|q\|$" + "\nretain-neutral, full length",
        color="#2e7d32", ha="right", va="top", fontsize=11,
    )  # fmt: skip
    axes.text(0.05, q[1] + 0.05, r"$q=f-\frac{\langle f,r\rangle}{\|r\|^2}\,r$", color="0.25", fontsize=12)
    axes.text(-0.05, -0.42, r"$\langle r,\delta\rangle=0$", color="#2e7d32", ha="right", fontsize=11)
    axes.text(1.83, -0.47, "retain loss rises\nto first order", color="#b71c1c", ha="right", fontsize=10, alpha=0.8)
    axes.text(-RHO * 0.72, RHO * -0.72, r"$\|\delta\|=\rho$", color="0.4", ha="right", va="top", fontsize=10)
    axes.set(xlim=(-1.25, 1.9), ylim=(-0.62, 1.12), aspect="equal")
    axes.axis("off")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
