"""The examination: what is installed, which layouts can run here, whether they give the weights of one process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypedDict

from ... import __version__
from ...compat import accelerator_kind
from ...errors import ConfigError
from ...recipes.estimate import Needs, estimate
from ...recipes.settings import Recipe
from .launch import StageResult, run_stages
from .machine import anonymous, free_disk, lacks, machine, packages
from .worker import backend_of

SCHEMA = "rosu/doctor/1"
#: Layout → how it is written, and what it needs beside this package's own requirements.
LAYOUTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "ddp": ("DDP", ()),
    "fsdp2": ("FSDP2", ("torch>=2.6", "accelerate>=1.6")),
    "zero1": ("ZeRO-1", ("deepspeed",)),
    "zero2": ("ZeRO-2", ("deepspeed",)),
    "zero3": ("ZeRO-3", ("deepspeed",)),
}
STAGES = {"local": "one process", "meet": "processes meet"}
#: ‖w − w_ref‖/‖w_ref − w₀‖ that rounding explains: up to 3e-5 on CPUs; what was broken on purpose makes at least 0.2.
LIMIT = 1e-3
#: Bytes that the results of the processes may take meanwhile.
SCRATCH = 64 << 20
#: States of a row: what was compared, what failed, what cannot run here, what was left out.
AGREES, DIFFERS, FAILED, MISSING, SKIPPED = "agrees", "differs", "failed", "cannot run here", "not tried"


class DoctorDocument(TypedDict):
    """``doctor.json``; nothing in it names the machine, its user or their files. Sizes are in bytes."""

    schema: str
    version: str
    machine: dict[str, Any]
    packages: list[dict[str, Any]]
    devices: list[dict[str, Any]]
    processes: int
    backend: str
    steps: int
    limit: float
    rows: list[dict[str, Any]]
    needs: dict[str, Any] | None
    problems: list[str]
    verdict: str


def check_processes(asked: int | None) -> int:
    """How many processes to start: as many as there are devices, two on CPUs, unless told otherwise."""
    kind = accelerator_kind()
    here = _device_count(kind)
    if asked is None:
        return here if kind else 2
    if asked < 1 or asked > (here if kind else 64):
        most = f"this machine has {here} {kind} device(s)" if kind else "up to 64 make sense on CPUs"
        raise ConfigError(f"--processes {asked} cannot be tried: give at least 1; {most}, one for each process.")
    return asked


def examine(
    processes: int,
    layouts: Iterable[str],
    *,
    recipe: Recipe | None = None,
    steps: int = 3,
    timeout: float = 300.0,
    out: Path | None = None,
) -> DoctorDocument:
    """Look, try, compare; ``out`` is where a run would write, for the free disk."""
    needs = None if recipe is None else estimate(recipe)
    kind = accelerator_kind() or "cpu"
    backend, installed, about = backend_of(kind), packages(), machine()
    here = {name: _missing(name, processes, backend) for name in LAYOUTS}
    chosen = [name for name in LAYOUTS if name in set(layouts) and here[name] is None]
    stages = ["local", *(["meet", *chosen] if chosen else [])]
    with TemporaryDirectory(prefix="rosu-doctor-") as folder:
        if free_disk(Path(folder)) < SCRATCH:
            raise ConfigError(
                f"The folder for temporary files has less than {SCRATCH >> 20} MiB free: make room, or set TMPDIR to "
                "another folder."
            )
        results = run_stages(Path(folder), stages, processes, steps=steps, timeout=timeout, cpu=kind == "cpu")
    rows = [_row(stage, results, backend) for stage in stages]
    for name in LAYOUTS:
        if name not in stages:
            state, why = (MISSING, here[name]) if here[name] else (SKIPPED, "left out by --layouts")
            rows.append({"stage": name, "name": LAYOUTS[name][0], "state": state, "why": why})
    devices = [{k: v for k, v in notes.items() if k != "seconds"} for notes in _result(results, "local").notes]
    about["disk_free"] = free_disk(out or Path(recipe.config.output_dir if recipe else "."))
    fits = None if needs is None or recipe is None else _fits(needs, recipe, rows, processes, devices, about)
    problems = [*_problems(installed, rows), *(fits["problems"] if fits else ())]
    return {
        "schema": SCHEMA,
        "version": __version__,
        "machine": about,
        "packages": installed,
        "devices": devices,
        "processes": processes,
        "backend": backend,
        "steps": steps,
        "limit": LIMIT,
        "rows": rows,
        "needs": fits,
        "problems": problems,
        "verdict": _verdict(rows, problems, f"{processes} {kind} process{'es' if processes > 1 else ''}"),
    }


def _device_count(kind: str | None) -> int:
    import torch

    return int(getattr(torch, kind).device_count()) if kind else 0


def _missing(layout: str, processes: int, backend: str) -> str | None:
    """Why the layout cannot run here."""
    import torch.distributed as dist

    if processes < 2:
        return "needs at least 2 processes, each with a device of its own"
    if not dist.is_available() or not dist.is_backend_available(backend):
        return f"torch was built without {backend}"
    return lacks(*LAYOUTS[layout][1])


def _result(results: Mapping[str, StageResult], stage: str) -> StageResult:
    return results.get(stage, StageResult("not tried, for what it stands on failed"))


def _row(stage: str, results: Mapping[str, StageResult], backend: str) -> dict[str, Any]:
    """One stage against the first process alone."""
    name = LAYOUTS[stage][0] if stage in LAYOUTS else STAGES[stage]
    result = _result(results, stage)
    row: dict[str, Any] = {"stage": stage, "name": name}
    if result.error is not None:
        tried = stage in results
        return {**row, "state": FAILED if tried else SKIPPED, "why": anonymous(result.error)[:600]}
    row["seconds"] = max(notes["seconds"] for notes in result.notes)
    if stage == "meet":
        return {**row, "state": AGREES, "why": f"over {backend}"}
    ends, truth = [found["end"] for found in result.tensors], _result(results, "local").tensors[0]
    moved = (truth["end"] - truth["start"]).norm()
    own = [float(((end - truth["end"]).norm() / moved).nan_to_num(nan=math.inf)) for end in ends]
    worst = max(own)
    row["difference"] = worst if math.isfinite(worst) else None
    if worst > LIMIT:
        at = own.index(worst)
        return {**row, "state": DIFFERS, "why": f"process {at} is {worst:.1e} of the way off, more than {LIMIT:g}"}
    if stage != "local" and not all(end.equal(ends[0]) for end in ends):
        return {**row, "state": DIFFERS, "why": "the processes do not have the same weights"}
    return {**row, "state": AGREES, "why": ""}


def _fits(
    needs: Needs,
    recipe: Recipe,
    rows: Sequence[Mapping[str, Any]],
    processes: int,
    devices: Sequence[Mapping[str, Any]],
    about: Mapping[str, Any],
) -> dict[str, Any]:
    """Memory of every layout that works here, and the disk, against what the recipe takes."""
    # what keeps a whole initial model or runs layers one by one is refused where weights are split
    possible = ("local", *LAYOUTS) if not needs.shape.whole else ("local", "ddp")
    on_device = min((device["free"] for device in devices if "free" in device), default=None)
    layouts, problems = [], []
    for row in rows:
        if row["stage"] in possible and row["state"] == AGREES:
            count = 1 if row["stage"] == "local" else processes
            free = about["memory_free"] // count if on_device is None else on_device
            layouts.append(
                {"name": row["name"], "memory": needs.step.peak_per_process(row["stage"], count), "free": free}
            )
    if layouts and all(entry["memory"] > entry["free"] for entry in layouts):
        least = min(layouts, key=lambda entry: entry["memory"] - entry["free"])
        need, free = least["memory"] / 2**30, least["free"] / 2**30
        problems.append(
            f"the recipe needs at least {need:.2f} GiB per process ({least['name']}, without activations), and "
            f"{free:.2f} GiB are free: train an adapter (lora_r), or use more devices"
        )
    if needs.disk > about["disk_free"]:
        need, free = needs.disk / 2**30, about["disk_free"] / 2**30
        problems.append(
            f"model and checkpoints take {need:.2f} GiB of disk, and {free:.2f} GiB are free: lower save_total_limit, "
            "or give another output_dir"
        )
    return {"model": _model_name(recipe), "layouts": layouts, "disk": needs.disk, "problems": problems}


def _model_name(recipe: Recipe) -> str:
    """The model as it is called on the hub; of a folder its last part."""
    name = str(recipe.arguments.model_name_or_path)
    return Path(name).name if Path(name).expanduser().exists() else name


def _problems(installed: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    problems = [
        f"{each['package']} {each['installed'] or 'is missing'}: {each['package']}{each['wanted']} is needed"
        for each in installed
        if not each["fits"] and (each["installed"] is not None or each["extra"] is None)
    ]
    wrong = [row for row in rows if row["state"] in (DIFFERS, FAILED)]
    return [*problems, *(f"{row['name']} {row['state']}: {row['why']}" for row in wrong)]


def _verdict(rows: Sequence[Mapping[str, Any]], problems: Sequence[str], where: str) -> str:
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        return f"NOT WELL: {problems[0]}{more}"
    fine = [row["name"] for row in rows if row["state"] == AGREES and row["stage"] in LAYOUTS]
    missing = [row["name"] for row in rows if row["state"] == MISSING]
    tried = f"{', '.join(fine)} on {where} agree with one process" if fine else "one process works, no layout was tried"
    return f"WELL: {tried}" + (f"; cannot run here: {', '.join(missing)}" if missing else "")
