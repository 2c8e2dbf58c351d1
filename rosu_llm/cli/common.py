"""What several verbs share: settings from file and flags, quiet libraries, several processes, results on disk."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, unknown

if TYPE_CHECKING:
    from ..presentation.blocks import Section

LAYOUTS = ("ddp", "fsdp2", "zero1", "zero2", "zero3")


def add_launch_flags(parser: argparse.ArgumentParser) -> None:
    """``--accelerate-config`` and ``--num-processes``."""
    layouts = ", ".join(LAYOUTS)
    parser.add_argument("--accelerate-config", metavar="NAME", help=f"on several devices: {layouts}, or your own file")
    parser.add_argument("--num-processes", type=int, metavar="N", help="number of devices for --accelerate-config")


def wants_processes(options: argparse.Namespace) -> bool:
    """Whether several processes were asked for; a toy takes them only where they have devices to try."""
    asked = options.num_processes is not None or getattr(options, "accelerate_config", None) is not None
    if not (asked and options.smoke):
        return asked
    from ..compat import accelerator_kind

    return accelerator_kind() is not None


def seed_number(text: str) -> int:
    """A seed, for argparse."""
    if not text.isascii() or not text.isdigit() or int(text) >= 2**32:
        raise argparse.ArgumentTypeError(f"{text!r} is no seed: give 0 to 4294967295")
    return int(text)


def check_out(folder: Path) -> None:
    """Raise now if results could not be written at the end of minutes of work."""
    from ..files import check_writable

    check_writable(folder, f"--out {folder}")


def read_settings(config: str | None, flags: Sequence[str]) -> dict[str, Any]:
    """Settings of ``rosu train`` from a file, and from flags, which take precedence."""
    from ..recipes.settings import read_config, read_flags

    return {**(read_config(config) if config else {}), **read_flags(flags)}


def quiet(*, threads: int | None = None) -> None:
    """No progress bars or notices of transformers between our own lines.

    ``threads=1`` suits models so small that more threads only wait for each other.
    """
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


@contextmanager
def errors_only(name: str) -> Iterator[None]:
    """Silence the warnings of the logger called ``name`` for a while."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def refuse_several_processes(message: str) -> None:
    """Raise ``message`` where a launcher started more than one process."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(message)


def shutdown() -> None:
    """Leave the process group while all ranks are still there: one that exits first may abort the others' last call.

    On CPU the process itself ends here, successfully: tearing down gloo's threads now and then aborts a process that
    has done and written everything ("terminate called without an active exception"), and a launcher that sees the
    signal calls the run failed.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return
    dist.barrier()
    if dist.get_backend() == "gloo":
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    dist.destroy_process_group()


def config_file(name: str) -> Path:
    """The accelerate configuration called ``name``: one that ships with the package, or a file."""
    if name in LAYOUTS:
        return Path(str(files("rosu_llm.configs.accelerate"))) / f"{name}.yaml"
    from ..files import find_file

    path = find_file(name)
    if path is None:
        raise (
            unknown("accelerate_config", name, LAYOUTS)
            if Path(name).suffix == ""
            else ConfigError(f"--accelerate-config {name!r} is neither one of {', '.join(LAYOUTS)} nor a file.")
        )
    from ..recipes.settings import read_config

    read_config(path)  # the launcher would end in a traceback
    return path


def command(
    name: str | None,
    processes: int | None,
    argv: Sequence[str],
    verb: Sequence[str] = ("train",),
    flags: Sequence[str] = (),
) -> list[str]:
    """The ``accelerate launch`` call for ``rosu VERB`` with these arguments; ``flags`` go to the launcher."""
    if name is None:
        raise ConfigError(f"--num-processes needs a layout: add --accelerate-config {'|'.join(LAYOUTS)}.")
    if processes is not None and processes < 1:
        raise ConfigError(f"--num-processes {processes} must be at least 1.")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config_file(name))]
    if processes is not None:
        launch += ["--num_processes", str(processes)]
    return [*launch, *flags, "-m", "rosu_llm", *verb, *_without_launch_flags(argv)]


def launch(
    name: str | None,
    processes: int | None,
    argv: Sequence[str],
    verb: Sequence[str] = ("train",),
    flags: Sequence[str] = (),
) -> int:
    """Replace this process by the launcher."""
    call = command(name, processes, argv, verb, flags)
    sys.stdout.flush()
    os.execv(call[0], call)  # noqa: S606


def _without_launch_flags(argv: Sequence[str]) -> list[str]:
    kept: list[str] = []
    skip = False
    for word in argv:
        if skip:
            skip = False
        elif word in ("--accelerate-config", "--num-processes"):
            skip = True
        elif not word.startswith(("--accelerate-config=", "--num-processes=")):
            kept.append(word)
    return kept


def present(document: Mapping[str, Any], section: Section, path: Path) -> None:
    """Write the document, and its section as markdown and figures beside it; print the section."""
    from ..files import write_json
    from ..presentation.writers import write_page
    from ..presentation.writers.markdown import section as markdown

    write_json(path, document)
    written, problem = write_page(section, path.with_suffix(".md"))
    done = [f"wrote {file}" for file in (path, written[-1], *written[:-1])]
    print(markdown(section), *done, *([problem] if problem else []), sep="\n")
