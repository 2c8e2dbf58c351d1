"""A few TOFU authors as a folder with TOFU's own file names, for runs on small machines.

    python scripts/tofu_subset.py locuslab/TOFU outputs/tofu-small-data --limit 20

The first questions of forget01 (an author is 20 of them), three times as many of retain99, and as many of every
other set that an evaluation of forget01 reads. ``full`` is what the target model learns: both of the former.
``level`` holds further authors that nobody learns, for ``forget_until: holdout``: not those of holdout01, by which the
result is judged.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rosu_llm.data.tofu import tofu_rows
from rosu_llm.files import write_atomically

RETAIN_PER_FORGET = 3
SETS = {
    "forget01": 1,
    "forget01_perturbed": 1,
    "retain99": RETAIN_PER_FORGET,
    "retain_perturbed": 1,
    "holdout01": 1,
    "real_authors_perturbed": 1,
    "world_facts_perturbed": 1,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", help="locuslab/TOFU, or a folder of its files")
    parser.add_argument("out", type=Path, help="folder to make")
    parser.add_argument("--limit", type=int, default=20, help="questions to forget, and to ask per set")
    options = parser.parse_args()
    if options.limit < 1:
        parser.error(f"--limit {options.limit} leaves nothing to forget: give 1 or more.")
    rows = {name: tofu_rows(options.source, name, limit=times * options.limit) for name, times in SETS.items()}
    known = {row["question"] for row in tofu_rows(options.source, "holdout01")}
    others = [row for row in tofu_rows(options.source, "holdout10") if row["question"] not in known]
    rows["level"] = others[: 2 * options.limit]
    rows["full"] = [*rows["retain99"], *rows["forget01"]]
    for name, part in rows.items():
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part)
        write_atomically(options.out / f"{name}.json", lines)


if __name__ == "__main__":
    main()
