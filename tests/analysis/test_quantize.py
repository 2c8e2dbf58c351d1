"""Quantisation: rounding against naive loops and the library's own layers, controls, and a nudge that vanishes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rosu_llm.analysis.quantize import audit, rounding
from rosu_llm.analysis.quantize.ratios import against_control, surviving
from rosu_llm.analysis.quantize.rounding import LIBRARY, compare_buckets, linear_layers, round_model, rounded
from rosu_llm.cli.main import main
from rosu_llm.data.pairing import ForgetRetainCollator
from rosu_llm.evaluation.memorisation import score
from rosu_llm.evaluation.tofu.summary import ATTACKS, MEMORISATION
from rosu_llm.losses import COUNT, answer_nll
from tests.analysis.conftest import Audited
from tests.analysis.test_relearn import files_of

needs_library = pytest.mark.skipif(not rounding.has_library(), reason="bitsandbytes is not installed")
GROUP = 16


def document(out: Path) -> dict[str, Any]:
    return json.loads((out / "audit_quantize.json").read_text(encoding="utf-8"))


def figures(found: dict[str, Any], role: str, precision: str) -> dict[str, float]:
    return next(c["figures"] for c in found["cells"] if (c["role"], c["precision"]) == (role, precision))


@pytest.mark.parametrize(("name", "bits"), [("rtn8", 8), ("rtn4", 4)])
def test_round_to_nearest_against_a_loop(name: str, bits: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(5, 11, dtype=torch.float64)
    weight[2, :4] = 0.0  # a group without a scale
    found = rounded(weight, name, 4)
    largest = 2 ** (bits - 1) - 1
    for row in range(5):
        for start in range(0, 11, 4):
            part = weight[row, start : start + 4].float()
            scale = max(abs(float(w)) for w in part) / largest
            for column, value in enumerate(part.tolist(), start):
                bucket = round(value / scale) if scale else 0
                assert int(found.buckets[row, column]) == bucket
                assert float(found.weights[row, column]) == pytest.approx(bucket * scale, rel=1e-5)
    again = rounded(found.weights, name, 4)
    assert torch.equal(again.buckets, found.buckets)  # what is rounded stays where it is
    assert found.weights.dtype == torch.float64


@needs_library
def test_library_weights_are_those_of_its_layers() -> None:
    """NF4 and FP4 against what bitsandbytes' own layer computes; INT8 is within half a step of every row."""
    import bitsandbytes as bnb

    torch.manual_seed(0)
    layer = torch.nn.Linear(512, 512, bias=False)
    x = torch.randn(4, 512)
    errors = {}
    for name in ("nf4", "fp4"):
        theirs = bnb.nn.Linear4bit(
            512, 512, bias=False, quant_type=name, compute_dtype=torch.float32, compress_statistics=False
        )
        theirs.load_state_dict(layer.state_dict())
        theirs = theirs.to("cpu")
        ours = x @ rounded(layer.weight, name).weights.T
        torch.testing.assert_close(ours, theirs(x), rtol=1e-4, atol=1e-4)
        assert int(rounded(layer.weight, name).buckets.max()) == 15
        exact = layer(x)
        errors[name] = float((ours - exact).norm() / exact.norm())
    assert 0.05 < errors["nf4"] < errors["fp4"] < 0.15
    found = rounded(layer.weight, "int8")
    step = layer.weight.abs().amax(1, keepdim=True) / 127
    assert bool(((found.weights - layer.weight).abs() <= 0.51 * step + 1e-4).all())


def test_ratios_against_their_definition() -> None:
    assert surviving(0.3, 0.6) == 0.5 and surviving(0.7, 0.6) == 1.0 and surviving(0.1, 0.0) == 1.0
    assert surviving(-0.1, 0.5) == 0.0
    assert against_control(0.3, 0.6, 0.4, 0.5) == pytest.approx(0.5 / 0.8)
    third = 1 / 3
    assert against_control(0.1, third, 0.1, third) == 1.0


def grid_model(audited: Audited) -> Any:
    """The initial model with its weights on the grid of rtn4, learned again with norms and embeddings alone."""
    model = AutoModelForCausalLM.from_pretrained(audited["initial"])
    round_model(model, "rtn4", GROUP)
    fixed = {id(layer.weight) for _, layer in linear_layers(model)}
    free = [p for p in model.parameters() if id(p) not in fixed]
    optimizer = torch.optim.Adam(free, lr=3e-3)
    batch = ForgetRetainCollator(0)([*audited.samples["forget"], *audited.samples["retain"]])
    for _ in range(20):
        optimizer.zero_grad()
        model.zero_grad()
        (answer_nll(model, batch).sum() / COUNT["token"](batch)).backward()
        optimizer.step()
    return model


def nudge(model: Any, audited: Audited) -> None:
    """Ascent on the forget set, each weight within 0.45 of a step and the largest of a group left alone."""
    batch = ForgetRetainCollator(0)(audited.samples["forget"])
    layers = [layer for _, layer in linear_layers(model)]
    start = [layer.weight.detach().clone() for layer in layers]
    room = []
    for weight in start:
        groups = weight.view(len(weight), -1, GROUP)
        largest = groups.abs().amax(-1, keepdim=True)
        room.append(torch.where(groups.abs() == largest, 0.0, 0.45 * largest / 7).view_as(weight))
    for _ in range(25):
        model.zero_grad()
        (answer_nll(model, batch).sum() / COUNT["token"](batch)).backward()
        with torch.no_grad():
            for layer, first, free in zip(layers, start, room, strict=True):
                moved = layer.weight + 0.2 * free * layer.weight.grad.sign()
                layer.weight.copy_(torch.minimum(torch.maximum(moved, first - free), first + free))


