"""The safeguard audit: did the stabiliser τ or the degeneracy threshold ε_q ever take effect in a run?

The trainer's logs hold ‖r‖² and ‖q‖. τ weakens the protection unless it is small against ‖r‖²; at or below ‖q‖ = ε_q a
step falls back to plain retain descent (paper, app:sensitivity). A log that covers several steps holds means, the
smallest values and the number of fallbacks (``norm/q_min``, ``step/fallbacks``). If older logs lack the latter, the
result says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any, TypedDict

from ..errors import DataError
from ..evaluation.provenance import read_hydra, read_record
from ..recipes.record import RECORD_FILE
from ..training.checkpoints import last_complete
from ..training.config import MethodArguments

SCHEMA = "rosu/audit-safeguards/1"
STATE = "trainer_state.json"

Entry = Mapping[str, Any]


class SafeguardsDocument(TypedDict):
    """``audit_safeguards.json``; a figure of a run is None where its logs do not tell.

    ``retain_sq`` and ``q`` are distributions over the logs of a run beside their threshold: ``below`` counts logs at or
    below it, ``minimum_exact`` is false where a log of several steps holds only their mean, which hides the lowest.
    """

    schema: str
    runs: list[dict[str, Any]]
    notes: list[str]


@dataclass(frozen=True)
class Thresholds:
    """τ and ε_q of a run; unless they are ``recorded`` in its folder, these are the defaults, which are the paper's."""

    tau: float = MethodArguments.tau
    tau_mode: str = MethodArguments.tau_mode
    eps_q: float = MethodArguments.eps_q
    recorded: bool = False


def audit_safeguards(runs: Sequence[Path]) -> SafeguardsDocument:
    """The document of several runs; whatever a run lacks becomes a note, not an error."""
    if not runs:
        raise DataError("No run was given: name at least one output folder of rosu train.")
    for run in runs:
        if not run.exists():
            raise DataError(f"{run} does not exist: give the output folder of a run, or its {STATE}.")
    names = [(run if run.is_dir() else run.parent).resolve().name for run in runs]
    labels = [name if names.count(name) == 1 else str(run) for name, run in zip(names, runs, strict=True)]
    return {"schema": SCHEMA, "runs": list(map(audit_run, labels, runs)), "notes": []}


def audit_run(label: str, run: Path) -> dict[str, Any]:
    """One run's distributions, counts and notes."""
    notes: list[str] = []
    entries, steps = _entries(run, notes)
    limits = thresholds(run if run.is_dir() else run.parent)
    if not limits.recorded:
        notes.append(f"The run does not record τ and ε_q: {limits.tau:g} and {limits.eps_q:g} are assumed.")
    spans = _spans(entries)
    per_step = bool(entries) and all(span == 1 for span in spans)
    if entries and not per_step:
        notes.append(
            f"Logs cover up to {max(spans)} steps: medians and histograms are over means of those "
            "(logging_steps: 1 gives every step)."
        )
    relative = limits.tau_mode == "relative"
    if relative:
        notes.append("τ is relative to ‖r‖² in this run: there is nothing to fall below.")
    fallbacks, exact = _fallbacks(entries, spans, notes)
    residues = [value for entry in entries if (value := _worst(entry, "coupling/residue", "max")) is not None]
    return {
        "run": label,
        "path": str(run),
        "steps": steps,
        "logged": len(entries),
        "per_step": per_step,
        "tau": limits.tau,
        "tau_mode": limits.tau_mode,
        "eps_q": limits.eps_q,
        "retain_sq": _distribution(entries, "norm/retain_sq", None if relative else limits.tau, "‖r‖²", spans, notes),
        "q": _distribution(entries, "norm/q", limits.eps_q, "‖q‖", spans, notes),
        "fallbacks": fallbacks,
        "fallbacks_exact": exact,
        "residue_max": max(residues, default=None),
        "notes": notes,
    }


def thresholds(folder: Path) -> Thresholds:
    """From the record of ``rosu train``, or from OpenUnlearning's record of its configuration."""
    settings, job = read_record(folder / RECORD_FILE).get("settings", {}), read_hydra(folder)
    found: dict[str, Any] = {}
    for name, kind in (("tau", float), ("tau_mode", str), ("eps_q", float)):
        value = settings.get(name, job.get(f"trainer.method_args.{name}"))
        if value is not None:
            found[name] = kind(value)
    return Thresholds(**found, recorded={"tau", "eps_q"} <= set(found))


