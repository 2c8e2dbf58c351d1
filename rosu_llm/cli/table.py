"""``rosu table PATH … [--retain …] [--target …]``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..evaluation.tofu.results import Result
    from ..presentation.charts import Point
    from ..presentation.tofu import TofuTable

SUFFIXES = {".md": "markdown", ".tex": "latex", ".json": "json"}


def main(argv: Sequence[str]) -> int:
    """Read results, show them as a table, write what was asked for."""
    options = _parser().parse_args(argv)

    from ..errors import ConfigError
    from ..presentation.tofu import tofu_table
    from ..presentation.writers import render

    if bool(options.contribution) != bool(options.name):
        raise ConfigError("--contribution DIR and --name NAME belong together: give both or neither.")
    if not 0 <= options.digits <= 12:
        raise ConfigError(f"--digits {options.digits} is not a number of decimals between 0 and 12.")
    if options.frontier and not options.published:
        raise ConfigError("--frontier draws runs among published models: add --published.")
    if options.published and not options.paths and not options.smoke:
        return _published_alone(options)
    results, retain, target = _read(options)
    transform = options.auc_transform or ("privleak" if options.published else "range")
    made = tofu_table(results, retain=retain, target=target, transform=transform, best=options.best)
    if options.published:
        made = _among_published(options, made)
    form = options.format or SUFFIXES.get(options.out.suffix if options.out else "", "markdown")
    text = render(replace(made.table, digits=options.digits), form, bold=options.bold)
    files = {options.out: text} if options.out else {}
    if options.contribution:
        files |= _contribution(made, options.contribution, options.name)
    print(text, end="")
    for role, given, reference in (("retain", options.retain, retain), ("target", options.target, target)):
        if reference and not given and not options.smoke:
            print(f"--{role}: {reference.path}, found beside the runs", file=sys.stderr)
    _write(files)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rosu table",
        description="Mem, Priv, Util, Agg and Agg_MU from the result files of OpenUnlearning's TOFU evaluation.",
        epilog="Example: rosu table saves/unlearn --best",
        allow_abbrev=False,
    )
    parser.add_argument("paths", type=Path, nargs="*", metavar="PATH", help="run folders, folders of them, or files")
    parser.add_argument(
        "--retain",
        type=Path,
        metavar="PATH",
        help="results of the retain model (for Priv); by default those beside the runs in saves/eval",
    )
    parser.add_argument(
        "--target",
        type=Path,
        metavar="PATH",
        help="results of the initial model (Util relative to it); by default those beside the runs in saves/eval",
    )
    parser.add_argument(
        "--auc-transform",
        metavar="NAME",
        help="how an attack's AUC becomes a score: range (default), privleak (default with --published) or span",
    )
    parser.add_argument("--best", action="store_true", help="of each method only the run with the highest Agg_MU")
    parser.add_argument(
        "--published",
        action="store_true",
        help="runs of Llama-3.2-1B on forget10 among 150 published models; without PATH those alone",
    )
    parser.add_argument(
        "--frontier", type=Path, metavar="FILE", help="with --published: draw Mem against Util of all to this PNG"
    )
    parser.add_argument("--checkpoints", action="store_true", help="every evaluated checkpoint of a run as a row")
    parser.add_argument(
        "--format", metavar="NAME", help="markdown (default), latex or json; with --out also from its suffix"
    )
    parser.add_argument("--digits", type=int, default=2, metavar="N", help="decimals (default 2, as the paper)")
    parser.add_argument("--bold", action="store_true", help="the best of each column in bold")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table to this file as well")
    parser.add_argument(
        "--contribution", type=Path, metavar="DIR", help="write README.md and run.sh for community/methods/NAME there"
    )
    parser.add_argument("--name", metavar="NAME", help="the method that --contribution is about")
    parser.add_argument("--smoke", action="store_true", help="invented results in place of PATH, to see the table")
    return parser


def _read(options: argparse.Namespace) -> tuple[list[Result], Result | None, Result | None]:
    """The runs and the references, each file once."""
    if options.smoke:
        from ..toys import example

        return example()

    from ..errors import ConfigError, DataError
    from ..evaluation.tofu.collection import find_reference, find_results, references_beside, with_non_members_of
    from ..evaluation.tofu.results import check_current, read_result

    if not options.paths:
        raise ConfigError("Nothing to show: give run folders such as saves/unlearn/RUN, or result files.")
    files = [file for path in options.paths for file in find_results(path, every_checkpoint=options.checkpoints)]
    results = {file.resolve(): check_current(read_result(file)) for file in files}
    split = next((result.split for result in results.values() if result.split), None)
    fits = with_non_members_of([*results.values()])
    references = []
    for given, beside in zip((options.retain, options.target), references_beside([*results.values()]), strict=True):
        reference = None
        if path := given or beside:
            try:
                reference = check_current(read_result(find_reference(path, split, fits)))
            except DataError:  # what nobody named must not stop the table; it says which flag is missing
                if given:
                    raise
        references.append(reference)
        if reference and len(results) > 1:
            results.pop(reference.path.resolve(), None)
    return list(results.values()), references[0], references[1]


def _among_published(options: argparse.Namespace, made: TofuTable) -> TofuTable:
    from ..errors import ConfigError
    from ..evaluation.tofu.published import check_fits
    from ..presentation.published import among_published, run_points

    if not options.smoke:
        check_fits([run.result for run in (*made.runs, *made.references)])
    if not any(model.label == "Initial" for model in made.references):
        raise ConfigError(
            "--published shows Util relative to the initial model: give --target PATH, the results of yours."
        )
    _draw(options.frontier, run_points(made))
    return made._replace(table=among_published(made.table))


def _published_alone(options: argparse.Namespace) -> int:
    from ..presentation.published import published_table
    from ..presentation.writers import render

    form = options.format or SUFFIXES.get(options.out.suffix if options.out else "", "markdown")
    text = render(replace(published_table(), digits=options.digits), form, bold=options.bold)
    print(text, end="")
    _draw(options.frontier, [])
    _write({options.out: text} if options.out else {})
    return 0


def _draw(path: Path | None, points: Sequence[Point]) -> None:
    if path is None:
        return

    from ..files import write_atomically
    from ..presentation.drawing import png
    from ..presentation.published import published_frontier

    write_atomically(path, png(published_frontier("frontier", "TOFU forget10, Llama-3.2-1B", points)))
    print(f"wrote {path}", file=sys.stderr)


def _contribution(made: TofuTable, folder: Path, name: str) -> dict[Path, str]:
    from ..errors import ConfigError
    from ..presentation.contribution import contribution

    files = {folder / file: text for file, text in contribution(made, name).items()}
    existing = [str(path) for path in files if path.exists()]
    if existing:
        raise ConfigError(f"{', '.join(existing)} exist already and may have been edited: give another --contribution.")
    return files


def _write(files: dict[Path, str]) -> None:
    from ..files import write_atomically

    for path, text in files.items():
        write_atomically(path, text)
        if path.suffix == ".sh":
            path.chmod(path.stat().st_mode | 0o111)
        print(f"wrote {path}", file=sys.stderr)
