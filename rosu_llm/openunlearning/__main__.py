"""``python -m rosu_llm.openunlearning tofu …``, or ``train|eval …``, inside a checkout of OpenUnlearning.

``tofu`` runs references, training, evaluation and table (``tofu.py``). The other two are OpenUnlearning's scripts with
our trainers registered up front, for those who prefer an explicit launcher to Hydra's plugin discovery: everything
after the word goes to ``src/train.py`` or ``src/eval.py`` unchanged. ``torchrun`` and ``accelerate launch`` take it
as ``-m rosu_llm.openunlearning``.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from ..errors import ConfigError, RosuError, unknown

SCRIPTS = ("train", "eval")
TOFU = "tofu"
USAGE = """usage: python -m rosu_llm.openunlearning tofu [--methods …]          the paper's table, see tofu --help
       python -m rosu_llm.openunlearning train|eval [arguments of src/train.py or src/eval.py]"""


def script(word: str, checkout: Path) -> Path:
    """The script to run, after checking that ``checkout`` is one."""
    if word not in SCRIPTS:
        raise unknown("word", word, (TOFU, *SCRIPTS))
    path = checkout / "src" / f"{word}.py"
    if not path.is_file() or not (checkout / "src" / "trainer" / "__init__.py").is_file():
        raise ConfigError(
            f"{checkout} is no OpenUnlearning checkout (src/{word}.py and src/trainer are not both there): "
            "cd into your clone of github.com/locuslab/open-unlearning first."
        )
    return path


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if arguments else 2
    try:
        if arguments[0] == TOFU:
            from . import tofu

            if not {"-h", "--help"} & {*arguments}:
                script("train", Path.cwd())
            return tofu.main(arguments[1:], Path.cwd())
        path = script(arguments[0], Path.cwd())
        sys.path.insert(0, str(path.parent))
        import_module("trainer")
        from .registration import register

        register()
    except RosuError as error:
        print(f"rosu-llm: {error}", file=sys.stderr)
        return 2
    sys.argv = [str(path), *arguments[1:]]
    runpy.run_path(str(path), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