def _entries(run: Path, notes: list[str]) -> tuple[list[Entry], int | None]:
    """The logs of optimizer steps, in order, and the number of steps taken."""
    path = run
    if run.is_dir():
        path = run / STATE
        checkpoint = last_complete(run)
        if not path.is_file() and checkpoint is not None:
            path = checkpoint / STATE
            notes.append(f"The run has no {STATE} of its own; the logs are those up to {checkpoint.name}.")
    if not path.is_file():
        notes.append(f"There are no logs: neither {STATE} nor a checkpoint with one.")
        return [], None
    try:
        state = read_record(path)
    except DataError as error:
        notes.append(str(error))
        return [], None
    history = state.get("log_history")
    rows: list[Entry] = [entry for entry in history if isinstance(entry, dict)] if isinstance(history, list) else []
    known = [row for row in rows if {"norm/retain_sq", "norm/q", "step/fallback"} & row.keys()]
    if not known:
        notes.append("The logs hold no norm/retain_sq, norm/q or step/fallback: this method computes none of them.")
    steps = state.get("global_step")
    return known, steps if isinstance(steps, int) else None


def _spans(entries: Sequence[Entry]) -> list[int]:
    """How many steps each log covers."""
    ends = [int(entry.get("step", i + 1)) for i, entry in enumerate(entries)]
    return [max(1, end - before) for before, end in zip([0, *ends], ends, strict=False)]


def _number(entry: Entry, key: str) -> float | None:
    value = entry.get(key)
    usable = isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
    return float(value) if usable else None  # type: ignore[arg-type]


def _worst(entry: Entry, key: str, reduction: str) -> float | None:
    """The extreme value over the steps of a log if it was logged, else their mean."""
    found = _number(entry, f"{key}_{reduction}")
    return _number(entry, key) if found is None else found


def _distribution(
    entries: Sequence[Entry], key: str, threshold: float | None, symbol: str, spans: Sequence[int], notes: list[str]
) -> dict[str, Any] | None:
    present = [(entry, span) for entry, span in zip(entries, spans, strict=True) if key in entry]
    finite = [(entry, span) for entry, span in present if _number(entry, key) is not None]
    if len(finite) < len(present):
        notes.append(f"{symbol} is NaN or infinite in {len(present) - len(finite)} of {len(present)} logs; left out.")
    if not finite:
        if entries:
            notes.append(f"{symbol} is not in the logs.")
        return None
    lowest = [value for entry, _ in finite if (value := _worst(entry, key, "min")) is not None]
    exact = all(span == 1 or _number(entry, f"{key}_min") is not None for entry, span in finite)
    if not exact:
        notes.append(f"{symbol}: logs hold means only, so single steps may lie lower than the minimum shown.")
    values = [float(entry[key]) for entry, _ in finite]
    return {
        "min": min(lowest),
        "median": median(values),
        "max": max(values),
        "threshold": threshold,
        "below": 0 if threshold is None else sum(value <= threshold for value in lowest),
        "count": len(finite),
        "minimum_exact": exact,
        "values": values,
        "steps": [int(entry.get("step", i + 1)) for i, (entry, _) in enumerate(finite)],
    }


def _fallbacks(entries: Sequence[Entry], spans: Sequence[int], notes: list[str]) -> tuple[int | None, bool]:
    """Their number, and whether it is exact: if only a mean is logged, that times the steps may be no whole number."""
    counts: list[int] = []
    exact = True
    for entry, span in zip(entries, spans, strict=True):
        count, share = _number(entry, "step/fallbacks"), _number(entry, "step/fallback")
        if count is None and share is not None:
            count = share * span
            exact = exact and abs(count - round(count)) < 1e-6 * span
        if count is not None:
            counts.append(round(count))
    if not exact:
        notes.append("The number of fallbacks is rounded: some steps were skipped or not logged.")
    return (sum(counts), exact) if counts else (None, False)
