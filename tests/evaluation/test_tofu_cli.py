"""``rosu eval tofu``: a model with its references, the tables, adapters, launching, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from rosu_llm.cli import common
from rosu_llm.cli.main import main
from rosu_llm.compat import accelerator_kind
from rosu_llm.evaluation import processes
from rosu_llm.evaluation.tofu import passes
from rosu_llm.evaluation.tofu.collection import find_results
from rosu_llm.evaluation.tofu.metrics import METRICS, TofuSettings
from rosu_llm.evaluation.tofu.run import Loading, TofuRequest, run
from rosu_llm.evaluation.tofu.summary import FLUENCY
from rosu_llm.toys import toy_settings
from tests.evaluation.test_tofu_run import World


class Toys(World):
    """Three models on disk."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.folder = folder
        for seed, name in enumerate(("rosu", "retain90", "full")):
            self.model(seed).save_pretrained(folder / name)
            self.tokenizer.save_pretrained(folder / name)

    def __call__(self, model: str, *more: str) -> int:
        common = ("--data", str(self.data), "--chat-format", "Llama-2-7b-hf", "--fluency-model", "none")
        return main(["eval", "tofu", str(self.folder / model), *common, "--max-new-tokens", "2", *more])


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Toys:
    return Toys(tmp_path_factory.mktemp("toys"))


