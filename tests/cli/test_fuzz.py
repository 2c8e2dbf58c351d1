"""No call of ``rosu``, however wrong, ends in a traceback. ``ROSU_FUZZ_CALLS=1000`` makes more of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.fuzz import fuzz


def test_wrong_calls_end_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    calls = int(os.environ.get("ROSU_FUZZ_CALLS", "60"))
    problems, counts = fuzz(tmp_path, calls, int(os.environ.get("ROSU_FUZZ_SEED", "0")))
    with capsys.disabled():
        print(
            f"\n{calls} calls ({', '.join(f'{n} {verb}' for verb, n in counts.most_common())}): {len(problems)} wrong"
        )
    assert not problems, "\n".join(problems)
