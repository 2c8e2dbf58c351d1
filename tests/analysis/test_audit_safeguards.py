"""The safeguard audit against logs written by hand, and against a real run logged every step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rosu_llm.analysis.safeguards import audit_safeguards, thresholds
from rosu_llm.errors import DataError
from rosu_llm.presentation.audits import histograms, safeguards_section
from rosu_llm.presentation.drawing import png
from rosu_llm.presentation.writers import markdown
from rosu_llm.step import over_steps


def write_run(folder: Path, history: Any, steps: int = 4, settings: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    state = {"global_step": steps, "log_history": history}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    if settings is not None:
        (folder / "rosu_run.json").write_text(json.dumps({"schema": "rosu/run/1", "settings": settings}))
    return folder


def entry(step: int, square: float, q: float, fallback: float = 0.0, **more: float) -> dict[str, float]:
    return {"step": step, "loss": 1.0, "norm/retain_sq": square, "norm/q": q, "step/fallback": fallback, **more}


RECORDED = {"tau": 1e-8, "tau_mode": "absolute", "eps_q": 1e-6}


def test_every_step_logged(tmp_path: Path) -> None:
    history = [entry(1, 4.0, 0.5), entry(2, 1e-8, 0.7), entry(3, 1e-9, 1e-6, 1.0), entry(4, 2.0, 0.1)]
    history += [{"step": 4, "eval_loss": 1.0}, {"step": 4, "train_runtime": 1.0}]
    (run,) = audit_safeguards([write_run(tmp_path / "run", history, settings=RECORDED)])["runs"]
    assert (run["run"], run["steps"], run["logged"], run["per_step"], run["notes"]) == ("run", 4, 4, True, [])
    square, q = run["retain_sq"], run["q"]
    assert (square["min"], square["median"], square["max"], square["threshold"]) == (1e-9, (2.0 + 1e-8) / 2, 4.0, 1e-8)
    assert (square["below"], square["count"], square["minimum_exact"]) == (2, 4, True)
    assert (q["min"], q["median"], q["max"], q["below"]) == (1e-6, 0.3, 0.7, 1)
    assert q["values"] == [0.5, 0.7, 1e-6, 0.1] and q["steps"] == [1, 2, 3, 4]
    assert (run["fallbacks"], run["fallbacks_exact"]) == (1, True)


def test_logs_over_several_steps(tmp_path: Path) -> None:
    """Means hide single steps; what is logged beside them does not, and without that the result says so."""
    extremes = {"norm/retain_sq_min": 1e-9, "norm/q_min": 0.2, "step/fallbacks": 2.0, "coupling/residue_max": 0.9}
    new = [entry(5, 3.0, 0.5, 0.4, **extremes, **{"coupling/residue": 0.2}), entry(10, 2.0, 0.4)]
    old = [entry(5, 3.0, 0.5, 0.4), entry(10, 2.0, 0.4)]
    odd = [entry(5, 3.0, 0.5, 0.25)]  # four of five steps had a gradient
    folders = [
        write_run(tmp_path / name, history, 10, RECORDED)
        for name, history in (("new", new), ("old", old), ("odd", odd))
    ]
    found = {run["run"]: run for run in audit_safeguards(folders)["runs"]}
    assert not found["new"]["per_step"] and "Logs cover up to 5 steps" in found["new"]["notes"][0]
    assert found["new"]["retain_sq"]["min"] == 1e-9 and found["new"]["retain_sq"]["below"] == 1
    assert found["new"]["retain_sq"]["max"] == 3.0 and found["new"]["residue_max"] == 0.9
    assert not found["new"]["retain_sq"]["minimum_exact"]  # of the second log only the mean is known
    assert (found["old"]["fallbacks"], found["old"]["fallbacks_exact"]) == (2, True)  # 0.4 of five steps
    assert found["old"]["retain_sq"]["min"] == 2.0
    assert any("means only" in note for note in found["old"]["notes"])
    assert (found["odd"]["fallbacks"], found["odd"]["fallbacks_exact"]) == (1, False)
    assert "≈ 1 in 10 steps" in markdown.section(safeguards_section({"runs": [found["odd"]], "notes": []}))


def test_the_trainer_logs_what_means_hide() -> None:
    found = over_steps(
        {"norm/q": [3.0, 1.0], "norm/retain_sq": [4.0, 6.0], "step/fallback": [1.0, 1.0], "loss/x": [2.0, 4.0]}
    )
    assert found == {
        **{"norm/q": 2.0, "norm/retain_sq": 5.0, "step/fallback": 1.0, "loss/x": 3.0},
        **{"norm/q_min": 1.0, "norm/retain_sq_min": 4.0, "step/fallbacks": 2.0},
    }
    assert over_steps({"norm/q": [3.0]}) == {"norm/q": 3.0}


def test_a_real_run_logged_every_third_step(tmp_path: Path) -> None:
    runs = {every: _train({"output_dir": str(tmp_path / str(every))}, every) for every in (1, 3)}
    single, joint = (audit_safeguards([runs[every]])["runs"][0] for every in (1, 3))
    assert single["per_step"] and not joint["per_step"] and joint["q"]["minimum_exact"]
    for key in ("retain_sq", "q"):
        assert joint[key]["min"] == pytest.approx(single[key]["min"], rel=1e-12)
    assert (joint["fallbacks"], joint["fallbacks_exact"]) == (0, True) and joint["tau"] == 1e-8


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    write_run(tmp_path / "nan", [entry(1, nan, inf), entry(2, 3.0, inf)], 2, RECORDED)
    write_run(tmp_path / "plain", [{"step": 1, "loss": 2.0}], 1, RECORDED)
    write_run(tmp_path / "unknown", [{"step": 1, "norm/retain_sq": 2.0}], 1)
    write_run(tmp_path / "relative", [entry(1, 1e-12, 0.1)], 1, {**RECORDED, "tau_mode": "relative", "tau": 1e-3})
    killed = write_run(tmp_path / "killed" / "checkpoint-3", [entry(1, 1.0, 1.0)], 3)
    (killed / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")  # one without tensors
    (tmp_path / "empty").mkdir()
    write_run(tmp_path / "cut", [])
    (tmp_path / "cut" / "trainer_state.json").write_text("{")
    write_run(tmp_path / "odd", "no list")
    names = ("nan", "plain", "unknown", "relative", "killed", "empty", "cut", "odd")
    document = audit_safeguards([tmp_path / name for name in names])
    found = {run["run"]: run for run in document["runs"]}
    assert found["nan"]["retain_sq"]["values"] == [3.0] and found["nan"]["q"] is None
    assert "‖r‖² is NaN or infinite in 1 of 2 logs; left out." in found["nan"]["notes"]
    assert found["plain"]["fallbacks"] is None and "this method computes none of them" in found["plain"]["notes"][0]
    assert found["unknown"]["q"] is None and "‖q‖ is not in the logs." in found["unknown"]["notes"]
    assert any("does not record τ and ε_q: 1e-08 and 1e-06" in note for note in found["unknown"]["notes"])
    assert found["relative"]["retain_sq"]["below"] == 0 and found["relative"]["retain_sq"]["threshold"] is None
    assert found["killed"]["logged"] == 1 and "up to checkpoint-3" in found["killed"]["notes"][0]
    assert "There are no logs" in found["empty"]["notes"][0] and found["empty"]["steps"] is None
    assert "is not JSON" in found["cut"]["notes"][0] and found["odd"]["logged"] == 0
    json.dumps(document, allow_nan=False)
    text = markdown.section(safeguards_section(document))
    assert "| empty | ‖q‖ | – | – | – | – | – | – |" in text and "\nempty: There are no logs" in text
    for shown in (document, {"runs": [found["empty"]], "notes": []}):
        assert len(png(histograms(shown))) > 5_000


def test_runs_of_one_name_and_runs_that_are_not_there(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name / "run", [entry(1, 1.0, 1.0)]) for name in ("a", "b")]
    assert [run["run"] for run in audit_safeguards(runs)["runs"]] == [str(run) for run in runs]
    state = runs[0] / "trainer_state.json"
    assert audit_safeguards([state])["runs"][0]["logged"] == 1
    with pytest.raises(DataError, match="nowhere does not exist"):
        audit_safeguards([tmp_path / "nowhere"])
    with pytest.raises(DataError, match="No run was given"):
        audit_safeguards([])


def test_thresholds_of_an_openunlearning_run(tmp_path: Path) -> None:
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text("trainer: {method_args: {tau: 1.0e-5, eps_q: 1.0e-3}}\n")
    found = thresholds(tmp_path)
    assert (found.tau, found.eps_q, found.tau_mode, found.recorded) == (1e-5, 1e-3, "absolute", True)


def _train(values: dict[str, Any], every: int) -> Path:
    """Six steps of a toy run, with a log every so many."""
    from rosu_llm.experiments.demo.world import SMOKE, build_world, small_llama
    from rosu_llm.recipes.prepare import Loaded
    from rosu_llm.recipes.run import train
    from rosu_llm.recipes.settings import build

    settings = {"max_steps": 6, "per_device_train_batch_size": 2, "logging_steps": every, "use_cpu": True}
    recipe = build({**values, **settings, "report_to": [], "save_strategy": "no", "disable_tqdm": True})
    world = build_world(0, people=SMOKE.people)
    model = small_llama(len(world.tokenizer), 0, hidden=SMOKE.hidden, layers=SMOKE.layers)
    train(recipe, Loaded(model, world.tokenizer, world.data["forget"], world.data["retain"]))
    return Path(recipe.config.output_dir)
