"""The table of scripts/audit_small.sh: mean and standard deviation over seeds of what the three audits found.

python scripts/audit_small.py outputs/audit-small --methods rosu graddiff --seeds 0 1 2
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from rosu_llm.files import read_json, write_atomically


def relearned(key: str, metric: str = "forget_Q_A_Prob") -> Callable[[dict[str, Any]], float]:
    """A figure of the largest share."""

    def find(found: dict[str, Any]) -> float:
        lines = [line for line in found["relearn"]["summary"] if line["metric"] == metric]
        return float(max(lines, key=lambda line: line["share"])["mean"][key])

    return find


def rounded(key: str, figure: str = "1 − forget_Q_A_Prob") -> Callable[[dict[str, Any]], float]:
    """A ratio at 4 bits."""

    def find(found: dict[str, Any]) -> float:
        lines = found["quantize"]["ratios"]
        return float(next(each for each in lines if (each["precision"], each["figure"]) == ("rtn4", figure))[key])

    return find


def asked(way: str, measure: str) -> Callable[[dict[str, Any]], float]:
    """A difference to the retain model."""

    def find(found: dict[str, Any]) -> float:
        lines = found["extract"]["summary"]
        return float(next(e for e in lines if (e["way"], e["measure"]) == (way, measure))["difference"]["mean"])

    return find


COLUMNS: dict[str, Callable[[dict[str, Any]], float]] = {
    "prob before": relearned("before"),
    "prob after": relearned("after"),
    "R": relearned("R"),
    "area": relearned("area"),
    "Q at 4 bits": rounded("Q"),
    "Q_ctrl": rounded("Q_control"),
    "greedy − retain": asked("greedy", "rouge"),
    "prefix50 − retain": asked("prefix50", "rouge"),
    "compliance − retain": asked("compliance", "rouge"),
    "best of 2 − retain": asked("sample", "best rouge of 2"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--methods", nargs="+", required=True)
    parser.add_argument("--seeds", nargs="+", required=True)
    options = parser.parse_args()
    lines = [f"| method | {' | '.join(COLUMNS)} |", "|---|" + "---:|" * len(COLUMNS)]
    for method in options.methods:
        found = []
        for seed in options.seeds:
            folder = options.out / "audits" / f"{method}-{seed}"
            kinds = ("relearn", "quantize", "extract")
            found.append({kind: read_json(folder / f"audit_{kind}.json") for kind in kinds})
        cells = []
        for column in COLUMNS.values():
            values = [column(each) for each in found]
            spread = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
            cells.append(f"{mean(values):.3f}{spread}")
        lines.append(f"| {method} | {' | '.join(cells)} |")
    text = "\n".join(lines) + "\n"
    write_atomically(options.out / "table.md", text)
    print(text, end="")


if __name__ == "__main__":
    main()
