"""The diffs of docs/architecture.md are applied to a copy of the project, and the lines below each are run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.preloaded import interpreter

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
CHANGES = re.findall(r"^### (.+?)\n.*?```diff\n(.*?)```\n\n```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE)


def test_there_is_a_change_for_each_kind() -> None:
    assert [title for title, _, _ in CHANGES] == ["A method", "A loss", "A layout", "A benchmark"]


@pytest.mark.parametrize(("title", "diff", "code"), CHANGES, ids=[title for title, _, _ in CHANGES])
def test_a_change_can_be_applied_and_used(title: str, diff: str, code: str, tmp_path: Path) -> None:
    for name in ("rosu_llm", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    # A folder inside a repository would be taken for a part of it, and the diff be skipped without a word.
    outside = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    subprocess.run(["git", "apply", "-"], input=diff, text=True, check=True, cwd=tmp_path, env=outside)
    check = f"import rosu_llm; assert rosu_llm.__file__.startswith({str(tmp_path)!r})\n"
    done = subprocess.run(
        [interpreter(), "-c", check + code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for path in re.findall(r"^\+\+\+ b/(.+\.py)$", diff, re.MULTILINE):
        subprocess.run([sys.executable, "-m", "ruff", "check", "--quiet", path], cwd=tmp_path, check=True)
        subprocess.run([sys.executable, "-m", "ruff", "format", "--check", "--quiet", path], cwd=tmp_path, check=True)
