"""The orthogonality audit from a recipe: both routes, adapters, interruption, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rosu_llm.analysis.orthogonality.audit import audit_orthogonality
from rosu_llm.errors import ConfigError, NonFiniteError
from rosu_llm.presentation.audits import orthogonality_section
from rosu_llm.presentation.drawing import png
from rosu_llm.presentation.writers import markdown
from rosu_llm.toys import toy_values

RECORD = "audit_orthogonality.jsonl"
Values = dict[str, Any]


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> Values:
    """A toy checkpoint, 16 questions to forget and 24 to keep, batches that do not divide them."""
    found = toy_values({"seed": 3, "per_device_train_batch_size": 5}, tmp_path_factory.mktemp("toy"))
    return {**found, "per_device_train_batch_size": 5, "gradient_accumulation_steps": 1}


def quiet(*_: Any) -> None:
    pass


def run(values: Values, out: Path, progress: Callable[..., None] = quiet, **options: Any) -> Any:
    return audit_orthogonality(values, out, progress, **{"pairs": 12, "batch_sizes": (2, 6, 18), **options})


def test_both_routes_agree_with_each_other_and_with_autograd(values: Values, tmp_path: Path) -> None:
    results = {choice: run(values, tmp_path / choice, per_sample=choice) for choice in ("yes", "no")}
    assert [results[choice]["route"] for choice in ("yes", "no")] == ["per_sample", "recompute"]
    assert results["yes"]["full_gradient_norm"] == pytest.approx(results["no"]["full_gradient_norm"], rel=1e-5)
    for ours, other in zip(results["yes"]["cells"], results["no"]["cells"], strict=True):
        for key in ("eps_orth", "bound"):  # float32 passes of different shapes
            np.testing.assert_allclose(ours["samples"][key], other["samples"][key], rtol=2e-4, atol=2e-6)
        assert ours["violations"] == other["violations"] == 0 and ours["used"] == 12
    medians = [cell["eps_orth"]["median"] for cell in results["yes"]["cells"]]
    assert medians[0] > medians[1] > medians[2] > 0.0
    assert results["yes"]["forget_batch_size"] == 5 and results["yes"]["retain_samples"] == 24
    assert _mean_loss_gradient_norm(values) == pytest.approx(results["yes"]["full_gradient_norm"], rel=1e-4)
    assert len(png(orthogonality_section(results["yes"]).figures[0])) > 10_000
    text = markdown.section(orthogonality_section(results["yes"]))
    assert f"| 6 | {medians[1]:.4f} |" in text and "24 samples" in text


def _mean_loss_gradient_norm(values: Values) -> float:
    """‖∇‖ of the mean token loss over the retain file, without any of the audit's code."""
    from transformers import AutoModelForCausalLM

    from rosu_llm.recipes.prepare import load
    from rosu_llm.recipes.settings import build

    retain = load(build({**values, "holdout_data": None, "output_dir": "unused"})).retain
    model = AutoModelForCausalLM.from_pretrained(values["model_name_or_path"]).double().eval()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for sample in retain:
        ids, labels = (torch.tensor([sample[key]]) for key in ("input_ids", "labels"))
        wanted = labels[0, 1:] != -100
        logs = model(input_ids=ids).logits[0, :-1].double().log_softmax(-1)
        total = total - logs[wanted, labels[0, 1:][wanted]].sum()
        count += int(wanted.sum())
    (total / count).backward()
    return float(
        torch.sqrt(sum(((p.grad**2).sum() for p in model.parameters() if p.grad is not None), torch.zeros(())))
    )


