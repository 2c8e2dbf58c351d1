"""The same weights however they are spread: one process against DDP, FSDP2 and DeepSpeed ZeRO-1/2/3.

A tiny Llama takes several steps over the same global windows in every layout, on gloo over loopback. Printed for
each: ‖w − w_ref‖/‖w_ref − w₀‖ against one process (accumulation 1), the memory of captured buffers per rank in units
of the trainable parameters, and what a step exchanges beyond the layout's own three backward passes and optimizer
step: bytes of scalars, and weights gathered again in units of the parameters. Negative controls break one thing on
purpose and must fail the same check.

    python scripts/equivalence.py                                  # everything, 2 and 3 processes
    python scripts/equivalence.py --controls                       # and the controls
    python scripts/equivalence.py --layouts ddp fsdp2 --worlds 2 --smoke
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from equivalence_worker import HONEST, results, worker

LAYOUTS = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
AMPLIFY = ("direct", "optimizer", "matched")
LIMIT = {"sgd": 1e-6, "adamw": 1e-4}


def launch(world: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all layouts in the same worker processes; their results."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.pt"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world)]
        command += [__file__, "--worker", "--expect-world", str(world), "--out", str(out)]
        command += ["--steps", str(arguments.steps), "--accumulations", *map(str, arguments.accumulations)]
        command += ["--optimizers", *arguments.optimizers, "--amplify", *arguments.amplify]
        command += ["--layouts", *arguments.layouts, *(["--controls"] if arguments.controls else [])]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "TORCH_EXTENSIONS_DIR": str(Path(sys.prefix) / "torch_extensions"),
        }
        limit = arguments.timeout * len(arguments.layouts)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
        if done.returncode != 0:
            raise SystemExit(f"{world} processes failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        found: list[dict[str, Any]] = torch.load(out, weights_only=True)
        return found


def compare(found: list[dict[str, Any]], reference: dict[tuple[Any, ...], Any]) -> list[dict[str, Any]]:
    """One row per case: honest ones must agree with one process, broken ones must not."""
    rows = []
    for result in found:
        optimizer, amplify, accumulation = result["case"]
        truth = reference[optimizer, amplify]
        difference = float((result["weights"] - truth["weights"]).norm()) / truth["moved"]
        honest = result["sabotage"] == HONEST
        near = difference <= LIMIT[optimizer]
        rows.append(
            {
                "layout": result["layout"],
                "sabotage": None if honest else result["sabotage"],
                "optimizer": optimizer,
                "amplify": amplify,
                "accumulation": accumulation,
                "difference": difference,
                "replicas_equal": result["replicas_equal"],
                "copies_per_rank": result["copies"],
                "scalar_bytes_per_step": result["scalar_bytes"],
                "gathered_copies_per_step": result["gathered"],
                "good": near and result["replicas_equal"] if honest else not near,
            }
        )
    return rows


def show(rows: list[dict[str, Any]], steps: int) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"Difference to one process after {steps} steps: ‖w − w_ref‖/‖w_ref − w₀‖")
    for column in ("layout", "optimizer", "amplify", "acc.", "difference", "copies/rank", "scalar bytes", "gathers"):
        table.add_column(column)
    for row in rows:
        name = f"{row['layout']}×{row['world']}" + (f", {row['sabotage']}" if row["sabotage"] else "")
        table.add_row(
            name, row["optimizer"], row["amplify"], str(row["accumulation"]), f"{row['difference']:.1e}",
            f"{row['copies_per_rank']:.2f}", f"{row['scalar_bytes_per_step']:.0f}",
            f"{row['gathered_copies_per_step']:.2f}", style=None if row["good"] else "bold red",
        )  # fmt: skip
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument("--worlds", nargs="+", type=int, default=[2, 3])
    parser.add_argument("--accumulations", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--optimizers", nargs="+", default=list(LIMIT), choices=list(LIMIT))
    parser.add_argument("--amplify", nargs="+", default=list(AMPLIFY), choices=list(AMPLIFY))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--controls", action="store_true", help="also run the negative controls")
    parser.add_argument("--smoke", action="store_true", help="two steps, one amplification mode")
    parser.add_argument("--timeout", type=int, default=600, help="seconds for one layout")
    parser.add_argument("--json", metavar="FILE", help="also write the rows here")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    parser.add_argument("--expect-world", type=int, default=1, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        worker(arguments)
        return 0
    if arguments.smoke:
        arguments.steps, arguments.amplify = 2, ["matched"]

    fewest = min(arguments.accumulations)
    reference = {tuple(r["case"][:2]): r for r in results("local", arguments) if r["case"][2] == fewest}
    rows = []
    for world in arguments.worlds:
        rows += [{"world": world, **row} for row in compare(launch(world, arguments), reference)]
    show(rows, arguments.steps)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    failed = sum(not row["good"] for row in rows)
    print(f"{len(rows) - failed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
