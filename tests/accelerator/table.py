"""The runs on the simulated accelerator as a table: differences to the CPU, and how often the host waits in a step.

python -m tests.accelerator.table
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from rosu_llm.geometry import METHODS
from tests.accelerator.cases import FAULTS, REPRESENTED, SPREAD, TRAINED
from tests.accelerator.device import missing
from tests.accelerator.results import Results, layouts, produce

HEADER = "| | runs | largest difference | the host waits, for us | in all |\n|---|---:|---:|---:|---:|"
NAMES = {"ddp": "DDP", "fsdp2": "FSDP2", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}


def rows(results: Results) -> list[str]:
    """One row for each group of runs."""
    groups = {
        "one device, every method": [f"npu/{name}" for name in TRAINED if name in METHODS],
        "one device, losses and options": [f"npu/{name}" for name in TRAINED if name not in METHODS],
        "one device, representation level": [f"npu/{name}" for name in REPRESENTED],
        **{f"two devices, {NAMES[layout]}": [f"{layout}/{name}" for name in SPREAD] for layout in layouts()},
    }
    return [f"| {title} {_figures(results, names)}" for title, names in groups.items()]


def _figures(results: Results, names: list[str]) -> str:
    worst = max(results.difference(name, _truth(name)) for name in names)
    waits = [results.found(name)["step"]["sync"] for name in names]
    ranges = [f"{min(w[key] for w in waits)}–{max(w[key] for w in waits)}" for key in ("own", "count")]
    mantissa, exponent = f"{worst:.0e}".split("e")
    power = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"| {len(names)} | {mantissa}·10{power} | {ranges[0]} | {ranges[1]} |"


def _truth(name: str) -> str:
    where, case = name.split("/")
    return f"cpu/{case}" if where == "npu" else f"cpu/two: {case}"


def faults(results: Results) -> str:
    """How long it took until both processes had ended."""
    found = [results.ended[f"{layout}/{name}"]["seconds"] for layout in layouts() for name in FAULTS]
    return f"{len(found)} runs with a fault: both processes had ended after {max(found):.0f} s at most, start included."


def main() -> None:
    if reason := missing():
        sys.exit(f"The simulated accelerator cannot be built here: {reason}.")
    with tempfile.TemporaryDirectory() as folder:
        results = produce(Path(folder))
        print("\n".join([HEADER, *rows(results), "", faults(results)]))


if __name__ == "__main__":
    main()
