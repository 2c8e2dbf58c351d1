"""rosu doctor finds what is broken, names it without naming anybody, and leaves no process behind."""

from __future__ import annotations

import getpass
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rosu_llm.analysis.doctor import examine, launch, machine
from rosu_llm.cli.main import main
from rosu_llm.errors import ConfigError
from rosu_llm.recipes.estimate import estimate
from rosu_llm.recipes.settings import build
from tests.conftest import ROOT
from tests.distributed.processes import environment
from tests.models import tiny_llama
from tests.preloaded import interpreter

pytestmark = pytest.mark.xdist_group("processes")

BROKEN = ROOT / "tests" / "analysis" / "broken_worker.py"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def gone(pids: list[int], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(alive, pids))


def break_with(monkeypatch: pytest.MonkeyPatch, faults: dict[str, str]) -> None:
    monkeypatch.setattr(launch, "WORKER", (str(BROKEN),))
    for name, value in {**environment(), "BROKEN": json.dumps(faults)}.items():
        monkeypatch.setenv(name, value)


def test_broken_layouts_are_found_and_the_others_tried_nevertheless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong result and an error of one process; new processes try what comes after it."""
    break_with(monkeypatch, {"ddp": "unaveraged", "fsdp2": "raises"})
    monkeypatch.setattr(sys, "executable", interpreter())
    assert main(["doctor", "--layouts", "ddp", "fsdp2", "zero3", "--out", str(tmp_path / "out")]) == 1
    shown = capsys.readouterr().out
    document = json.loads((tmp_path / "out" / "doctor.json").read_text())
    rows = {row["stage"]: row for row in document["rows"]}
    assert [rows[name]["state"] for name in ("local", "meet", "ddp", "fsdp2")] == ["agrees"] * 2 + ["differs", "failed"]
    assert rows["ddp"]["difference"] > 0.1
    assert rows["fsdp2"]["why"] == "OSError: cannot read …/weights.bin"
    if machine.lacks("deepspeed") is None:
        assert rows["zero3"]["state"] == "agrees" and 0.0 < rows["zero3"]["difference"] < 1e-4
        assert rows["zero2"]["state"] == "not tried"
    assert len(document["problems"]) == 2
    assert f"**{document['verdict']}**" in shown and document["verdict"].startswith("NOT WELL: DDP differs")
    secrets = [str(Path.home()), getpass.getuser(), socket.gethostname(), str(tmp_path), str(ROOT)]
    for text in (json.dumps(document), (tmp_path / "out" / "doctor.md").read_text()):
        assert not [secret for secret in secrets if len(secret) > 4 and secret in text]


def test_a_layout_that_hangs_is_ended_with_all_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_with(monkeypatch, {"local": "sleeps"})
    (tmp_path / "work").mkdir()
    results = launch.run_stages(tmp_path / "work", ["local", "meet"], 2, steps=1, timeout=2.0, cpu=True)
    assert list(results) == ["local"] and "no result after 2 s" in str(results["local"].error)
    pids = [int(pid) for rank in range(2) for pid in (tmp_path / f"pids{rank}").read_text().split()]
    assert len(pids) == 4 and gone(pids)


def test_a_process_that_is_killed_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_with(monkeypatch, {"local": "killed"})
    monkeypatch.setattr(launch, "GRACE", 1.0)
    results = launch.run_stages(tmp_path, ["local", "meet"], 2, steps=1, timeout=60.0, cpu=True)
    assert results["local"].error == "process 1 was ended by SIGKILL; it last said: about to die"


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_command(kind: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    code = (
        "import sys; from pathlib import Path; from rosu_llm.analysis.doctor import launch\n"
        "launch.WORKER = (sys.argv[1],)\n"
        "launch.run_stages(Path(sys.argv[2]), ['local'], 2, steps=1, timeout=60.0, cpu=True)\n"
    )
    command = [sys.executable, "-c", code, str(BROKEN), str(tmp_path / "work")]
    surroundings = {**environment(), "BROKEN": json.dumps({"local": "sleeps"})}
    started = subprocess.Popen(
        command,
        env=surroundings,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in what a shell put aside
    )
    try:
        files = [tmp_path / f"pids{rank}" for rank in range(2)]
        end = time.monotonic() + 60
        while not all(file.is_file() and len(file.read_text().split()) == 2 for file in files):
            assert time.monotonic() < end and started.poll() is None
            time.sleep(0.05)
        pids = [int(pid) for file in files for pid in file.read_text().split()]
        assert all(map(alive, pids))
        started.send_signal(kind)
        assert started.wait(timeout=30) != 0
    finally:
        started.kill()
    assert gone(pids)


def result(*ends: float, start: float = 0.0) -> launch.StageResult:
    """What processes would have left that ended with these weights."""
    tensors = [{"start": torch.full((4,), start), "end": torch.full((4,), end)} for end in ends]
    return launch.StageResult(None, [{"device": "cpu", "seconds": 1.0}] * len(ends), tensors)


def examined(monkeypatch: pytest.MonkeyPatch, results: dict[str, launch.StageResult], **more: Any) -> Any:
    asked: list[str] = []

    def answered(_: Path, stages: list[str], *__: Any, **___: Any) -> dict[str, launch.StageResult]:
        asked.extend(stages)
        return {stage: results[stage] for stage in stages if stage in results}

    monkeypatch.setattr(examine, "run_stages", answered)
    document = examine.examine(2, ["ddp", "fsdp2", "zero3"], **more)
    return document, {row["stage"]: row for row in document["rows"]}, asked


def test_replicas_that_drift_apart_and_weights_that_are_no_numbers_are_no_agreement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each close to one process, but not to each other; and a difference that is no number."""
    fine = {"local": result(1.0, 1.0), "meet": result(1.0, 1.0), "zero3": result(1.0, 1.0)}
    document, rows, _ = examined(
        monkeypatch, {**fine, "ddp": result(1.0, 1.00001), "fsdp2": result(float("nan"), float("nan"))}
    )
    assert rows["ddp"]["state"] == rows["fsdp2"]["state"] == "differs"
    assert rows["ddp"]["why"] == "the processes do not have the same weights"
    assert rows["fsdp2"]["difference"] is None  # JSON has no NaN
    assert len(document["problems"]) == 2
    for second in (float("nan"), 2.0):  # a device that computes something else
        document, rows, _ = examined(monkeypatch, {**fine, "local": result(1.0, second)})
        assert rows["local"]["state"] == "differs" and document["problems"][0].startswith("one process differs")


