"""``rosu VERB … --num-processes N``: the same command on several devices, through ``accelerate launch``."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from ..errors import ConfigError, unknown

LAYOUTS = ("ddp", "fsdp2", "zero1", "zero2", "zero3")


def config_file(name: str) -> Path:
    """The accelerate configuration called ``name``: one that ships with the package, or a file."""
    if name in LAYOUTS:
        return Path(str(files("rosu_llm.configs.accelerate"))) / f"{name}.yaml"
    path = Path(name)
    if not path.is_file():
        raise (
            unknown("accelerate_config", name, LAYOUTS)
            if path.suffix == ""
            else ConfigError(f"--accelerate-config {name!r} is neither one of {', '.join(LAYOUTS)} nor a file.")
        )
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
