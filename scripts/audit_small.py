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

#: The documents of one method and seed by kind, and a role → a figure, or None where it has no meaning.
Column = Callable[[dict[str, Any], str], float | None]


def relearned(metric: str, at: int, share: float = 1.0) -> Column:
    """A metric before (0) or after (−1) the attack with a share of the forget set."""

    def find(found: dict[str, Any], role: str) -> float | None:
        cells = [cell for cell in found["relearn"]["cells"] if (cell["role"], cell["share"]) == (role, share)]
        ordered = sorted(cells, key=lambda cell: int(cell["step"]))
        return float(ordered[at]["figures"][metric]) if ordered else None

    return find


def robustness(share: float) -> Column:
    """R: how much of what the attack brings back the control learns, too."""

    def find(found: dict[str, Any], role: str) -> float | None:
        lines = [line for line in found["relearn"]["summary"] if line["metric"] == "forget_Q_A_Prob"]
        known = [float(line["mean"]["R"]) for line in lines if line["share"] == share and role == "unlearned"]
        return known[0] if known else None

    return find


def figure(name: str, precision: str = "full", kind: str = "figures") -> Column:
    """A metric or score of the model in one precision."""

    def find(found: dict[str, Any], role: str) -> float | None:
        cells = found["quantize"]["cells"]
        cell = next(each for each in cells if (each["role"], each["precision"]) == (role, precision))
        value = cell[kind].get(name)
        return None if value is None else float(value)

    return find


def rebucketed(found: dict[str, Any], role: str) -> float | None:
    """Share of weights that 4-bit rounding puts elsewhere than the initial model's."""
    return float(found["quantize"]["buckets"]["rtn4"]["other_bucket"]) if role == "unlearned" else None


def asked(way: str, measure: str = "rouge") -> Column:
    """ROUGE-L recall of what is said."""

    def find(found: dict[str, Any], role: str) -> float | None:
        lines = found["extract"]["summary"]
        line = next((each for each in lines if (each["way"], each["measure"]) == (way, measure)), None)
        return None if line is None else float(line["means"][role]["mean"])

    return find


TABLES: dict[str, dict[str, Column]] = {
    "relearned and rounded": {
        "EM": relearned("exact_memorization", 0),
        "retain prob": relearned("retain_Q_A_Prob", 0),
        "Priv": figure("Priv", kind="scores"),
        "prob": relearned("forget_Q_A_Prob", 0),
        "relearned from ¼": relearned("forget_Q_A_Prob", -1, 0.25),
        "R from ¼": robustness(0.25),
        "relearned from all": relearned("forget_Q_A_Prob", -1),
        "R from all": robustness(1.0),
        "prob at 4 bits": figure("forget_Q_A_Prob", "rtn4"),
        "other bucket": rebucketed,
    },
    "extracted, ROUGE-L recall": {
        **{way: asked(way) for way in ("greedy", "prefix25", "prefix50", "paraphrase", "translated")},
        **{way: asked(way) for way in ("compliance", "fewshot")},
        "best of 16": asked("sample", "best rouge of 16"),
    },
}
#: Rows for the controls: role → label.
CONTROLS = {"initial": "before unlearning", "retain": "retain model"}


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
            if not (out / "evals" / f"{method}-{rate}-{seed}").is_dir():  # training failed, as at too large a rate
                lines.append(f"| {method} | {rate} | – | – | – |")
                continue
            own = figures(f"{method}-{rate}-{seed}")
            distances[rate] = sum(abs(a - b) for a, b in zip(own, control, strict=True))
            cells = " | ".join(f"{value:.3f}" for value in (*own, distances[rate]))
            lines.append(f"| {method} | {rate} | {cells} |")
        if not distances:
            raise SystemExit(f"No rate of {method} worked; see {out / 'logs'}.")
        write_atomically(out / "rates" / method, min(distances, key=distances.__getitem__) + "\n")
    return lines


def table(out: Path, methods: list[str], seeds: list[str]) -> list[str]:
    """Mean ± standard deviation over seeds: the controls, then every method."""
    kinds = ("relearn", "quantize", "extract")

    def documents(method: str, seed: str) -> dict[str, Any]:
        return {kind: read_json(out / "audits" / f"{method}-{seed}" / f"audit_{kind}.json") for kind in kinds}

    rows = [(label, methods[0], role) for role, label in CONTROLS.items()]
    rows += [(method, method, "unlearned") for method in methods]
    found = {method: [documents(method, seed) for seed in seeds] for method in methods}
    lines: list[str] = []
    for title, columns in TABLES.items():
        lines += [*([""] if lines else []), f"| {title} | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
        for label, method, role in rows:
            cells = []
            for column in columns.values():
                values = [value for each in found[method] if (value := column(each, role)) is not None]
                spread = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
                cells.append(f"{mean(values):.3f}{spread}" if values else "–")
            lines.append(f"| {label} | {' | '.join(cells)} |")
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
