"""Result folders as OpenUnlearning leaves them, made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

FIGURES = {
    "extraction_strength": 0.5,
    "exact_memorization": 0.75,
    "forget_Q_A_PARA_Prob": 0.5,
    "forget_truth_ratio_prob_mean": 0.75,
    "mia_loss": 0.4,
    "mia_zlib": 0.7,
    "mia_min_k": 0.4,
    "mia_min_k_plus_plus": 0.7,
    "model_utility": 0.6,
    "forget_Q_A_gibberish": 0.3,
    "forget_quality": 0.02,
}
RETAIN = {**FIGURES, **dict.fromkeys(("mia_loss", "mia_zlib", "mia_min_k", "mia_min_k_plus_plus"), 0.4)}
INITIAL = {**FIGURES, "model_utility": 0.75, "forget_Q_A_gibberish": 0.5, "extraction_strength": 1.0}


def write_eval(folder: Path, figures: dict[str, Any], *, questions: int = 4, name: str = "TOFU_EVAL.json") -> Path:
    """The per-question form: ``agg_value`` with ``value_by_index``."""
    folder.mkdir(parents=True, exist_ok=True)
    by_index = {str(at): {"prob": 0.5, "avg_loss": 0.7} for at in range(questions)}
    content = {key: {"agg_value": value, "value_by_index": by_index} for key, value in figures.items()}
    (folder / name).write_text(json.dumps(content))
    return folder / name


def write_summary(folder: Path, figures: dict[str, Any]) -> Path:
    """The form with means only."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "TOFU_SUMMARY.json").write_text(json.dumps(figures))
    return folder / "TOFU_SUMMARY.json"


def write_hydra(
    folder: Path,
    config: dict[str, Any],
    overrides: list[str],
    *,
    choices: dict[str, str],
    name: str = "unlearn.yaml",
    ours: bool = True,
) -> None:
    """Hydra's record of a job."""
    hydra = folder / ".hydra"
    hydra.mkdir(parents=True, exist_ok=True)
    target = "rosu_llm.openunlearning.callback.RegisterTrainers" if ours else "somebody.Else"
    record = {
        "runtime": {"choices": choices},
        "job": {"config_name": name},
        "callbacks": {"registers": {"_target_": target}},
    }
    (hydra / "hydra.yaml").write_text(yaml.safe_dump({"hydra": record}))
    (hydra / "config.yaml").write_text(yaml.safe_dump(config))
    (hydra / "overrides.yaml").write_text(yaml.safe_dump(overrides))


def make_run(
    saves: Path,
    rho: float,
    figures: dict[str, Any],
    *,
    trainer: str = "ROSU",
    split: str = "forget10",
    model: str = "Llama-3.2-1B-Instruct",
    ours: bool = True,
) -> Path:
    """A trained and evaluated run with Hydra's records of both."""
    run = saves / "unlearn" / f"tofu_{model}_{split}_{trainer}_rho{rho}"
    config = {
        "forget_split": split,
        "trainer": {
            "handler": trainer,
            "args": {"learning_rate": 1e-5, "num_train_epochs": 10, "optim": "paged_adamw_32bit"},
            "method_args": {"rho": rho, "beta": "tied"},
        },
    }
    words = ["experiment=unlearn/tofu/default", f"trainer={trainer}", f"task_name={run.name}"]
    words += [f"trainer.method_args.rho={rho}"]
    write_hydra(run, config, words, choices={"model": model, "trainer": trainer}, ours=ours)
    words = ["experiment=eval/tofu/default", f"task_name={run.name}", "+eval/tofu_metrics=[rosu_summary]"]
    config = {"forget_split": split, "eval": {"tofu": {"forget_split": "${forget_split}"}}}
    write_hydra(run / "evals", config, words, choices={"model": model}, name="eval.yaml", ours=ours)
    write_eval(run / "evals", figures)
    return run