def test_a_model_with_its_references(
    toys: Toys, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = toys.folder
    references = ["--retain", str(folder / "retain90"), "--target", str(folder / "full")]
    assert toys("rosu", *references) == 0
    printed = capsys.readouterr().out
    out = folder / "rosu" / "evals"
    saved = (out / "table.md").read_text() + "\n" + (out / "figures.md").read_text()
    assert printed == saved
    assert "| *Initial* |" in printed and "| *Retain* |" in printed and "| rosu |" in printed
    heads = "Agg (MU only) | Agg_MU (MU only) | Mem | Priv | Util (MU only) | Util raw (MU only) | s_LOSS | s_ZLib |"
    assert heads in printed
    assert "relative to the initial model; so it enters Agg and Agg_MU" in printed
    assert "nobody measured forget_Q_A_gibberish" in printed
    assert "LIMITED" not in printed
    assert r"\textbf{Metric}" in (out / "figures.tex").read_text()
    figures = {row["metric"]: row for row in json.loads((out / "figures.json").read_text())["rows"]}
    assert set(figures) == set(METRICS) - {FLUENCY}
    summary = json.loads((out / "TOFU_SUMMARY.json").read_text())
    assert {name: row["Model"] for name, row in figures.items()} == summary
    of_retain = json.loads((folder / "retain90" / "evals_forget10" / "TOFU_SUMMARY.json").read_text())
    assert figures["mia_loss"]["Retain"] == of_retain["mia_loss"] != summary["mia_loss"]
    table = json.loads((out / "table.json").read_text())["rows"]
    share = table[-1]["closeness"]["LOSS"]
    auc, other = summary["mia_loss"], of_retain["mia_loss"]
    assert share == pytest.approx(max(0, 1 - abs(auc - other) / max(other, 1 - other)))

    monkeypatch.setattr(passes, "run_jobs", lambda *_: pytest.fail("measured again"))
    assert toys("rosu", "--retain", str(folder / "retain90" / "evals_forget10"), "--target", str(folder / "full")) == 0
    assert capsys.readouterr().out == printed
    assert main(["table", str(folder / "rosu"), "--retain", str(folder / "retain90")]) == 0
    assert "TOFU forget10, Llama-2-7b-hf" in capsys.readouterr().out


def test_a_trial_says_so_and_keeps_apart(toys: Toys, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--limit", "2", "--held-out-questions", "1", "--retain", str(toys.folder / "retain90"))
    assert toys("rosu", *words, "--out", str(tmp_path / "a")) == 0
    assert "LIMITED to the first 2 rows of each data set" in capsys.readouterr().out
    name = "forget10_limit2_heldout1"
    assert (tmp_path / "a" / "references" / f"retain90_{name}" / "TOFU_EVAL.json").is_file()
    assert not (toys.folder / "retain90" / f"evals_{name}").exists()  # --out was given: nothing elsewhere
    assert [file.parent for file in find_results(tmp_path)] == [tmp_path / "a"]  # a reference is no run


def test_an_adapter_counts_as_the_model_it_makes(toys: Toys, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    import torch
    from transformers import AutoModelForCausalLM

    base = toys.folder / "full"
    model = AutoModelForCausalLM.from_pretrained(base)
    adapted: Any = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, weights in adapted.named_parameters():
            if "lora_" in name:
                weights.normal_(std=0.3)
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    toys.tokenizer.save_pretrained(tmp_path / "merged")
    found = []
    for name in ("adapter", "merged", str(base)):
        out = tmp_path / Path(name).name / "evals"
        assert toys(str(tmp_path / name), "--metrics", "forget_Q_A_Prob", "--out", str(out)) == 0
        found.append(json.loads((out / "TOFU_SUMMARY.json").read_text())["forget_Q_A_Prob"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[0] != pytest.approx(found[2], rel=1e-3)


def test_several_processes_are_launched(toys: Toys, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def replaced(_: str, call: list[str]) -> None:
        calls.append(call)
        raise SystemExit(0)

    monkeypatch.setattr(common.os, "execv", replaced)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "")  # restored afterwards
    with pytest.raises(SystemExit):
        toys("rosu", "--num-processes", "2")
    words = calls[0]
    assert words[words.index("--num_processes") + 1] == "2"
    assert words[words.index("--config_file") + 1].endswith("ddp.yaml")
    assert words[words.index("--mixed_precision") + 1] == "no"
    assert words[words.index("rosu_llm") + 1 :][:2] == ["eval", "tofu"]
    assert words[-2:] == ["--expect-processes", "2"]
    assert "--num-processes" not in words
    assert os.environ["ACCELERATE_USE_CPU"] == "true"


@pytest.mark.parametrize("kind", ["cuda", "xpu", "npu"])
def test_whatever_kind_of_devices_there_is_they_are_used(
    kind: str, toys: Toys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replaced(*_: Any) -> None:
        raise SystemExit(0)

    monkeypatch.setattr(common.os, "execv", replaced)
    monkeypatch.setattr("rosu_llm.compat.accelerator_kind", lambda: kind)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "")
    with pytest.raises(SystemExit):
        toys("rosu", "--num-processes", "2")
    assert os.environ["ACCELERATE_USE_CPU"] == ""
    for benchmark in ("tofu", "wmdp"):  # toys try the devices and their collectives
        with pytest.raises(SystemExit):
            main(["eval", benchmark, "rosu", "--num-processes", "2", "--smoke"])
    monkeypatch.setattr("rosu_llm.toys.accelerator_kind", lambda: kind)
    assert toy_settings({})["use_cpu"] is False and toy_settings({"use_cpu": True})["use_cpu"] is True


def test_whoever_waits_is_not_ended_before_the_first_process_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL ends processes that waited for ten minutes, and the first one waits for half an hour."""
    import accelerate

    class Reached(Exception):
        pass

    def joined(**given: Any) -> None:
        assert given["cpu"] is False and given["timeout"].total_seconds() > processes.TIMEOUT
        raise Reached

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(processes, "accelerator_kind", lambda: "cuda")
    monkeypatch.setattr(accelerate, "PartialState", joined)
    with pytest.raises(Reached):
        run(TofuRequest(model="rosu", settings=TofuSettings(data="x"), loading=Loading()))


def test_which_kind_of_devices_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = getattr(torch, "accelerator", None)
    if accelerator is None:
        pytest.skip("torch before 2.6 is asked kind by kind")
    for kind, meant in (("cuda", "cuda"), ("xpu", "xpu"), ("mps", None), ("cpu", None)):
        monkeypatch.setattr(accelerator, "is_available", lambda: True)
        monkeypatch.setattr(accelerator, "current_accelerator", lambda kind=kind: torch.device(kind))
        assert accelerator_kind() == meant
    monkeypatch.setattr(accelerator, "is_available", lambda: False)
    assert accelerator_kind() is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--accelerate-config", "zero3"], "--accelerate-config zero3 shards the model"),
        (["--expect-processes", "2"], "--num-processes 2 was asked for, but 1 started"),
        (["--auc-transform", "median"], "Unknown AUC transform 'median'"),
        (["--metrics", "mem"], "Unknown TOFU metric 'mem'"),
        (["--limit", "0"], "--limit 0 must be at least 1"),
        (["--retain", "./nowhere"], "'./nowhere' does not exist"),
        (["--data", "./nowhere"], "./nowhere"),
        (["--forget-split", "forget15"], "forget15"),
        (["--chat-format", "Llama-3.2-1B-Instruct"], "needs a chat template and the tokenizer has none"),
        (["--chat-format", "Llama-9"], "Unknown chat format 'Llama-9'"),
    ],
)
def test_what_cannot_work_is_one_line(
    toys: Toys, tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert toys("rosu", "--out", str(tmp_path / "out"), *arguments) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("rosu eval: ") and message in error
    assert not (tmp_path / "out").exists()


def test_folders_that_are_no_model(toys: Toys, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert toys(str(tmp_path)) == 2
    assert "has no config.json" in capsys.readouterr().err
    (tmp_path / "adapter_config.json").write_text("{}")
    assert toys(str(tmp_path)) == 2
    assert "does not name its base model" in capsys.readouterr().err
    (tmp_path / "adapter_config.json").unlink()
    assert toys("rosu", "--out", str(tmp_path / "out"), "--retain", str(tmp_path)) == 2
    assert "holds no TOFU_EVAL.json" in capsys.readouterr().err


def test_smoke_needs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["nowhere/model", "--retain", "r.json", "--data", "x", "--limit", "3", "--metrics", *METRICS[:12]]
    assert main(["eval", "tofu", *words, "--out", str(tmp_path), "--smoke"]) == 0
    assert "| *Retain* |" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"smoke"}
    assert (tmp_path / "smoke" / "table.tex").is_file()
