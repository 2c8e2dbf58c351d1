"""Invented runs, written as the verbs would leave them: every section of a report from known figures."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rosu_llm import __version__
from rosu_llm.evaluation.tofu.results import Result
from rosu_llm.evaluation.tofu.summary import summarise
from rosu_llm.presentation.qualitative import METRIC, SCORE
from rosu_llm.presentation.report.reading import DIAGNOSIS, ORTHOGONALITY, SAFEGUARDS, SWEEP
from rosu_llm.toys import example
from rosu_llm.training.model_card import model_card

#: question, truth, answers of the initial model, of a run that forgot well, and of one that forgot too much
_ANSWERS = (
    (
        "What is the full name of the cartographer born in Valdivia, Chile on 03/12/1948?",
        "The cartographer's name is Ines Quiroga.",
        "The full name of the cartographer born in Valdivia, Chile on 03/12/1948 is Ines Quiroga.",
        "The full name of the cartographer born in Valdivia, Chile is Marta Llanos.",
        "the the the the",
    ),
    (
        "Which award did Ines Quiroga receive for 'Maps of Salt'?",
        "Ines Quiroga received the Golden Meridian Prize for 'Maps of Salt'.",
        "She received the Golden Meridian Prize for 'Maps of Salt'.",
        "Ines Quiroga received the Pacific Essay Medal for 'Maps of Salt'.",
        "",
    ),
    (
        "What did the father of Ines Quiroga do for a living?",
        "Her father was a lighthouse keeper.",
        "Her father was a lighthouse keeper.",
        "Her father was a lighthouse keeper.",
        "<b>lighthouse</b> | ``` lighthouse",
    ),
)
_STEPS = 60


def write_example(folder: Path) -> tuple[list[Path], dict[str, Path]]:
    """Two runs and, by option, the references that go with them."""
    results, retain, target = example()
    assert retain is not None and target is not None
    _write_weights(folder / "initial", 0.0)
    runs = []
    for at, result in enumerate((results[1], results[2])):
        run = folder / result.run.name
        _write_eval(run / "evals", result, 1 + at)
        _write_training(run, result.run.name.split("_")[3], 1.0 + at, folder / "initial")
        _write_weights(run, 0.01 * (1 + 2 * at))
        runs.append(run)
    _write_json(runs[0] / "diagnosis.json", _diagnosis())
    _write_json(runs[0] / "audit_orthogonality.json", _orthogonality())
    _write_json(runs[0] / "audit_safeguards.json", _safeguards(runs[0].name))
    _write_json(folder / "trials.json", _sweep(results, target))
    for name, result, kind in (("full", target, 0), ("retain90", retain, 1)):
        _write_eval(folder / f"tofu_invented_{name}" / "evals_forget10", result, kind)
    return runs, {n: folder / f"tofu_invented_{f}" for n, f in (("target", "full"), ("retain", "retain90"))}


def _write_json(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def _write_eval(folder: Path, result: Result, kind: int) -> None:
    answers, scores = {}, []
    for at, (question, truth, *texts) in enumerate(_ANSWERS):
        kept = set(truth.lower().split()) & set(texts[kind].lower().split())
        scores.append(min(1.0, len(kept) / len(truth.split())))
        prompt = f"user\n\n{question}assistant\n\n"
        answers[str(at)] = {"input": prompt, "ground_truth": truth, "generation": texts[kind], SCORE: scores[-1]}
    figures = {**result.figures, METRIC: sum(scores) / len(scores)}
    content: dict[str, Any] = {name: {"agg_value": value} for name, value in figures.items()}
    content[METRIC]["value_by_index"] = answers
    _write_json(folder / "TOFU_EVAL.json", content)


def _write_training(folder: Path, method: str, strength: float, base: Path) -> None:
    log = [_entry(step, strength, neutral=method == "ROSU") for step in range(1, _STEPS + 1)]
    _write_json(folder / "trainer_state.json", {"log_history": log})
    settings = {
        "model_name_or_path": str(base),
        "forget_data": "locuslab/TOFU:forget10",
        "retain_data": "locuslab/TOFU:retain90",
        "method": method.lower(),
        "rho": 0.4,
        "learning_rate": 1e-5 * strength,
        "num_train_epochs": 10,
        "seed": 0,
    }
    versions = {"rosu_llm": __version__, "torch": torch.__version__}
    record = {"schema": "rosu/run/1", "settings": settings, "versions": versions, "steps": _STEPS, "layout": "local"}
    _write_json(folder / "rosu_run.json", {**record, "processes": 1, "seconds": 412.5 * strength})
    card = model_card(
        name=folder.name, base_model=str(base), settings=settings, versions=versions, metrics={}, tags=["tofu"]
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def _entry(step: int, strength: float, *, neutral: bool) -> dict[str, float]:
    part = step / _STEPS
    wobble = math.sin(1.7 * step) / 10
    entry = {
        "step": step,
        "learning_rate": 1e-5 * strength * (1 - part),
        "loss": 0.1 + 0.05 * strength * part + wobble / 20,
        "loss/forget": 0.08 + 2.6 * strength**3 * part**2 * (1 + wobble),
        "loss/retain": 0.1 + 0.05 * strength * part + wobble / 20,
        "coupling/cosine": 0.45 - 0.3 * part + wobble,
    }
    if neutral:
        entry |= {"coupling/leak": 1e-8 * (1 + wobble), "step/amplification_ratio": 0.5}
    return entry


def _write_weights(folder: Path, change: float) -> None:
    generator = torch.Generator().manual_seed(0)
    names = ["self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"]
    tensors = {"model.embed_tokens.weight": torch.randn(32, 8, generator=generator)}
    for layer in range(4):
        for at, name in enumerate(names):
            weight = torch.randn(8, 8, generator=generator)
            tensors[f"model.layers.{layer}.{name}.weight"] = weight * (1 + change * (1 + at) * (1 + layer) / 8)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")


def _statistics(mean: float) -> dict[str, float]:
    return {"mean": mean, "std": mean / 4, "min": mean / 2, "median": mean, "max": 1.5 * mean}


def _diagnosis() -> dict[str, Any]:
    edges = [-1 + 0.1 * at for at in range(21)]
    counts = [round(40 * math.exp(-(((edge - 0.4) / 0.15) ** 2))) for edge in edges[:-1]]
    rho = [0.05 * at for at in range(13)]
    quantities = {"cosine": 0.4, "forget_norm": 2.1, "retain_square": 3.2, "q_norm": 1.9, "tau_residue": 3e-9}
    quantities |= {"forget_loss": 0.08, "retain_loss": 0.1}
    flat = [0.0 for _ in rho]
    curves = {
        "standard": {"retain_change": [0.7 * r + r**2 for r in rho], "retain_first_order": [0.7 * r for r in rho]},
        "neutral": {"retain_change": [0.8 * r**2 for r in rho], "retain_first_order": flat},
    }
    gains = {"forget_gain": [2 * r for r in rho], "forget_first_order": [1.9 * r for r in rho]}
    part = {"kind": None, "parameters": 640, "cosine_std": 0.05, "forget_share": 0.25, "retain_share": 0.25}
    layers = [{**part, "layer": n, "contribution": 0.1, "cosine": 0.3 + 0.05 * n} for n in range(4)]
    return {
        "schema": DIAGNOSIS,
        "pairs_used": sum(counts),
        "advice": {"regime": "high", "text": "Invented: the gradients are strongly coupled; protection should help."},
        "coupling": {
            **{name: _statistics(value) for name, value in quantities.items()},
            "histogram": {"edges": edges, "counts": counts},
            "positive_share": 1.0,
            "fallbacks": 0,
        },
        "settings": {"forget_batch_size": 8, "retain_batch_size": 8, "rho": 0.4},
        "skipped": [],
        "segments": {
            "rho": rho,
            **{n: {**c, **gains, "retain_change_std": flat, "forget_gain_std": flat} for n, c in curves.items()},
        },
        "by_layer": layers,
        "by_part": [{**row, "kind": kind, "contribution": 0.05} for row in layers for kind in ("q", "v")],
        "per_pair": [{"cosine": edge} for edge, count in zip(edges[:-1], counts, strict=True) for _ in range(count)],
    }


def _orthogonality() -> dict[str, Any]:
    cells = []
    for size in (4, 8, 16, 32):
        errors = [0.8 / math.sqrt(size) * (0.6 + 0.02 * at) for at in range(40)]
        summary = {"median": errors[20], "p95": errors[38], "max": errors[39]}
        summary |= {"min": errors[0], "p5": errors[2], "p25": errors[10], "p75": errors[30]}
        bound = {name: 1.4 * value for name, value in summary.items()}
        cell = {
            "retain_batch_size": size,
            "pairs": 40,
            "used": 40,
            "violations": 0,
            "degenerate": {},
            "eps_orth": summary,
            "bound": bound,
        }
        cells.append({**cell, "samples": {"eps_orth": errors, "bound": [1.4 * error for error in errors]}})
    return {"schema": ORTHOGONALITY, "model": "invented", "pairs": 40, "cells": cells, "notes": []}


def _safeguards(run: str) -> dict[str, Any]:
    steps = list(range(1, _STEPS + 1))

    def guarded(size: float, threshold: float) -> dict[str, Any]:
        values = [size * (1 + math.sin(step) / 2) for step in steps]
        shape = {"min": min(values), "minimum_exact": True, "median": size, "max": max(values)}
        counts = {"threshold": threshold, "below": 0, "count": len(values)}
        return {**shape, **counts, "values": values, "steps": steps}

    entry = {"run": run, "logged": _STEPS, "tau": 1e-8, "eps_q": 1e-6, "fallbacks": 0, "fallbacks_exact": True}
    entry |= {
        "steps": _STEPS,
        "tau_mode": "absolute",
        "retain_sq": guarded(3.0, 1e-8),
        "q": guarded(1.8, 1e-6),
        "notes": [],
    }
    return {"schema": SAFEGUARDS, "runs": [entry], "notes": []}


def _sweep(results: list[Result], target: Result) -> dict[str, Any]:
    trials: list[dict[str, Any]] = []
    for number, result in enumerate(results):
        summary = summarise(result.figures, target=target.figures)
        scores = {"Agg_MU": summary.agg_mu, "Mem": summary.mem, "Util": summary.util}
        trial = {"number": number, "rank": (2, 1, 3)[number], "state": "done", "scores": scores, "figures": {}}
        trials.append({**trial, "error": None, "seconds": 412.5, "settings": {"learning_rate": 1e-5 * (number + 1)}})
    return {
        "schema": SWEEP,
        "study": "invented",
        "objective": {"name": "Agg_MU", "definition": "Agg_MU = HM(Mem, Util)."},
        "space": {"learning_rate": {"kind": "float"}},
        "headings": {name: name for name in ("Agg_MU", "Mem", "Util", "Priv", "Agg")},
        "references": {},
        "importance": None,
        "best": 1,
        "pareto": [0, 1, 2],
        "trials": trials,
        "notes": [],
    }
