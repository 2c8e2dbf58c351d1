"""Whatever ends a command is one line; the traceback comes on request, a password never."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from rosu_llm import ROSUConfig, UnlearningStep
from rosu_llm.cli import report as report_verb
from rosu_llm.cli.failures import explain, without_passwords
from rosu_llm.cli.main import main
from rosu_llm.errors import ConfigError
from rosu_llm.files import check_writable
from rosu_llm.training.checks import check_room
from tests.models import tiny_llama


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("two\nlines"), 2, "rosu report: two lines"),
        (PermissionError(errno.EACCES, "Permission denied", "/x/y"), 2, "rosu report: /x/y: Permission denied"),
        (OSError(errno.ENOSPC, "No space left on device", "/x"), 2, "/x: the disk is full. Free some space"),
        (SafetensorError("header too large"), 2, "safetensors file is broken or not whole: header too large"),
        (ModuleNotFoundError("No module named 'jinja2'", name="jinja2"), 2, "(pip install 'rosu-llm[report]')"),
        (ImportError("needs galore_torch", name="galore_torch"), 2, "(pip install galore_torch)"),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"), 2, "not UTF-8 text"),
        (MemoryError(), 2, "out of memory"),
        (ZeroDivisionError("by zero"), 1, "unexpected ZeroDivisionError in test_failures.py:"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_every_error_is_one_line(
    error: Exception, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_: Any) -> int:
        raise error

    monkeypatch.setattr(report_verb, "main", fails)
    assert main(["report"]) == code
    text = capsys.readouterr().err
    assert said in text and text.count("\n") == 1
    monkeypatch.setenv("ROSU_DEBUG", "1")
    assert main(["report"]) == code
    text = capsys.readouterr().err
    assert "Traceback (most recent call last)" in text and said in text


def test_a_password_never_appears(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    assert without_passwords("at mysql://me:s3cret@host/db and x") == "at mysql://me:***@host/db and x"
    assert without_passwords("mysql://me:a@/b@host/db") == "mysql://me:***@host/db"
    pytest.importorskip("optuna")
    storage = "sqlite://me:s3cret@host/nowhere/db"
    call = ["sweep", "--task", "demo", "--set", "rho=0.1,0.2", "--out", str(tmp_path), "--storage", storage]
    for debug in ("0", "1"):
        monkeypatch.setenv("ROSU_DEBUG", debug)
        assert main(call) == 2
        output = capsys.readouterr()
        assert "s3cret" not in output.out + output.err and "me:***@host" in output.err


@pytest.mark.parametrize("verb", ["demo", "diagnose", "ablate", "audit orthogonality", "report", "eval wmdp"])
def test_a_full_disk_is_noticed_before_the_work(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rosu_llm.files.tempfile.TemporaryFile", full)
    (tmp_path / "trainer_state.json").write_text("{}")
    words = {
        "diagnose": ["--model-name-or-path", "m", "--forget-data", "f", "--retain-data", "r"],
        "report": [str(tmp_path)],
        "eval wmdp": ["m"],
    }.get(verb, [])
    assert main([*verb.split(), *words, "--out", str(tmp_path / "new")]) == 2
    assert "cannot be written to" in (error := capsys.readouterr().err) and "no space left on device" in error


def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "deep", "out")
    (tmp_path / "file").write_text("")
    for place, why in (
        (tmp_path / "file" / "x", "is a file"),
        (Path("/proc/1/x"), "proc"),
        (Path("a" * 5000), "too long"),
    ):
        with pytest.raises(ConfigError, match=f"out cannot be written to.*{why}"):
            check_writable(place, "out")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]  # nothing is left of the attempts


def test_room_for_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    check_room(tmp_path / "new", model)
    size = sum(p.numel() * 4 for p in model.parameters())
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": size - 1}))
    with pytest.raises(ConfigError, match=r"GiB free, and the model takes"):
        check_room(tmp_path / "new", model)


@pytest.mark.parametrize(
    ("given", "meant"),
    [({"rho": "0.4"}, 0.4), ({"kappa": "1"}, 1.0), ({"protect_rank": "2"}, 2), ({"upcast": "no"}, False)],
)
def test_numbers_given_as_text_in_python(given: dict[str, Any], meant: Any, tmp_path: Path) -> None:
    config = ROSUConfig(output_dir=str(tmp_path), use_cpu=True, **given)
    assert getattr(config, next(iter(given))) == meant


@pytest.mark.parametrize(
    "given",
    [{"rho": None}, {"rho": [1]}, {"kappa": "much"}, {"calibrate_every": "often"}, {"protect_rank": 1.5}],
    ids=str,
)
def test_wrong_types_in_python(given: dict[str, Any], tmp_path: Path) -> None:
    name = next(iter(given))
    with pytest.raises(ConfigError, match=f"{name}=.* cannot be read as"):
        ROSUConfig(output_dir=str(tmp_path), use_cpu=True, **given)


@pytest.mark.parametrize("given", [{"rho": "0.4"}, {"kappa": "0.5"}], ids=str)
def test_wrong_types_of_the_step(given: dict[str, Any]) -> None:
    import torch

    model = torch.nn.Linear(2, 1)
    with pytest.raises(ConfigError, match=f"{next(iter(given))}='0"):
        UnlearningStep(model, torch.optim.SGD(model.parameters(), lr=0.1), **given)


def test_values_that_a_library_refuses_are_mistakes(tmp_path: Path) -> None:
    from transformers import AutoConfig

    with pytest.raises(ValueError, match="Unrecognized") as caught:
        AutoConfig.for_model("no-such-model")
    text, code = explain(caught.value)
    assert code == 2 and text.startswith("transformers does not take a value that was given: Unrecognized")
