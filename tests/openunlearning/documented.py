"""The commands of the pages about OpenUnlearning, extracted and run verbatim from a shell.

python -m tests.openunlearning.documented WORKSPACE PYTHON PAGE [HEADING]

``python`` in them is a wrapper that adds what a machine without GPU needs, as the page says, and shortens the training.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rosu_llm.openunlearning.tofu import CPU_EVAL, CPU_TRAIN, SMOKE_ARGUMENTS, SMOKE_EVAL

DOCS = Path(__file__).parents[2] / "docs"
SHORT = [f"trainer.args.{word}" for word in SMOKE_ARGUMENTS]


def documented(page: str, heading: str | None = None) -> str:
    """The first block of commands below a heading of the second level, or all blocks of a page."""
    text = (DOCS / page).read_text(encoding="utf-8")
    if heading is not None:
        return text.split(f"\n## {heading}\n")[1].split("```bash\n")[1].split("```")[0]
    return "\n".join(part.split("```")[0] for part in text.split("```bash\n")[1:])


def run_documented(
    commands: str, folder: Path, tools: Path, python: str, *, train: list[str], evaluate: list[str], timeout: int = 300
) -> subprocess.CompletedProcess[str]:
    """Run ``commands`` in ``folder``; the wrappers are written into ``tools``."""
    tools.mkdir(parents=True, exist_ok=True)
    cases = "".join(
        f'  src/{script}.py) exec {python} "$@" {" ".join(words)} ;;\n'
        for script, words in (("train", train), ("eval", evaluate))
    )
    (tools / "python").write_text(f'#!/bin/sh\ncase "$1" in\n{cases}esac\nexec {python} "$@"\n')
    (tools / "rosu").write_text(f'#!/bin/sh\nexec {python} -m rosu_llm "$@"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"HF_DATASETS_CACHE": str(folder / ".cache"), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        ["bash", "-euxc", commands],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def main() -> int:
    """Run a block in a folder of ``scripts/openunlearning_offline.py`` with links to a checkout's src and configs."""
    workspace, python, page, *heading = sys.argv[1:]
    done = run_documented(
        documented(page, *heading),
        Path(workspace),
        Path(workspace) / "bin",
        python,
        train=[*CPU_TRAIN, *SHORT],
        evaluate=[*CPU_EVAL, *SMOKE_EVAL],
        timeout=3600,
    )
    print(done.stdout)
    print("\n".join(line for line in done.stderr.splitlines() if line.startswith("+ ")), file=sys.stderr)
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
