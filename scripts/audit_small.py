"""The two things scripts/audit_small.sh computes itself: each method's learning rate, and the table over seeds.

    python scripts/audit_small.py choose outputs/audit-small --methods rosu graddiff --rates 5e-5 1e-4 --seed 10
    python scripts/audit_small.py table outputs/audit-small --methods rosu graddiff --seeds 0 1 2

The rate chosen is the one whose model is closest to the retain model in exact memorisation of the forget set plus
probability on the retain set: methods are compared where they forget about as much, not where one forgets too little.
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


#: What a rate is chosen by.
DEPTH = ("exact_memorization", "retain_Q_A_Prob")


def choose(out: Path, methods: list[str], rates: list[str], seed: str) -> list[str]:
    """Write ``rates/METHOD``; one line of a table for each method and rate."""

    def figures(name: str) -> list[float]:
        found = read_json(out / "evals" / name / "TOFU_SUMMARY.json")
        return [float(found[key]) for key in DEPTH]

    control = figures(f"retain-{seed}")
    lines = [f"| method | rate | {' | '.join(DEPTH)} | distance |", "|---|---:|---:|---:|---:|"]
    lines.append(f"| retain model |  | {' | '.join(f'{value:.3f}' for value in control)} |  |")
    for method in methods:
        distances: dict[str, float] = {}
        for rate in rates:
            own = figures(f"{method}-{rate}-{seed}")
            distances[rate] = sum(abs(a - b) for a, b in zip(own, control, strict=True))
            cells = " | ".join(f"{value:.3f}" for value in (*own, distances[rate]))
            lines.append(f"| {method} | {rate} | {cells} |")
        write_atomically(out / "rates" / method, min(distances, key=distances.__getitem__) + "\n")
    return lines


def table(out: Path, methods: list[str], seeds: list[str]) -> list[str]:
    """Mean ± standard deviation over seeds."""
    lines = [f"| method | {' | '.join(COLUMNS)} |", "|---|" + "---:|" * len(COLUMNS)]
    kinds = ("relearn", "quantize", "extract")
    for method in methods:
        folders = [out / "audits" / f"{method}-{seed}" for seed in seeds]
        found = [{kind: read_json(folder / f"audit_{kind}.json") for kind in kinds} for folder in folders]
        cells = []
        for column in COLUMNS.values():
            values = [column(each) for each in found]
            spread = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
            cells.append(f"{mean(values):.3f}{spread}")
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["choose", "table"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--methods", nargs="+", required=True)
    parser.add_argument("--rates", nargs="+", default=[])
    parser.add_argument("--seed", default="10", help="that of the search")
    parser.add_argument("--seeds", nargs="+", default=[])
    options = parser.parse_args()
    if options.action == "choose":
        name, lines = "rates.md", choose(options.out, options.methods, options.rates, options.seed)
    else:
        name, lines = "table.md", table(options.out, options.methods, options.seeds)
    text = "\n".join(lines) + "\n"
    write_atomically(options.out / name, text)
    print(text, end="")


if __name__ == "__main__":
    main()
