"""Invented results in the form of ``rosu ablate``, only to show that every table and plot can be made of them."""

from __future__ import annotations

from itertools import product
from pathlib import Path

from ..experiments.store import DONE, Record, Store, cell_key


def write_toy_results(folder: Path) -> Path:
    """Cells over two radii, two retain batch sizes and two seeds, below ``folder``; returns it."""
    store, task = Store(folder / "cells"), {"task": "tofu"}
    for rho, retain, seed in product((0.2, 0.4), (1, 2), (0, 1)):
        settings = {"rho": rho, "retain_per_forget": retain, "per_device_train_batch_size": 4}
        memory, utility = 0.3 + rho / 4 + seed / 50, 0.7 + retain / 10 - seed / 50
        figures = {"Mem": memory, "Util": utility, "Agg_MU": 2 * memory * utility / (memory + utility)}
        store.put(Record(cell_key(task, settings, seed), "toy", seed, DONE, figures, task=task, settings=settings))
    return folder
