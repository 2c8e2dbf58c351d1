"""Controls that several audits share: measured once, with the figures that each audit would have found by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rosu_llm.cli.main import main
from tests.analysis.conftest import Audited

PROB = ["--metrics", "forget_Q_A_Prob"]
KINDS = {
    "relearn": ["--steps", "1", "--batch-size", "4", *PROB],
    # forget quality compares with the retain model's own results, which are among the shared ones
    "quantize": ["--precisions", "rtn4", *PROB, "forget_quality"],
    "extract": ["--ways", "greedy", "fewshot", "sample", "--samples", "2"],
}
#: A condition of each audit, under another value.
OTHERS = {
    "relearn": ["--learning-rate", "1e-3"],
    "quantize": ["--group-size", "32"],
    "extract": ["--temperature", "0.5"],
}


def document(out: Path, kind: str) -> dict[str, Any]:
    return json.loads((out / f"audit_{kind}.json").read_text(encoding="utf-8"))


def cells(folder: Path) -> dict[str, int]:
    found = [path for path in folder.rglob("*.json") if path.name != "conditions.json"]
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in found}


@pytest.mark.parametrize("kind", list(KINDS))
def test_shared_controls_are_measured_once(
    kind: str, audited: Audited, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(name: str, out: str, *more: str) -> int:
        return main(["audit", kind, *audited.flags(tmp_path / out, name, *KINDS[kind], *more)])

    shared = ["--controls", str(tmp_path / "controls")]
    assert run("masked", "first", *shared) == 0 and run("masked", "alone") == 0
    assert document(tmp_path / "first", kind) == document(tmp_path / "alone", kind)
    kept = cells(tmp_path / "controls")
    assert kept and not any("unlearned" in name for name in kept)
    assert not any("retain-" in name or "initial-" in name for name in cells(tmp_path / "first"))
    done = cells(tmp_path / "first")

    assert run("retain", "second", *shared) == 0
    assert cells(tmp_path / "controls") == kept  # another model, the same controls: nothing is measured again
    assert run("retain", "second", *shared, "--overwrite") == 0 and cells(tmp_path / "controls") == kept

    capsys.readouterr()
    assert run("masked", "third", *OTHERS[kind], *shared) == 2
    error = capsys.readouterr().err
    assert "holds cells of another audit" in error and "Give another --controls." in error
    assert run("masked", "first", *OTHERS[kind], *shared, "--overwrite") == 2  # refused before anything is dropped
    assert cells(tmp_path / "first") == done
    assert run("masked", "third", *shared) == 0  # nor did the refusal tie the folder to other conditions
    capsys.readouterr()
    for place, words in (
        (f"{audited['retain']}/cells", "is in the folder of --retain, which an audit does not write to"),
        (str(tmp_path / "fourth"), "--controls and --out are both"),
    ):
        assert run("masked", "fourth", "--controls", place) == 2
        assert words in capsys.readouterr().err
    alone = ["audit", kind, audited["masked"], "--data", audited.data, "--forget-split", "forget01", *KINDS[kind]]
    assert main([*alone, "--out", str(tmp_path / "fourth"), *shared]) == 2
    assert "has nothing to keep: give --retain, --target or both" in capsys.readouterr().err
    assert not (tmp_path / "fourth").exists()