@pytest.mark.parametrize("choice", ["yes", "no"])
def test_an_interrupted_audit_goes_on_as_if_it_had_not_been(values: Values, tmp_path: Path, choice: str) -> None:
    whole = run(values, tmp_path / "whole", per_sample=choice)
    stages: list[str] = []

    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "mini-batch pairs" and done == 17:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(values, tmp_path / "cut", interrupt, per_sample=choice)
    record = tmp_path / "cut" / RECORD
    assert len(record.read_text().splitlines()) == 2 + 17
    record.write_text(record.read_text()[:-25])  # killed while writing: the last pair is measured again
    resumed = run(values, tmp_path / "cut", lambda stage, *_: stages.append(stage))  # by the route it began with
    assert resumed == whole
    assert not {"per-sample gradients", "inner products"} & set(stages)  # these were kept
    assert ("full retain gradient" in stages) == (choice == "no")
    lines = {json.dumps(json.loads(line), sort_keys=True) for line in record.read_text().splitlines()}
    assert lines == {json.dumps(json.loads(line), sort_keys=True) for line in (tmp_path / "whole" / RECORD).open()}
    stages.clear()
    assert run(values, tmp_path / "cut", lambda stage, *_: stages.append(stage)) == whole and not stages
    more = run(values, tmp_path / "cut", pairs=14, batch_sizes=(2, 6, 18, 20))
    assert more["cells"][0]["samples"]["eps_orth"][:12] == whole["cells"][0]["samples"]["eps_orth"]
    assert [path.name for path in (tmp_path / "cut").iterdir()] == [RECORD]


def test_results_of_another_audit_are_not_mixed_in(values: Values, tmp_path: Path) -> None:
    run(values, tmp_path, pairs=1, batch_sizes=(2,))
    for change, name in (({"seed": 4}, "seed"), ({"limit": 9}, "retain"), ({"forget_loss": "simnpo"}, "settings")):
        with pytest.raises(
            ConfigError, match=rf"holds pairs of another audit \(.*{name}.* was .*, now .*\): give another --out"
        ):
            run({**values, **change}, tmp_path, pairs=1, batch_sizes=(2,))
    (tmp_path / RECORD).write_text("something else\n")
    with pytest.raises(ConfigError, match="is no record of an audit"):
        run(values, tmp_path, pairs=1, batch_sizes=(2,))


@pytest.mark.parametrize(
    "change", [{"lora_r": 2}, {"forget_loss": "npo"}, {"forget_loss": "simnpo"}], ids=["lora", "npo", "simnpo"]
)
def test_adapters_and_other_losses(values: Values, tmp_path: Path, change: Values) -> None:
    if "lora_r" in change:
        pytest.importorskip("peft")
    medians = []
    for choice in ("yes", "no"):
        result = run({**values, **change}, tmp_path / choice, per_sample=choice, pairs=2, batch_sizes=(6,))
        assert result["cells"][0]["violations"] == 0 and result["cells"][0]["used"] == 2
        medians.append(result["cells"][0]["eps_orth"]["median"])
    assert medians[0] == pytest.approx(medians[1], rel=1e-3) and 0.0 < medians[0] < 1.0
    if "lora_r" in change:  # A and B of every linear layer but the head
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(values["model_name_or_path"])
        shapes = [
            m.weight.shape for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "head" not in name
        ]
        assert result["parameters"] == 2 * sum(map(sum, shapes))


def test_what_cannot_be_audited_is_refused(values: Values, tmp_path: Path) -> None:
    hidden = {"forget_loss": "representation", "retain_loss": "representation", "holdout_data": None}
    for change, options, message in (
        (hidden, {}, "next-token losses.*representation-level retain loss is zero"),
        ({"retain_loss": "kl"}, {}, "retain_loss='kl'.*--retain-loss nll"),
        ({"reduction": "micro_mean"}, {}, "--reduction window_tokens"),
        ({}, {"batch_sizes": (25,)}, "--batch-sizes 25 does not fit the retain set of 24"),
        ({}, {"forget_batch_size": 17}, "--forget-batch-size 17 does not fit the forget set of 16"),
        ({}, {"per_sample": "maybe"}, "Unknown --per-sample 'maybe'"),
    ):
        with pytest.raises(ConfigError, match=message):
            run({**values, **change}, tmp_path, **options)  # type: ignore[arg-type]
    assert not (tmp_path / RECORD).exists()


def test_a_broken_model_is_named(values: Values, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = Path(values["model_name_or_path"])
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in folder.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = load_file(broken / "model.safetensors")
    next(iter(weights.values()))[0] = float("nan")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NonFiniteError, match="full retain gradient is nan"):
        run({**values, "model_name_or_path": str(broken)}, tmp_path / "nan")
