"""``rosu report RUN … [--target …] [--retain …]``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..evaluation.tofu.results import Result


def main(argv: Sequence[str]) -> int:
    """Read the runs, write the page, put it into the runs' model cards."""
    options = _parser().parse_args(argv)

    from ..errors import ConfigError
    from ..presentation.report.page import build
    from ..presentation.report.reading import read_runs
    from ..presentation.report.writing import update_cards, write
    from .common import check_out

    if options.answers < 1:
        raise ConfigError(f"--answers {options.answers} is not a number of questions: give 1 or more.")
    if options.smoke:
        return _smoke(options.out or Path("rosu-report"))
    if not options.runs:
        raise ConfigError("Nothing to report: give output folders of rosu train, rosu demo or OpenUnlearning.")
    if options.base is not None and not options.base.is_dir():
        raise ConfigError(f"--base {options.base} is not a folder: give the model that the runs started from.")
    runs = read_runs(options.runs)
    split = next((run.tofu.split for run in runs if run.tofu and run.tofu.split), None)
    made = [run.tofu for run in runs if run.tofu]
    references = {name: _reference(getattr(options, name), split, made) for name in ("target", "retain", "before")}
    report = build(runs, **references, base=options.base, answers=options.answers, title=options.title)
    folders = list(dict.fromkeys(run.folder for run in runs))
    out = options.out or (folders[0] if len(folders) == 1 else Path("rosu-report"))
    check_out(out.parent if out.suffix == ".html" else out)
    written = write(report, out)
    if not options.no_card:
        written += update_cards(report, folders, written[0])
    for path in written:
        print(f"wrote {path}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rosu report",
        description="One self-contained page (HTML and markdown) about one or several runs: metrics beside the "
        "paper's, answers before and after, curves, weight change, audits, settings. It says what is missing.",
        epilog="Example: rosu report outputs/rosu outputs/npo --target outputs/full --retain outputs/retain90",
        allow_abbrev=False,
    )
    parser.add_argument(
        "runs", type=Path, nargs="*", metavar="RUN", help="folders of rosu train, rosu demo, rosu sweep, OpenUnlearning"
    )
    parser.add_argument(
        "--target", type=Path, metavar="PATH", help="TOFU results of the initial model (JSON or folder)"
    )
    parser.add_argument("--retain", type=Path, metavar="PATH", help="TOFU results of the retain model (for Priv)")
    parser.add_argument(
        "--before", type=Path, metavar="PATH", help="TOFU results with the answers before (default: --target's)"
    )
    parser.add_argument(
        "--base", type=Path, metavar="FOLDER", help="model that the runs started from (default: as recorded)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="PATH", help="page.html or a folder (default: the run's; of several: rosu-report)"
    )
    parser.add_argument("--title", metavar="TEXT", help="heading of the page")
    parser.add_argument("--answers", type=int, default=8, metavar="N", help="questions to show (default 8)")
    parser.add_argument("--no-card", action="store_true", help="leave the runs' README.md as it is")
    parser.add_argument("--smoke", action="store_true", help="a page about a toy demo in place of RUN, to see one")
    return parser


def _reference(path: Path | None, split: str | None, runs: Sequence[Result]) -> Result | None:
    if path is None:
        return None

    from ..evaluation.tofu.collection import find_reference, with_non_members_of
    from ..evaluation.tofu.results import check_current, read_result

    return check_current(read_result(find_reference(path, split, with_non_members_of(runs))))


def _smoke(out: Path) -> int:
    from tempfile import TemporaryDirectory

    from ..toys import demo_toy
    from .common import quiet

    quiet(threads=1)
    folder = out.parent if out.suffix == ".html" else out
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as scratch:
        return main([str(demo_toy(Path(scratch))), "--title", "A toy demo", "--no-card", "--out", str(out)])