def test_a_nudge_of_rounding_size_is_exposed(audited: Audited, tmp_path: Path) -> None:
    model = grid_model(audited)
    audited.save("grid", model)
    known = score(model, audited.samples["forget"]).probability
    nudge(model, audited)
    audited.save("nudged", model)
    gone = score(model, audited.samples["forget"]).probability
    assert known > 0.6 and gone < 0.05  # at full precision it looks unlearned
    asked = ["--metrics", "forget_Q_A_Prob", "retain_Q_A_Prob", *MEMORISATION.values(), *ATTACKS.values()]
    flags = audited.flags(tmp_path, "nudged", "--precisions", "rtn4", "rtn8", "--group-size", str(GROUP), *asked)
    flags[flags.index("--target") + 1] = audited["grid"]
    before = {name: files_of(audited[name]) for name in ("nudged", "grid", "retain")}
    assert main(["audit", "quantize", *flags]) == 0
    assert {name: files_of(audited[name]) for name in before} == before
    found = document(tmp_path)
    assert found["buckets"]["rtn4"]["changed"] > 0.8  # most weights moved
    assert found["buckets"]["rtn4"]["other_bucket"] == 0.0  # and none is left where it was put
    assert found["buckets"]["rtn4"]["surviving"] < 1e-6 and found["buckets"]["rtn8"]["other_bucket"] > 0.3
    back = figures(found, "unlearned", "rtn4")
    initial = figures(found, "initial", "full")
    for metric in ("forget_Q_A_Prob", "exact_memorization", "retain_Q_A_Prob"):
        assert back[metric] == pytest.approx(initial[metric], abs=1e-6), metric
    assert figures(found, "unlearned", "full")["forget_Q_A_Prob"] < 0.05
    lines = {(line["precision"], line["figure"]): line for line in found["ratios"]}
    exposed = lines["rtn4", "1 − forget_Q_A_Prob"]
    assert exposed["Q"] < 0.45 and exposed["Q_control"] < 0.5
    assert lines["rtn8", "1 − forget_Q_A_Prob"]["Q"] > 0.9  # 8 bits are finer than the nudge
    mem, priv = ({c["precision"]: c["scores"][name] for c in found["cells"][:3]} for name in ("Mem", "Priv"))
    assert mem["full"] > 2 * mem["rtn4"] and priv.keys() == {"full", "rtn4", "rtn8"}


def test_the_retain_model_against_itself_and_resuming(
    audited: Audited, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ["forget_Q_A_Prob", "exact_memorization", "mia_min_k", "privleak", "forget_quality"]
    flags = audited.flags(tmp_path, "retain", "--precisions", "rtn4", "--metrics", *names)
    assert main(["audit", "quantize", *flags]) == 0
    first = document(tmp_path)
    assert first["ratios"] and all(line["Q_control"] == 1.0 for line in first["ratios"])
    assert figures(first, "unlearned", "full")["forget_quality"] == 1.0
    assert figures(first, "unlearned", "full")["privleak"] == 0.0
    (tmp_path / audit.CELLS / "unlearned-rtn4-g64.json").unlink()
    calls: list[str] = []
    real = audit.round_model
    monkeypatch.setattr(audit, "round_model", lambda m, p, g: calls.append(p) or real(m, p, g))
    assert main(["audit", "quantize", *flags]) == 0
    assert calls == ["rtn4"] and document(tmp_path) == first
    capsys.readouterr()
    assert main(["audit", "quantize", *flags, "--group-size", "32"]) == 2
    assert "group_size was 64, now 32" in capsys.readouterr().err
    assert main(["audit", "quantize", *flags, "--group-size", "32", "--overwrite"]) == 0
    assert document(tmp_path)["group_size"] == 32


def test_without_references_and_with_wmdp(audited: Audited, tmp_path: Path) -> None:
    from rosu_llm.toys import write_questions

    write_questions(tmp_path / "questions")
    call = ["audit", "quantize", audited["masked"], "--benchmark", "wmdp", "--data-dir", str(tmp_path / "questions")]
    call += ["--tasks", "wmdp_bio", "--precisions", "rtn4", "--out", str(tmp_path / "out")]
    assert main(call) == 0
    found = document(tmp_path / "out")
    assert figures(found, "unlearned", "rtn4").keys() == {"wmdp_bio"} and not found["buckets"]
    assert sum("Without --" in note for note in found["notes"]) == 2


def test_bad_input(
    audited: Audited, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ["audit", "quantize", audited["masked"], "--out", str(tmp_path)]
    assert main([*call, "--precisions", "nf5"]) == 2
    assert "Unknown precision 'nf5'" in capsys.readouterr().err
    assert main([*call, "--group-size", "1"]) == 2
    assert "--group-size 1 is no group" in capsys.readouterr().err
    monkeypatch.setattr(rounding, "has_library", lambda: False)
    assert main([*call, "--precisions", *LIBRARY]) == 2
    error = capsys.readouterr().err
    assert "--precisions int8 nf4 fp4 needs bitsandbytes" in error and "rtn4" in error
    model = AutoModelForCausalLM.from_pretrained(audited["retain"])
    other = AutoModelForCausalLM.from_pretrained(audited["retain"])
    assert compare_buckets(model, other, "rtn4") == {
        "changed": 0.0,
        "other_bucket": 0.0,
        "update": 0.0,
        "surviving": 0.0,
    }
