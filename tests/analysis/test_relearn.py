"""Relearning: curves against closed forms, controls that behave as controls, and models that stay as they are."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rosu_llm.analysis.relearn import audit
from rosu_llm.analysis.relearn.attack import RelearnAttack, draw, relearn
from rosu_llm.analysis.relearn.curves import area_between, evaluated_steps, gain, robustness, steps_to_half, symmetric
from rosu_llm.analysis.relearn.presets import RELEARN_PRESETS
from rosu_llm.cli.main import main
from rosu_llm.errors import ConfigError
from tests.analysis.conftest import Audited

METRICS = ["--metrics", "forget_Q_A_Prob", "exact_memorization", "retain_Q_A_Prob"]
FAST = ["--steps", "8", "--learning-rate", "3e-3", "--batch-size", "4", *METRICS]


def files_of(folder: str) -> dict[str, str]:
    found = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def document(out: Path) -> dict[str, Any]:
    return json.loads((out / "audit_relearn.json").read_text(encoding="utf-8"))


def line(found: dict[str, Any], metric: str) -> dict[str, Any]:
    (chosen,) = [each for each in found["summary"] if each["metric"] == metric]
    return chosen["mean"] | {"half": chosen["per_seed"]["0"].get("half")}


def test_ratios_against_their_definition() -> None:
    assert robustness(0.4, 0.1) == 0.25
    assert robustness(0.1, 0.4) == 1.0  # regains less than the control learns
    assert robustness(0.3, -0.1) == 0.0 and robustness(-0.3, 0.1) == 1.0 and robustness(0.0, 0.0) == 1.0
    third = 1 / 3
    assert robustness(third, third) == 1.0 and symmetric(third, third) == 1.0
    assert symmetric(0.3, 0.1) == pytest.approx(0.5) and symmetric(0.3, -0.1) == pytest.approx(0.0)
    assert symmetric(0.0, 0.0) == 1.0


def test_area_and_half_against_straight_lines() -> None:
    """m = 0.1 + 0.05 t and m = 0.1 + 0.02 t on uneven steps: the mean distance is 0.03 · T/2, half of 0.8 at t = 8."""
    steps = (0, 1, 2, 4, 8, 16)
    steep, flat = ({t: 0.1 + slope * t for t in steps} for slope in (0.05, 0.02))
    assert area_between(steep, flat) == pytest.approx(0.03 * 8)
    assert area_between(steep, steep) == 0.0 and area_between({0: 0.3}, {0: 0.1}) == pytest.approx(0.2)
    assert gain(steep) == pytest.approx(0.8)
    assert steps_to_half(steep, 0.9) == 8 and steps_to_half(flat, 0.9) is None
    assert steps_to_half(steep, 0.1) == 0  # no gap
    with pytest.raises(KeyError):
        area_between({0: 1.0}, {1: 1.0})


def test_steps_double_and_shares_hold_each_other() -> None:
    assert evaluated_steps(13) == [0, 1, 2, 4, 8, 13] and evaluated_steps(8) == [0, 1, 2, 4, 8]
    assert evaluated_steps(1) == [0, 1]
    small, large = draw(40, 0.1, 7), draw(40, 0.5, 7)
    assert len(small) == 4 and set(small) < set(large) and draw(40, 0.1, 8) != small
    assert draw(40, 1.0, 7) == list(range(40))
    with pytest.raises(ConfigError, match=r"--share 0.01 of 40 rows is empty: give at least 0.025"):
        draw(40, 0.01, 0)


def test_presets_are_attacks() -> None:
    for settings in RELEARN_PRESETS.values():
        RelearnAttack(**settings)
    assert RelearnAttack(**RELEARN_PRESETS["openunlearning"]).total(400) == 13


def test_rows_per_process_make_up_the_batch_or_are_refused() -> None:
    """Over a grid: what is accepted divides the batch, and what a refusal says to type is accepted."""
    for batch, micro, processes in itertools.product((1, 2, 12, 32, 33), (1, 5, 8), (1, 2, 3, 4)):
        attack = RelearnAttack(batch_size=batch, micro_batch=micro)
        largest = min(micro, batch // processes)
        if largest and batch % (largest * processes) == 0:
            assert attack.per_process(processes) == largest
            continue
        with pytest.raises(ConfigError) as error:
            attack.per_process(processes)
        found = re.search(r"(e\.g\. |give --micro-batch )(\d+)", str(error.value))
        assert found is not None
        name = "batch_size" if found[1] == "e.g. " else "micro_batch"
        fitting = {"batch_size": batch, "micro_batch": 1, name: int(found[2])}
        assert RelearnAttack(**fitting).per_process(processes) <= micro


@pytest.mark.parametrize("rank", [None, 2])
def test_learning_rate_zero_returns_the_model_bit_for_bit(audited: Audited, tmp_path: Path, rank: int | None) -> None:
    model = AutoModelForCausalLM.from_pretrained(audited["initial"])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seen: list[int] = []
    attack = RelearnAttack(steps=3, learning_rate=0.0, batch_size=4, lora_r=rank)
    rows = audited.samples["forget"]
    trained = relearn(model, audited.tokenizer, rows, attack, 0, {0, 1, 3}, lambda at, _: seen.append(at), tmp_path)
    if rank is not None:
        trained = trained.merge_and_unload()
    after = trained.state_dict()
    assert seen == [0, 1, 3] and all(torch.equal(before[name], after[name]) for name in before)


def test_an_attack_is_plain_descent_on_the_rows(audited: Audited, tmp_path: Path) -> None:
    """One update with AdamW's first step, whose size is the learning rate along the gradient's sign."""
    model = AutoModelForCausalLM.from_pretrained(audited["retain"])
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    rows = audited.samples["forget"]
    total, count = torch.zeros(()), 0
    for row in rows:
        logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
        labels = torch.tensor(row["labels"][1:])
        total = total + torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")
        count += int((labels != -100).sum())
    (total / count).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    attack = RelearnAttack(steps=1, learning_rate=1e-3, batch_size=4, schedule="constant")
    relearn(model, audited.tokenizer, rows, attack, 0, {1}, lambda *_: None, tmp_path)
    for name, parameter in model.named_parameters():
        clear = gradients[name].abs() > 1e-5
        moved = (parameter.detach() - before[name])[clear]
        torch.testing.assert_close(moved, -1e-3 * gradients[name][clear].sign(), rtol=0, atol=2e-5)


def test_controls_and_a_model_that_only_hides(audited: Audited, tmp_path: Path) -> None:
    before = {name: files_of(audited[name]) for name in ("initial", "retain", "masked")}
    for name in ("masked", "initial", "retain"):
        assert main(["audit", "relearn", *audited.flags(tmp_path / name, name, *FAST)]) == 0
    assert {name: files_of(audited[name]) for name in before} == before
    masked, initial, retain = (document(tmp_path / name) for name in ("masked", "initial", "retain"))
    for metric in ("forget_Q_A_Prob", "exact_memorization"):
        same = line(retain, metric)
        assert (same["R"], same["R_symmetric"], same["area"]) == (1.0, 1.0, 0.0)
        known = line(initial, metric)
        assert known["gap"] == 0.0 and known["half"] == 0
    hidden = line(masked, "forget_Q_A_Prob")
    assert hidden["before"] < 0.15 and hidden["gap"] > 0.6
    assert hidden["R"] < 0.5 and hidden["area"] > 0.3 and hidden["half"] <= 2  # it was hidden, not gone
    assert masked["summary"][0]["per_seed"]["0"]["retain_half"] is None  # while the control needs longer
    assert {"mean", "per_seed", "spread"} <= masked["summary"][0].keys()
    assert [cell["step"] for cell in masked["cells"] if cell["role"] == "initial"] == [0, 1, 2, 4, 8]


def test_a_killed_audit_goes_on_and_other_conditions_are_refused(
    audited: Audited, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = audited.flags(tmp_path, "masked", *FAST, "--share", "0.5", "--seeds", "3")
    assert main(["audit", "relearn", *flags]) == 0
    first = document(tmp_path)
    assert first["rows"] == {"0.5": 2} and first["seeds"] == [3]
    assert {path.suffix for path in (tmp_path / audit.CELLS).iterdir()} == {".json"}  # no unfinished evaluation
    for step in (2, 8):
        (tmp_path / audit.CELLS / f"masked-share0.5-seed3-step{step}.json").unlink(missing_ok=True)
        (tmp_path / audit.CELLS / f"unlearned-share0.5-seed3-step{step}.json").unlink()
    attacked: list[set[int]] = []
    real = audit.relearn

    def watched(*given: Any) -> Any:
        attacked.append(given[5])
        return real(*given)

    monkeypatch.setattr(audit, "relearn", watched)
    assert main(["audit", "relearn", *flags]) == 0
    assert attacked == [{2, 8}]  # one attack, for the two states that were missing
    assert document(tmp_path) == first
    capsys.readouterr()
    assert main(["audit", "relearn", *flags, "--learning-rate", "1e-4"]) == 2
    assert "attack.learning_rate was 0.003, now 0.0001. Pass --overwrite" in capsys.readouterr().err


def test_benign_rows_an_adapter_and_missing_controls(audited: Audited, tmp_path: Path) -> None:
    flags = audited.flags(tmp_path / "out", "masked", *FAST[2:], "--steps", "1", retain=None)
    adapter = ["--preset", "lora", "--lora-r", "4", "--micro-batch", "2", "--on", f"{audited.data}:holdout01"]
    adapter += ["--held-out-questions", "1"]
    assert main(["audit", "relearn", *flags, *adapter]) == 0
    found = document(tmp_path / "out")
    assert found["conditions"]["measure"]["held_out_questions"] == 1
    assert found["attack"]["lora_r"] == 4 and found["attack"]["lora_alpha"] == 16
    assert any("Without --retain" in note and "R and the area" in note for note in found["notes"])
    assert "R" not in found["summary"][0]["mean"] and "gap" in found["summary"][0]["mean"]


def test_other_rows_of_the_same_file_are_another_attack(
    audited: Audited, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = audited.flags(tmp_path / "out", "masked", *FAST[2:], "--steps", "1", retain=None)
    assert main(["audit", "relearn", *flags, "--on", f"{audited.data}:holdout01[:2]"]) == 0
    capsys.readouterr()
    assert main(["audit", "relearn", *flags, "--on", f"{audited.data}:holdout01[2:4]"]) == 2
    assert "rows was" in capsys.readouterr().err


def test_wmdp_questions(audited: Audited, tmp_path: Path) -> None:
    from rosu_llm.toys import write_questions

    write_questions(tmp_path / "questions")
    call = ["audit", "relearn", audited["masked"], "--benchmark", "wmdp", "--data-dir", str(tmp_path / "questions")]
    call += ["--tasks", "wmdp_bio", "--preset", "smooth_wmdp", "--steps", "1", "--out", str(tmp_path / "out")]
    assert main([*call, "--on", f"{audited.data}:holdout01"]) == 0
    found = document(tmp_path / "out")
    assert [cell["step"] for cell in found["cells"]] == [0, 1] and found["remembered"] == ["wmdp_bio"]


def test_bad_input(audited: Audited, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def says(words: str, *flags: str, model: str = audited["masked"]) -> None:
        capsys.readouterr()
        where = ["--data", audited.data, "--forget-split", "forget01", "--chat-format", "Llama-2-7b-hf"]
        assert main(["audit", "relearn", model, *where, "--out", str(tmp_path / "out"), *flags]) == 2
        error = capsys.readouterr().err
        assert words in error and error.strip().startswith("rosu audit: ") and "\n" not in error.strip(), error

    says("--share without a number", "--share")
    says("--share 0 is no share", "--share", "0")
    says("--share 0.01 of 4 rows is empty", "--share", "0.01")
    says("Unknown preset of an attack 'loraa'", "--preset", "loraa")
    says("is in the folder of MODEL", "--out", audited["masked"])
    says("is in the folder of --retain", "--retain", audited["retain"], "--out", f"{audited['retain']}/audits")
    says("on retain is a split of TOFU", "--benchmark", "wmdp", "--on", "retain")
    says("--micro-batch 8 does not divide: give --micro-batch 6", "--batch-size", "12", "--micro-batch", "8")
    assert not (tmp_path / "out").exists()  # before any work
    rounded = tmp_path / "rounded"
    rounded.mkdir()
    for file in Path(audited["retain"]).iterdir():
        (rounded / file.name).write_bytes(file.read_bytes())
    config = json.loads((rounded / "config.json").read_text())
    (rounded / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    says("is stored quantised (gptq)", "--retain", str(rounded))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path / "gone")}))
    says("is an adapter, which is nothing without its base model", model=str(adapter))


def test_an_adapter_with_its_base_is_audited(audited: Audited, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    base = AutoModelForCausalLM.from_pretrained(audited["initial"])
    get_peft_model(base, LoraConfig(r=2, target_modules="all-linear")).save_pretrained(tmp_path / "adapter")
    flags = audited.flags(tmp_path / "out", "initial", *METRICS, "--steps", "1", retain=None)
    assert main(["audit", "relearn", str(tmp_path / "adapter"), *flags[1:]]) == 0
    assert line(document(tmp_path / "out"), "forget_Q_A_Prob")["gap"] == pytest.approx(0, abs=1e-6)
    assert load_file(tmp_path / "adapter" / "adapter_model.safetensors")


def test_the_report_shows_it(audited: Audited, tmp_path: Path) -> None:
    assert main(["audit", "relearn", *audited.flags(tmp_path / "audit", "masked", *METRICS, "--steps", "1")]) == 0
    page = tmp_path / "report.html"
    assert main(["report", str(tmp_path / "audit"), "--out", str(tmp_path / "page")]) == 0
    page = next((tmp_path / "page").glob("*.html"), page)
    text = page.read_text(encoding="utf-8")
    assert "Is it really gone?" in text and "What the attack brought back" in text and "has no log" not in text
