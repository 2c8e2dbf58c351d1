"""Grids: named ones in the shape of the paper's tables, and products of free axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

from ...errors import ConfigError, unknown
from ...geometry import METHODS

SYMBOLS = {"rho": "ρ", "beta": "β", "kappa": "κ", "tau": "τ", "learning_rate": "η", "protect_rank": "k"}

#: Settings of a cell that an axis or a flag cannot be, and what to type instead.
RESERVED = {"seed": "--seeds 0 1 2", "output_dir": "--out DIR"}


@dataclass(frozen=True)
class Variant:
    """One row: the settings in which it differs, and its entries in the grid's own columns."""

    label: str
    settings: Mapping[str, Any]
    marks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Grid:
    """The rows of one table.

    Attributes:
        name: of the files that show it.
        columns: headings of the variants' marks.
        axes: the settings that vary, in order, where every variant has a value of each.
        notes: lines below the table.
    """

    name: str
    title: str
    variants: tuple[Variant, ...]
    columns: tuple[str, ...] = ()
    axes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def named_grid(name: str, base: Mapping[str, Any], known: set[str]) -> Grid:
    """The grid called ``name`` on top of the settings ``base``; ``known`` are the settings that exist."""
    if name not in GRIDS:
        raise unknown("grid", name, GRIDS)
    grid = GRIDS[name](base)
    for key in chain.from_iterable(variant.settings for variant in grid.variants):
        if key not in known:
            raise ConfigError(
                f"The grid {name!r} varies {key!r}, which is no setting of this version: leave it out of --grid."
            )
    return grid


def free_grid(axes: Sequence[str], base: Mapping[str, Any], fixed: Mapping[str, Any]) -> Grid:
    """The product of axes written ``key=v1,v2``; ``fixed`` are settings given as flags, which no axis may repeat."""
    from ..config_task import typed_setting

    values: dict[str, list[str]] = {}
    for axis in axes:
        key, _, text = axis.partition("=")
        key, entries = key.strip().lstrip("-").replace("-", "_"), [entry.strip() for entry in text.split(",")]
        if not key or not all(entries):
            raise ConfigError(f"--axis {axis!r} is not understood: write --axis key=v1,v2, e.g. --axis rho=0.1,0.2.")
        if key in RESERVED:
            raise ConfigError(f"--axis {axis!r}: {key} is no axis; use {RESERVED[key]}.")
        if key in values or key in fixed:
            other = "a second --axis" if key in values else f"--{key.replace('_', '-')}"
            raise ConfigError(f"--axis {axis!r} and {other} both set {key}: give one of them.")
        values[key] = entries
    variants: list[Variant] = []
    for combination in product(*values.values()):
        raw = dict(zip(values, combination, strict=True))
        settings = {key: typed_setting(key, value, {**base, **raw}) for key, value in raw.items()}
        label = ", ".join(f"{SYMBOLS.get(key, key)} = {value}" for key, value in settings.items())
        if any(variant.label == label for variant in variants):
            raise ConfigError(f"The axes give {label!r} twice: every value once.")
        variants.append(Variant(label, settings))
    return Grid("axes", " × ".join(values), tuple(variants), axes=tuple(values))


def _components(base: Mapping[str, Any]) -> Grid:
    """tab:ablation_tofu: which of the two terms of w + βδ − ηv are there.

    With βδ alone there is no optimizer step for ``matched`` to match. Rows are comparable only if the pull reaches the
    weights in the same way in all of them, so ``matched`` (and ``auto``, which may become it) gives way in each row.
    """
    shared, notes = {}, ["✓*: zero-order, v = s (the retain gradient at w + δ) without the Jacobian correction."]
    if str(base.get("amplify", "auto")) in ("auto", "matched"):
        shared = {"amplify": "optimizer"}
        notes.append(
            "All rows with amplify: optimizer; βδ only takes no optimizer step that matched could be measured by."
        )
    rows = (
        ("ROSU", "full", "relaxed", ("✓", "✓")),
        ("zero-order", "full", "none", ("✓", "✓*")),
        ("βδ only", "delta_only", "relaxed", ("✓", "✗")),
        ("ηv only", "v_only", "relaxed", ("✗", "✓")),
    )
    variants = tuple(
        Variant(label, {"method": "rosu", "components": components, "jacobian": jacobian, **shared}, marks)
        for label, components, jacobian, marks in rows
    )
    return Grid("components", "Components of the update", variants, ("βδ", "ηv"), notes=tuple(notes))


def _jacobian(base: Mapping[str, Any]) -> Grid:
    """fig:a1a2_ablation: the relaxed outer gradient, with neither and each of its two relaxations, and without any."""
    labels = {
        "relaxed": "ROSU (relaxed)",
        "none": "zero-order",
        "exact": "exact",
        "no_a1": "no A1 (projector differentiated)",
        "no_a2": "no A2 (true forget Hessian)",
    }
    variants = tuple(Variant(label, {"method": "rosu", "jacobian": mode}) for mode, label in labels.items())
    return Grid("jacobian", "Outer gradient", variants)


def _series(name: str, title: str, key: str, values: Sequence[Any], *notes: str) -> Grid:
    """One setting at several values."""
    symbol = SYMBOLS.get(key, key)
    variants = tuple(Variant(f"{symbol} = {value}", {key: value}) for value in values)
    return Grid(name, title, variants, axes=(key,), notes=notes)


#: Name → the grid on top of given settings.
GRIDS: dict[str, Callable[[Mapping[str, Any]], Grid]] = {
    "components": _components,
    "jacobian": _jacobian,
    "rank": lambda base: _series(
        "rank",
        "Rank of the protected retain subspace",
        "protect_rank",
        (1, 2, 4, 8),
        "k = 1 protects the mean retain gradient; above, the gradients of k sampled retain examples.",
    ),
    "rho": lambda base: _series("rho", "Perturbation radius", "rho", (0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5)),
    "retain_batch": lambda base: _series(
        "retain_batch", "Retain samples per forget sample", "retain_per_forget", (1, 2, 4, 8)
    ),
    "methods": lambda base: Grid("methods", "Methods", tuple(Variant(name, {"method": name}) for name in METHODS)),
}
