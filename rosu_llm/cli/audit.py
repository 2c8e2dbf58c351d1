"""``rosu audit KIND …``: of what the method assumes, and of what an unlearned model still knows."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from .common import add_launch_flags, check_out, launch, present, quiet, read_settings, seed_number

KINDS = {
    "orthogonality": "does a direction that is neutral for a retain mini-batch stay neutral for the whole retain set?",
    "safeguards": "did τ and ε_q ever act in these runs? (from their logs)",
    "sensitivity": "figures over ρ and over the retain batch size, from sweeps and ablations",
    "relearn": "does it come back after a little fine-tuning? Against the retain model",
    "quantize": "is it still gone at 8 and 4 bits?",
    "extract": "can it be had by asking differently? Against the retain model",
}


def main(argv: Sequence[str]) -> int:
    """Dispatch to the kind of audit."""
    parser = argparse.ArgumentParser(
        prog="rosu audit",
        description="Check what the method assumes, and whether what a model unlearned is really gone.",
        epilog="\n".join(["kinds:", *(f"  {kind:<15}{text}" for kind, text in KINDS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kind", choices=list(KINDS), metavar="kind", help="'rosu audit KIND -h' explains it")
    kind = parser.parse_args(argv[:1] or ["-h"]).kind
    verbs = {"orthogonality": _orthogonality, "safeguards": _safeguards, "sensitivity": _sensitivity}
    if kind in verbs:
        return verbs[kind](argv[1:])
    result: int = import_module(f"{__package__}.audit_{kind}").main(argv[1:])
    return result


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
    parser.add_argument("--seed", type=seed_number, metavar="N", help="of the pairs (default: the configuration's)")
    parser.add_argument(
        "--per-sample",
        default="auto",
        metavar="auto|yes|no",
        help="compute every sample's gradient once and keep all of them in memory (auto: where half of it is enough)",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder (default: output_dir of the configuration)")
    parser.add_argument("--smoke", action="store_true", help="a toy model and toy data in DIR/smoke; seconds")
    add_launch_flags(parser)
    options, rest = parser.parse_known_args(argv)

    if (options.accelerate_config or options.num_processes) and not options.smoke:
        return launch(options.accelerate_config, options.num_processes, argv, ("audit", "orthogonality"))
    values = read_settings(options.config, rest)
    values |= {} if options.seed is None else {"seed": options.seed}
    out = options.out or Path(str(values.get("output_dir") or "audit"))
    check_out(out)
    quiet()

    from ..analysis.orthogonality.audit import audit_orthogonality
    from .progress import stage_bars

    asked = {"pairs": options.pairs, "batch_sizes": options.batch_sizes, "forget_batch_size": options.forget_batch_size}
    if options.smoke:
        from ..toys import toy_values

        out = out / "smoke"
        values = {**toy_values(values, out), "chat_format": None}
        asked = {"pairs": 5, "batch_sizes": (1, 2, 4)}
    with stage_bars() as progress:
        result = audit_orthogonality(values, out, progress, per_sample=options.per_sample, **asked)
    if result is not None:
        from ..presentation.audits import orthogonality_section

        present(result, orthogonality_section(result), out / "audit_orthogonality.json")
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
    from ..presentation.audits import safeguards_section

    out, runs = options.out, options.runs
    if options.smoke:
        from ..toys import train_toy

        quiet()
        run = out or Path("audit")
        train_toy({"output_dir": str(run), "overwrite": True})
        runs = [run / "smoke"]
    if out is None and len(runs) > 1:
        raise ConfigError(f"{len(runs)} runs have no folder in common: say where the results go with --out DIR.")
    out = out or (runs[0] if runs[0].is_dir() else runs[0].parent)
    check_out(out)
    document = audit_safeguards(runs)
    present(document, safeguards_section(document), out / "audit_safeguards.json")
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
    parser.add_argument("--smoke", action="store_true", help="a toy ablation in DIR/smoke in place of RESULTS")
    options = parser.parse_args(argv)

    from ..analysis.finished_runs import read_results
    from ..analysis.sensitivity import sensitivity
    from ..presentation.audits import sensitivity_section

    out, paths = options.out, options.results
    if options.smoke:
        from ..toys import ablate_toy

        quiet(threads=1)
        out = out or Path("audit")
        paths = [ablate_toy(out / "smoke")]
    folder = out or (paths[0] if paths[0].is_dir() else paths[0].parent)
    check_out(folder)
    document = sensitivity(read_results(paths))
    present(document, sensitivity_section(document), folder / "audit_sensitivity.json")
    return 0
