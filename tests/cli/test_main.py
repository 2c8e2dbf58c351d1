"""``rosu``: help is instant, mistakes are one line and exit code 2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rosu_llm
from rosu_llm.cli import main as cli
from rosu_llm.cli.main import main
from rosu_llm.errors import ConfigError
from tests.conftest import ROOT

HEAVY = ("torch", "transformers", "datasets", "numpy", "yaml", "rich", "accelerate", "peft")


def imported(code: str) -> tuple[str, set[str]]:
    """What a fresh interpreter prints, and which heavy packages it has imported at the end."""
    script = f"import atexit, sys\natexit.register(lambda: print('MODULES', *sys.modules))\n{code}"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    text, _, modules = done.stdout.rpartition("MODULES")
    return text, set(HEAVY) & set(modules.split())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["-h"], "verbs:"), (["--version"], rosu_llm.__version__), ([], "verbs:"), (["train", "-h"], "--list-settings")],
    ids=str,
)
def test_help_and_version_import_nothing_heavy(arguments: list[str], expected: str) -> None:
    text, heavy = imported(f"from rosu_llm.cli.main import main\nmain({arguments!r})")
    assert expected in text
    assert not heavy


def test_importing_the_package_imports_nothing_heavy() -> None:
    text, heavy = imported("import rosu_llm\nprint(dir(rosu_llm))")
    assert not heavy
    assert all(repr(name) in text for name in ("ROSUTrainer", "ROSUConfig", "UnlearningStep", "register_loss"))


def test_the_module_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rosu_llm", "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == f"rosu-llm {rosu_llm.__version__}"


def test_everything_the_package_promises_can_be_imported() -> None:
    for name in rosu_llm.__all__:
        assert getattr(rosu_llm, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        _ = rosu_llm.nonsense


@pytest.mark.parametrize("verb", ["tarin", "Train", "--frobnicate", ""])
def test_an_unknown_verb_is_a_usage_error(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([verb])
    assert caught.value.code == 2
    assert "usage: rosu" in capsys.readouterr().err


def test_every_verb_has_a_module_and_shows_in_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["-h"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for verb in cli.VERBS:
        assert f"  {verb}" in text
        with pytest.raises(SystemExit) as caught:
            main([verb, "-h"])
        assert caught.value.code == 0
        assert f"usage: rosu {verb}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [(ConfigError("no good"), 2, "rosu train: no good\n"), (KeyboardInterrupt(), 130, "rosu train: interrupted\n")],
)
def test_errors_of_the_package_and_interrupts_are_one_line(
    error: BaseException, code: int, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Any) -> int:
        raise error

    monkeypatch.setitem(sys.modules, "rosu_llm.cli.train", SimpleNamespace(main=fail))
    assert main(["train", "--x", "1"]) == code
    assert capsys.readouterr().err == line


def test_a_verb_gets_its_own_arguments_and_its_result_is_the_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    fake = SimpleNamespace(main=lambda arguments: seen.append(arguments) or 7)
    monkeypatch.setitem(sys.modules, "rosu_llm.cli.train", fake)
    monkeypatch.setattr(sys, "argv", ["rosu", "train", "--version", "-h"])
    assert main() == 7
    assert seen == [["--version", "-h"]]


def test_no_file_of_the_package_names_this_machine() -> None:
    """Paths of a developer's machine have no business in what is installed."""
    for path in Path(rosu_llm.__file__).parent.rglob("*.py"):
        assert str(ROOT) not in path.read_text(encoding="utf-8")
