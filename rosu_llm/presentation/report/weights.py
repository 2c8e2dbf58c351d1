"""How far each part of the model moved: ‖w − w₀‖/‖w₀‖ by layer and kind of matrix, as a map per run.

Both checkpoints are read as safetensors, one tensor at a time, and summed in float64. Of a LoRA adapter the change is
scale·BA, whose norm needs only the small Gram matrices: ‖BA‖² = tr(BᵀB·AAᵀ).
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from ...analysis.coupling.parts import Part, part_of
from ...errors import DataError, RosuError
from ...representation.files import CheckpointFiles
from ..blocks import Block, Figure, Missing, Section, Text, shown, text_table
from ..charts import heat_map, layers_and_kinds
from .reading import ReportedRun

CHUNK = 1 << 20
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"


class Change(NamedTuple):
    """Relative change by part, and what could not be compared."""

    parts: Mapping[Part, float]
    total: float
    notes: tuple[str, ...] = ()


def weights(runs: Sequence[ReportedRun], base: Path | None) -> Section:
    """Maps of ‖w − w₀‖/‖w₀‖ on one colour scale."""
    blocks: list[Block] = []
    changes: dict[int, Change] = {}
    if any(run.kind == "rosu demo" for run in runs):
        blocks.append(Missing("rosu demo keeps no weights."))
    for at, run in enumerate(runs):
        if run.kind in ("rosu demo", "rosu sweep", "rosu audit", "rosu train --requests"):
            continue
        start = base or find_base(run.base)
        if not any(run.folder.glob("*.safetensors")):
            blocks.append(Missing(f"{run.label} holds no weights (*.safetensors)."))
        elif start is None:
            known = f"{run.base}, which is not on this machine" if run.base else "not recorded"
            blocks.append(Missing(f"{run.label}: the model it started from is {known}. Pass --base FOLDER to compare."))
        else:
            try:
                changes[at] = weight_change(start, run.folder)
            except (RosuError, OSError, KeyError, ValueError) as error:
                blocks.append(Missing(f"{run.label}: its weights cannot be compared with {start.name}. {error}"))
    moved = [value for change in changes.values() for value in change.parts.values() if value > 0]
    limits = (min(moved), max(moved)) if moved else (0.1, 1.0)
    if changes:
        blocks.insert(0, Text("‖w − w₀‖ / ‖w₀‖ against the model each run started from. Empty cells did not move."))
    blocks += [_figure(runs[at].label, at, change, limits) for at, change in changes.items()]
    return Section("weights", "Weight change", blocks or [Missing("No run has weights to compare.")])


def _figure(label: str, at: int, change: Change, limits: tuple[float, float]) -> Figure:
    layers, kinds = layers_and_kinds(change.parts)
    rows = [
        ("outside layers" if n is None else str(n), *(shown(change.parts.get((n, k)), 3) for k in kinds))
        for n in layers
    ]
    (layer, kind), most = max(change.parts.items(), key=lambda part: part[1])
    where = kind + ("" if layer is None else f" of layer {layer}")
    data = text_table(f"Relative weight change: {label}", ("layer", *kinds), rows, notes=change.notes)
    text = f"{label}: all weights together moved by {shown(change.total, 3)}; most did {where} ({shown(most, 3)})."
    draw, size = heat_map(change.parts, "relative change", limits, log=True)
    return Figure(f"weights_{at}", f"Weight change: {label}", text, draw, data, text, size)


def find_base(name: str | None) -> Path | None:
    """The folder of the initial model: a local one, or the hub's cache on this machine; nothing is downloaded."""
    if not name:
        return None
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return None
    return Path(cached).parent if isinstance(cached, str) else None


def weight_change(base: Path, result: Path) -> Change:
    """The change from ``base`` to ``result``, both folders of safetensors; ``result`` may hold a LoRA adapter."""
    if base.resolve() == result.resolve():
        raise DataError(f"{base} is the run's own folder, not the model it started from.")
    files = CheckpointFiles(base)
    notes: list[str] = []
    if (result / ADAPTER).is_file():
        pairs = _adapter_norms(files, result, notes)
    else:
        pairs = _tensor_norms(files, CheckpointFiles(result), notes)
    sums: dict[Part, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, moved, size in pairs:
        part = sums[part_of(name)]
        part[0] += moved
        part[1] += size
    if not sums:
        raise DataError(f"{result} and {base} have no tensor in common: is it the model the run started from?")
    total = [sum(part[at] for part in sums.values()) for at in (0, 1)]
    return Change({part: _ratio(*pair) for part, pair in sums.items()}, _ratio(*total), tuple(notes))


def _ratio(moved: float, size: float) -> float:
    return math.sqrt(moved / size) if size > 0 else math.nan


def _tensor_norms(base: CheckpointFiles, new: CheckpointFiles, notes: list[str]) -> Iterator[tuple[str, float, float]]:
    """(name, ‖w − w₀‖², ‖w₀‖²) of every tensor that both have."""
    shared = [n for n in base.entries if n in new.entries and base.entries[n].shape == new.entries[n].shape]
    alone = sorted((base.entries.keys() | new.entries.keys()) - set(shared))
    if alone:
        notes.append(f"{len(alone)} tensors are not in both or differ in shape and are left out, such as {alone[0]}.")
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in shared:
        groups[base.where[name], new.where[name]].append(name)
    for names in groups.values():  # within one pair of files both are read in the same order
        for (name, old), (_, now) in zip(base.tensors(names), new.tensors(names), strict=True):
            if old.is_floating_point():
                yield name, *_squares(old.flatten(), now.flatten())


def _squares(old: Tensor, new: Tensor) -> tuple[float, float]:
    moved = size = 0.0
    for a, b in zip(old.split(CHUNK), new.split(CHUNK), strict=True):
        before = a.double()
        moved += float((b.double() - before).square().sum())
        size += float(before.square().sum())
    return moved, size


def _adapter_norms(base: CheckpointFiles, folder: Path, notes: list[str]) -> Iterator[tuple[str, float, float]]:
    """The same for the matrices that the adapter changes; all others did not move and count as such."""
    config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    odd = [key for key in ("use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out") if config.get(key)]
    if odd:
        raise DataError(f"The adapter uses {', '.join(odd)}, which is not read here: merge it into its base first.")
    rank = config["r"]
    scale = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
    tensors = load_file(folder / ADAPTER)
    moved = {}
    for name, a in tensors.items():
        if name.endswith(".lora_A.weight"):
            b = tensors[name.replace(".lora_A.", ".lora_B.")].double()
            stem = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            product = torch.trace((b.T @ b) @ (a.double() @ a.double().T))
            moved[f"{stem}.weight"] = scale**2 * max(0.0, float(product))
    lost = sorted(moved.keys() - base.entries.keys())
    if lost:
        notes.append(f"{len(lost)} matrices of the adapter are not in the base model, such as {lost[0]}; left out.")
    for name, old in base.tensors(base.entries):
        if old.is_floating_point():
            yield name, moved.get(name, 0.0), _squares(old.flatten(), old.flatten())[1]
