"""Sensitivity from stores of ``rosu ablate`` and ``rosu sweep`` written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rosu_llm.analysis.finished_runs import read_results
from rosu_llm.analysis.sensitivity import CLOUD, PAPER_LABEL, sensitivity
from rosu_llm.errors import DataError
from rosu_llm.experiments.attempt import DONE, FAILED, CellStore, Record, cell_key
from rosu_llm.presentation.audits import sensitivity_section, trajectories
from rosu_llm.presentation.drawing import png
from rosu_llm.presentation.writers import markdown

TASK = {"task": "demo", "hidden": 32}


def page(document: dict[str, Any]) -> str:
    return markdown.section(sensitivity_section(document))


def put(folder: Path, settings: dict[str, Any], seed: int = 0, task: Any = None, **metrics: float) -> Record:
    task = task or TASK
    key = cell_key(task, settings, seed)
    model = f"models/{key}"
    record = Record(DONE, metrics, key=key, label="row", seed=seed, task=task, settings=settings, model=model)
    CellStore(folder / "cells").put(record)
    return record


def sweep(folder: Path, trials: list[dict[str, Any]], task: str = "tofu") -> Path:
    folder.mkdir(parents=True)
    content = {
        **{"schema": "rosu/sweep/1", "task": task, "seed": 0, "recipe": {"model_name_or_path": "m", "method": "rosu"}},
        **{
            "headings": {"Agg_MU": "Agg_MU (MU only)"},
            "references": {"initial": {"scores": {"Mem": 0.1, "Priv": None}}},
        },
        "trials": trials,
    }
    (folder / "trials.json").write_text(json.dumps(content))
    return folder


def trial(number: int, settings: dict[str, Any], state: str = "done", **scores: float | None) -> dict[str, Any]:
    return {"number": number, "state": state, "settings": settings, "scores": scores, "figures": {}, "model": None}


def test_lines_of_a_store_are_means_over_seeds(tmp_path: Path) -> None:
    for rho in (0.4, 0.2):
        for kappa in (0.3, 0.5):
            for seed in (0, 1):
                put(tmp_path, {"rho": rho, "kappa": kappa}, seed, retain_em=rho + kappa + seed, forget_em=0.5)
    put(tmp_path, {"rho": 0.7, "kappa": 0.9}, 0, retain_em=9.0, forget_em=9.0)  # alone on its line
    store = CellStore(tmp_path / "cells")
    store.put(Record(FAILED, error="no", key="f" * 16, label="row", seed=0, task=TASK, settings={"rho": 9.0}))
    reference = {"key": "e" * 16, "label": "before", "seed": 0, "settings": {"reference": "before"}}
    store.put(Record(DONE, {"retain_em": 1.0}, task=TASK, **reference))
    document = sensitivity(read_results([tmp_path]))
    assert document["measures"] == ["retain_em", "forget_em"] and document["paper"] == {}
    assert document["references"] == {"before": {"retain_em": 1.0}}
    found = {line["line"]: line["points"] for line in document["axes"]["rho"]}
    assert list(found) == ["κ = 0.3", "κ = 0.5"]
    assert [point["x"] for point in found["κ = 0.3"]] == [0.2, 0.4]
    first = found["κ = 0.3"][0]
    assert first["mean"]["retain_em"] == pytest.approx(1.0) and first["spread"]["retain_em"] == pytest.approx(0.5**0.5)
    assert first["count"] == 2 and first["spread"]["forget_em"] == 0.0
    assert any("1 failed cells left out" in note for note in document["notes"])
    assert any("No two runs differ in retain batch size" in note for note in document["notes"])
    assert any("paper's table on ρ is in TOFU's measures" in note for note in document["notes"])
    text = page(document)
    assert "| 0.2 | κ = 0.3 | 1.000 ± 0.707 | 0.500 ± 0.000 | 2 |" in text and PAPER_LABEL not in text
    assert all(len(png(figure)) > 5_000 for figure in sensitivity_section(document).figures)


def test_the_retain_batch_size_counts_the_whole_window(tmp_path: Path) -> None:
    for retain in (1, 4):
        put(tmp_path, {"retain_per_forget": retain}, retain_em=0.1 * retain)
    document = sensitivity(read_results([tmp_path / "cells"]))
    assert [point["x"] for point in document["axes"]["retain_batch"][0]["points"]] == [
        8.0,
        32.0,
    ]  # Trainer's default of 8
    for retain in (1, 4):
        settings = {"retain_per_forget": retain, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
        put(tmp_path / "other", settings, retain_em=0.1)
    document = sensitivity(read_results([tmp_path / "other"]))
    assert [point["x"] for point in document["axes"]["retain_batch"][0]["points"]] == [6.0, 24.0]
    assert document["axes"]["retain_batch"][0]["line"] == "" and "| 24 | this task |" in markdown.section(
        sensitivity_section(document)
    )


def test_a_sweep_stands_beside_the_paper(tmp_path: Path) -> None:
    trials = [trial(i, {"rho": rho}, Agg_MU=rho, Mem=0.3, Util=0.9, Priv=None) for i, rho in enumerate((0.2, 0.4))]
    trials += [trial(2, {"rho": 0.5}, "failed"), trial(3, {"rho": 0.6}, "pruned")]
    document = sensitivity(read_results([sweep(tmp_path / "s", trials)]))
    assert document["measures"] == ["Agg_MU", "Mem", "Util"] and document["headings"]["Agg_MU"] == "Agg_MU (MU only)"
    assert document["references"] == {"initial": {"Mem": 0.1}}
    assert [point["mean"]["Agg_MU"] for point in document["axes"]["rho"][0]["points"]] == [0.2, 0.4]
    # the paper's table, tab:rho_sensitivity, column by column
    assert [row["x"] for row in document["paper"]["rho"]] == [0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5]
    assert document["paper"]["rho"][4] == {
        "x": 0.4,
        "Agg": 0.58,
        "Agg_MU": 0.52,
        "Mem": 0.38,
        "Priv": 0.74,
        "Util": 0.82,
    }
    assert [row["Util"] for row in document["paper"]["rho"]] == [0.81, 0.78, 0.73, 0.80, 0.82, 0.81, 0.76]
    assert [row["Priv"] for row in document["paper"]["rho"]] == [1.0, 1.0, 0.98, 0.93, 0.74, 0.92, 0.82]
    text = page(document)
    assert f"| 0.4 | {PAPER_LABEL} | 0.52 | 0.38 | 0.82 | – |" in text and "2 trials without scores" in text
    assert all(len(png(figure)) > 5_000 for figure in sensitivity_section(document).figures)
    json.dumps(document, allow_nan=False)


def test_the_papers_aggregates_follow_from_its_own_columns() -> None:
    """Agg and Agg_MU are harmonic means: a digit copied wrong would not fit."""
    from rosu_llm.analysis.sensitivity import paper_rows

    for row in paper_rows():
        pair = 2.0 / (1.0 / row["Mem"] + 1.0 / row["Util"])
        triple = 3.0 / (1.0 / row["Mem"] + 1.0 / row["Priv"] + 1.0 / row["Util"])
        assert pair == pytest.approx(row["Agg_MU"], abs=0.01) and triple == pytest.approx(row["Agg"], abs=0.01)


def test_a_random_search_is_a_cloud(tmp_path: Path) -> None:
    trials = [trial(i, {"rho": 0.1 * i, "learning_rate": 1e-5 * i}, Agg_MU=0.1 * i, Mem=0.3) for i in range(1, 6)]
    document = sensitivity(read_results([sweep(tmp_path / "s", trials) / "trials.json"]))
    (line,) = document["axes"]["rho"]
    assert line["line"] == CLOUD and len(line["points"]) == 5
    assert all(len(png(figure)) > 5_000 for figure in sensitivity_section(document).figures)


def test_trajectories_are_read_where_logs_were_kept(tmp_path: Path) -> None:
    for retain in (1, 2):
        record = put(tmp_path, {"retain_per_forget": retain}, retain_em=0.5)
        folder = tmp_path / str(record.model)
        folder.mkdir(parents=True)
        history: list[dict[str, Any]] = [{"step": s, "loss/retain": 1.0 / s, "loss/forget": s * retain} for s in (1, 2)]
        history[1]["loss/retain"] = float("nan")
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": [*history, {"step": 2, "eval_loss": 1}]}))
    document = sensitivity(read_results([tmp_path]))
    assert [run["x"] for run in document["trajectories"]] == [8.0, 16.0]
    assert document["trajectories"][1]["loss/forget"] == [2.0, 4.0]
    assert document["trajectories"][0]["loss/retain"] == [1.0, None]
    assert len(png(trajectories(document))) > 5_000


def test_tasks_are_not_joined_and_nothing_is_not_plotted(tmp_path: Path) -> None:
    for name, hidden in (("a", 32), ("b", 64), ("c", 32)):
        put(tmp_path / name, {"rho": 0.2}, task={"task": "demo", "hidden": hidden}, retain_em=0.5)
    put(tmp_path / "c", {"rho": 0.4}, retain_em=0.7)
    assert len(read_results([tmp_path / "a", tmp_path / "c"]).runs) == 3
    with pytest.raises(DataError, match=r"different tasks \(hidden differ\).*one at a time"):
        read_results([tmp_path / "a", tmp_path / "b"])
    put(tmp_path / "b", {"rho": 0.4}, retain_em=0.7)
    with pytest.raises(DataError, match="cells of 2 different tasks"):
        read_results([tmp_path / "b"])
    (tmp_path / "nothing" / "cells").mkdir(parents=True)
    with pytest.raises(DataError, match="No finished run in"):
        read_results([tmp_path / "nothing"])
    with pytest.raises(DataError, match="holds no results: give the folder of a rosu ablate"):
        read_results([tmp_path / "nowhere"])
    with pytest.raises(DataError, match="No results were given"):
        read_results([])