def test_what_is_not_installed_is_said_and_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without DeepSpeed; but a package that is too old, or a missing one that is needed, is a problem."""
    version = machine.metadata.version

    def without(name: str) -> str:
        if name == "deepspeed":
            raise machine.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(machine.metadata, "version", without)
    fine = {name: result(1.0, 1.0) for name in ("local", "meet", "ddp", "fsdp2")}
    document, rows, asked = examined(monkeypatch, fine)
    assert asked == ["local", "meet", "ddp", "fsdp2"] and document["problems"] == []
    assert rows["zero3"]["state"] == "cannot run here" and rows["zero3"]["why"] == "deepspeed is not installed"
    assert document["verdict"] == (
        "WELL: DDP, FSDP2 on 2 cpu processes agree with one process; cannot run here: ZeRO-1, ZeRO-2, ZeRO-3"
    )
    monkeypatch.setattr(machine.metadata, "version", lambda name: "0.1" if name == "torch" else version(name))
    document, rows, asked = examined(monkeypatch, fine)
    assert "torch 0.1: torch>=2.4 is needed" in document["problems"]
    assert rows["fsdp2"]["why"] == "torch 0.1 does not fit torch>=2.6" and "fsdp2" not in asked


def test_a_recipe_is_compared_with_memory_and_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards share what they split; a machine that is too small is a problem."""
    tiny_llama().save_pretrained(tmp_path / "model")
    values = {"model_name_or_path": str(tmp_path / "model"), "output_dir": str(tmp_path / "out"), "use_cpu": True}
    values |= {"save_strategy": "steps", "save_total_limit": 2, "report_to": "none"}
    size = 4 * sum(p.numel() for p in tiny_llama().parameters())
    needs = estimate(build(values))
    assert needs.step.peak == (1 + 1 + 2 + 3) * size  # weights, gradients, Adam's moments; f, r and the backup
    assert needs.saved == size and needs.checkpoints == 3 * 3 * size  # weights and moments, two kept and a new one
    fine = {name: result(1.0, 1.0) for name in ("local", "meet", "ddp", "fsdp2", "zero3")}
    document, _, _ = examined(monkeypatch, fine, recipe=build(values))
    assert document["problems"] == [] and document["needs"]["model"] == "model"
    memory = {entry["name"]: entry["memory"] for entry in document["needs"]["layouts"]}
    assert memory["FSDP2"] == memory["DDP"] // 2 == memory["one process"] // 2
    assert memory["ZeRO-3"] == memory["FSDP2"] + size // 2  # the optimizer's own copy of the weights
    document, _, _ = examined(monkeypatch, fine, recipe=build({**values, "retain_loss": "kl"}))
    head = tiny_llama().lm_head.weight.numel() * 4
    assert {e["name"]: e["memory"] for e in document["needs"]["layouts"]} == {n: m + head for n, m in memory.items()}
    document, _, _ = examined(monkeypatch, fine, recipe=build({**values, "jacobian": "exact"}))
    assert [entry["name"] for entry in document["needs"]["layouts"]] == ["one process", "DDP"]  # whole weights
    monkeypatch.setattr(machine, "free_memory", lambda: 1000)
    monkeypatch.setattr(examine, "free_disk", lambda folder: 1 << 17 if folder.name == "out" else 1 << 40)
    document, _, _ = examined(monkeypatch, fine, recipe=build(values))
    assert [problem.split()[0:4] for problem in document["problems"]] == [
        ["the", "recipe", "needs", "at"],
        ["model", "and", "checkpoints", "take"],
    ]


