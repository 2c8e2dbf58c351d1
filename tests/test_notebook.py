"""The notebook runs from top to bottom, its cells in one namespace, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from tests.conftest import ROOT
from tests.preloaded import interpreter

NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


def code_cells() -> list[str]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_the_notebook_runs_and_shows_a_table(tmp_path: Path) -> None:
    after = "assert figure.axes and len(logs) == trainer.state.global_step"
    variables = {"MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [interpreter(), "-c", "\n".join([*code_cells(), after])],
        cwd=tmp_path,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    table = dict(line.split(maxsplit=1) for line in done.stdout.splitlines()[-4:])
    assert set(table) == {"EM", "forget", "retain", "holdout"}
    forget, retain = ([float(value) for value in table[name].split()] for name in ("forget", "retain"))
    assert forget[0] > 0.9 and forget[1] < forget[0] - 0.1  # it knew them, and no longer does
    assert retain[1] > 0.9
