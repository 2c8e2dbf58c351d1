"""``rosu audit orthogonality|safeguards|sensitivity …``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..analysis.orthogonality.gradients import Progress

KINDS = {
    "orthogonality": "does a direction that is neutral for a retain mini-batch stay neutral for the whole retain set?",
    "safeguards": "did τ and ε_q ever act in these runs? (from their logs)",
    "sensitivity": "figures over ρ and over the retain batch size, from sweeps and ablations",
}


def main(argv: Sequence[str]) -> int:
    """Dispatch to the kind of audit."""
    parser = argparse.ArgumentParser(
        prog="rosu audit",
        description="Check what the method assumes, before and after training.",
        epilog="\n".join(["kinds:", *(f"  {kind:<15}{text}" for kind, text in KINDS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kind", choices=list(KINDS), metavar="kind", help="'rosu audit KIND -h' explains it")
    kind = parser.parse_args(argv[:1] or ["-h"]).kind
    verbs = {"orthogonality": _orthogonality, "safeguards": _safeguards, "sensitivity": _sensitivity}
    return verbs[kind](argv[1:])


def _orthogonality(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="rosu audit orthogonality",
        description="Over random mini-batch pairs at the model as loaded: the error |cos(g_full, u_mini)| of "
        "mini-batch retain-neutrality against the full retain gradient, and its bound, for each retain batch size. "
        "Stop it and the same command goes on. Settings of 'rosu train' are accepted as flags: --max-length 256.",
        epilog="Example: rosu audit orthogonality --config configs/recipes/tofu_llama-3.2-1b.yaml --out audit",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="a configuration of 'rosu train': model, data, losses")
    parser.add_argument("--pairs", type=int, default=500, metavar="N", help="pairs per batch size (default 500)")
    parser.add_argument(
        "--batch-sizes", type=int, nargs="+", default=(), metavar="N", help="retain batch sizes (default 4 8 16 …)"
    )
    parser.add_argument("--forget-batch-size", type=int, metavar="N", help="default: the window of the configuration")
    parser.add_argument("--seed", type=int, metavar="N", help="of the pairs (default: that of the configuration)")
    parser.add_argument(
        "--per-sample",
        default="auto",
        metavar="auto|yes|no",
        help="compute every sample's gradient once and keep all of them in memory (auto: where half of it is enough)",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder (default: output_dir of the configuration)")
    parser.add_argument("--smoke", action="store_true", help="a toy model and toy data in DIR/smoke; seconds")
    parser.add_argument("--accelerate-config", metavar="NAME", help="several devices: ddp, fsdp2, zero1, zero2, zero3")
    parser.add_argument("--num-processes", type=int, metavar="N", help="number of devices for --accelerate-config")
    options, rest = parser.parse_known_args(argv)

    from ..recipes.settings import read_config, read_flags

    if (options.accelerate_config or options.num_processes) and not options.smoke:
        from .launcher import launch

        return launch(options.accelerate_config, options.num_processes, argv, ("audit", "orthogonality"))
    values = {**(read_config(options.config) if options.config else {}), **read_flags(rest)}
    values |= {} if options.seed is None else {"seed": options.seed}
    out = options.out or Path(str(values.get("output_dir") or "audit"))
    _quiet()

    from ..analysis.orthogonality.run import Options, audit

    asked = Options(
        pairs=options.pairs,
        batch_sizes=options.batch_sizes,
        forget_batch_size=options.forget_batch_size,
        per_sample=options.per_sample,
    )
    if options.smoke:
        from ..toys.recipe import toy_values

        out = out / "smoke"
        values = {**toy_values(values, out), "chat_format": None}
        asked = Options(pairs=5, batch_sizes=(1, 2, 4), per_sample=options.per_sample)
    with _bars() as progress:
        result = audit(values, asked, out, progress)
    if result is not None:
        from ..files import write_json
        from ..presentation.orthogonality import orthogonality_markdown, violins

        path = write_json(out / "audit_orthogonality.json", result)
        _present(path, orthogonality_markdown(result), {"audit_orthogonality.png": lambda file: violins(result, file)})
    return 0


def _safeguards(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="rosu audit safeguards",
        description="Distributions of ‖r‖² against τ and of ‖q‖ against ε_q over runs, and how often a step fell back, "
        "from the trainer's logs. Several runs are drawn over each other.",
        epilog="Example: rosu audit safeguards outputs/run --out audit",
        allow_abbrev=False,
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="output folder of 'rosu train'")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder (default: the run's own, if there is one run)")
    parser.add_argument("--smoke", action="store_true", help="a toy run in DIR/smoke in place of RUN; seconds")
    options = parser.parse_args(argv)

    from ..analysis.safeguards import audit_safeguards
    from ..errors import ConfigError
    from ..files import write_json
    from ..presentation.safeguards import histograms, safeguards_markdown

    out, runs = options.out, options.runs
    if options.smoke:
        from ..toys.train import run_smoke

        _quiet()
        run = out or Path("audit")
        run_smoke({"output_dir": str(run), "overwrite": True})
        runs = [run / "smoke"]
    if out is None and len(runs) > 1:
        raise ConfigError(f"{len(runs)} runs have no folder in common: say where the results go with --out DIR.")
    out = out or (runs[0] if runs[0].is_dir() else runs[0].parent)
    document = audit_safeguards(runs)
    path = write_json(out / "audit_safeguards.json", document)
    figures = {"audit_safeguards.png": lambda file: histograms(document, file)}
    _present(path, safeguards_markdown(document), figures)
    return 0


def _sensitivity(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="rosu audit sensitivity",
        description="Plots and tables of the figures over ρ and over the retain batch size, from results of "
        "'rosu sweep' and 'rosu ablate' (grids rho and retain_batch), beside the paper's own table on ρ.",
        epilog="Example: rosu audit sensitivity ablation --out audit",
        allow_abbrev=False,
    )
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULTS", help="--out folder of a sweep or ablation")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder (default: the first of RESULTS)")
    parser.add_argument("--smoke", action="store_true", help="invented figures in DIR/smoke in place of RESULTS")
    options = parser.parse_args(argv)

    from ..analysis.sensitivity import sensitivity
    from ..analysis.sensitivity_results import read_results
    from ..files import write_json
    from ..presentation.sensitivity import axis_plot, sensitivity_markdown, trajectory_plot

    out, paths = options.out, options.results
    if options.smoke:
        from ..toys.sensitivity import write_toy_results

        out = out or Path("audit")
        paths = [write_toy_results(out / "smoke")]
    document = sensitivity(read_results(paths))
    folder = out or (paths[0] if paths[0].is_dir() else paths[0].parent)
    path = write_json(folder / "audit_sensitivity.json", document)
    figures: dict[str, Any] = {
        f"sensitivity_{name}.png": lambda file, name=name: axis_plot(document, name, file) for name in document["axes"]
    }
    if document["trajectories"]:
        figures["trajectories_retain_batch.png"] = lambda file: trajectory_plot(document, file)
    _present(path, sensitivity_markdown(document), figures)
    return 0


def _present(path: Path, text: str, figures: dict[str, Any]) -> None:
    """Write the markdown and the figures beside the JSON file, and print the former."""
    from ..files import write_atomically
    from ..presentation.plots import PlotsUnavailableError

    write_atomically(path.with_suffix(".md"), text)
    done = [f"wrote {path}", f"wrote {path.with_suffix('.md')}"]
    try:
        for name, draw in figures.items():
            draw(path.with_name(name))
            done.append(f"wrote {path.with_name(name)}")
    except PlotsUnavailableError as error:
        done.append(str(error))
    print(text, *done, sep="\n")


@contextmanager
def _bars() -> Iterator[Progress]:
    """One progress bar for each stage that reports."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description:<22}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    stages: dict[str, Any] = {}
    with Progress(*columns, console=Console(stderr=True)) as bars:

        def show(stage: str, done: int, total: int) -> None:
            if stage not in stages:
                stages[stage] = bars.add_task(stage, total=total)
            bars.update(stages[stage], completed=done)

        yield show


def _quiet() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