def test_the_estimate_of_adapters_and_of_lower_layers(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    tiny_llama(num_hidden_layers=4).save_pretrained(tmp_path / "model")
    common = {"model_name_or_path": str(tmp_path / "model"), "output_dir": str(tmp_path), "use_cpu": True}
    common |= {"save_strategy": "no", "report_to": "none"}
    adapter = estimate(build({**common, "lora_r": 2, "lora_target_modules": "q_proj,v_proj"}))
    assert adapter.step.trainable == 4 * 2 * (32 + 32 + 32 + 16) and adapter.disk == 4 * adapter.step.trainable
    hidden = {"forget_loss": "representation", "retain_loss": "representation", "target_layer": 2}
    hidden["trainable_parameters"] = r"layers\.(1|2)\.mlp\.down_proj\.weight"
    lower = estimate(build({**common, **hidden}))
    assert lower.step.trainable == 2 * 32 * 48 and lower.step.total < adapter.step.total
    with pytest.raises(ConfigError, match="target_layer"):
        estimate(build({**common, **hidden, "target_layer": 4}))
    assert lower.disk == 4 * sum(p.numel() for p in tiny_llama(num_hidden_layers=4).parameters())


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--processes", "0"], "at least 1"),
        (["--config", "no.yaml"], "not a file"),
        (["--out", "/proc/none"], "cannot be written to"),
    ],
)
def test_wrong_calls_are_one_line(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_no_room_for_temporary_files_is_said_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "free_disk", lambda folder: 1000)
    with pytest.raises(ConfigError, match="TMPDIR"):
        examined(monkeypatch, {})


def test_it_is_not_started_by_a_launcher(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["doctor"]) == 2
    assert "without a launcher" in capsys.readouterr().err


def test_nothing_names_the_machine_its_user_or_their_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.socket, "gethostname", lambda: "node17.cluster")
    monkeypatch.setattr(machine.getpass, "getuser", lambda: "alice")
    monkeypatch.setenv("HOME", "/home/alice")
    text = machine.anonymous(
        "alice@node17.cluster: /home/alice/x.py and '/scratch/alice/run 1' at 10.0.3.17:29500 "
        f"hf_{'a' * 30} https://alice:pw@host/db torch 2.13.0 and/or 1/2"
    )
    assert text == "USER@HOST: ~/x.py and '…/run 1' at ADDRESS:29500 … https://…host/db torch 2.13.0 and/or 1/2"
    monkeypatch.setenv("HOME", "/")
    assert machine.anonymous("1/2 of /opt/a/b") == "1/2 of …/b"
