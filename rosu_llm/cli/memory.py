"""``rosu memory build --config FILE --out FILE [--key value …]``."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from .common import read_settings, refuse_several_processes


def main(argv: Sequence[str]) -> int:
    """Store the gradients of the retain data, and write them."""
    parser = argparse.ArgumentParser(
        prog="rosu memory build",
        description="Store gradients of the retain data, one for each of --directions parts of it, in a safetensors "
        "file. 'rosu train --method forget_only --memory-file FILE' then needs no retain data. The file is as large as "
        "the trained weights times the directions. Settings of 'rosu train' are accepted as flags.",
        epilog="Example: rosu memory build --config configs/recipes/tofu_llama-3.2-1b.yaml --out memory.safetensors",
        allow_abbrev=False,
    )
    parser.add_argument("what", choices=["build"], metavar="build", help="the one thing to do with a memory")
    parser.add_argument("--config", metavar="FILE", help="YAML file of 'rosu train'")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the file to write")
    parser.add_argument("--smoke", action="store_true", help="a toy model and toy data, to see that everything runs")
    options, rest = parser.parse_known_args(argv)

    from ..errors import ConfigError
    from ..files import check_writable
    from ..recipes.run import build_memory
    from ..recipes.settings import WITHOUT_OUTPUT, build, read_flags

    refuse_several_processes("rosu memory build runs in one process: start it without torchrun or accelerate launch.")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    check_writable(options.out.parent, f"--out {options.out}")
    if options.out.is_dir():
        raise ConfigError(
            f"--out {options.out} is a folder: name the file, such as {options.out / 'memory.safetensors'}."
        )
    if (asked := read_flags(rest).get("method", "forget_only")) != "forget_only":
        raise ConfigError(
            f"--method {asked} reads no stored gradients: leave it out, what is built is for forget_only."
        )
    values = {**read_settings(options.config, rest), **WITHOUT_OUTPUT, "method": "forget_only", "max_steps": 1}
    values.setdefault("output_dir", "unused")
    if options.smoke:
        from tempfile import TemporaryDirectory

        from ..toys import toy_values

        with TemporaryDirectory() as folder:
            build_memory(build(toy_values(values, Path(folder))), options.out)
    else:
        build_memory(build(values), options.out)
    print(f"wrote {options.out}")
    return 0
