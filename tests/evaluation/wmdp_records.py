"""Neutral questions, and evaluations made of given answers, for the tests of the WMDP evaluation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from rosu_llm.evaluation.wmdp.document import WmdpEvaluation, WmdpLeaf, WmdpScore
from rosu_llm.evaluation.wmdp.evaluate import WmdpSettings

VERSIONS = {"lm-eval": "0.4.13", "transformers": "5", "torch": "2"}


def write_questions(folder: Path, counts: dict[str, int]) -> Path:
    """``{"wmdp_bio": 3, "mmlu/anatomy": 2}``: that many neutral questions under those names."""
    for name, count in counts.items():
        path = folder / (f"{name}.test.jsonl" if "/" in name else f"{name}.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [
            {
                "question": f"  What is {n} plus {len(name)}? ",
                "choices": [str(n + k) for k in range(4)],
                "answer": n % 4,
            }
            for n in range(count)
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def real_questions(shared: Path, folder: Path) -> Path:
    """Short MMLU questions; two of its subjects stand in for WMDP."""
    (folder / "mmlu").mkdir(parents=True)
    for source, target, count in (
        ("college_biology", "wmdp_bio.jsonl", 11),
        ("computer_security", "wmdp_cyber.jsonl", 9),
        ("anatomy", "mmlu/anatomy.test.jsonl", 10),
        ("astronomy", "mmlu/astronomy.test.jsonl", 4),
    ):
        lines = (shared / "mmlu" / f"{source}.test.jsonl").read_text().splitlines(keepends=True)
        short = [line for line in lines if len(line) < 420][:count]
        assert len(short) == count
        (folder / target).write_text("".join(short))
    return folder


def copy_model(source: Path, target: Path, noise: float = 0.0) -> Path:
    """A copy whose down projections carry noise: same names, shapes and file size."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    weights = load_file(target / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name, weight in weights.items():
        if "down_proj" in name:
            weights[name] = weight + noise * weight.std() * torch.randn(weight.shape, generator=generator)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def evaluation(answers: dict[str, str], settings: WmdpSettings, salt: str = "") -> WmdpEvaluation:
    """What lm-eval would have given for these answers (leaf task → ``1`` or ``0`` per question)."""
    leaves: dict[str, WmdpLeaf] = {
        name: {
            "of": name if name.startswith("wmdp") else "mmlu",
            "version": 1,
            "hash": f"sha256:{name}{salt}",
            "dataset": "json",
            "questions": len(text),
            "available": len(text),
            "answers": text,
        }
        for name, text in answers.items()
    }
    scores: dict[str, WmdpScore] = {}
    for task in settings.tasks:
        text = "".join(leaf["answers"] for leaf in leaves.values() if leaf["of"] == task)
        scores[task] = {"accuracy": text.count("1") / len(text), "stderr": 0.1, "questions": len(text)}
    used = {
        "tasks": list(settings.tasks),
        "limit": settings.limit,
        "dtype": settings.dtype,
        "trust_remote_code": settings.trust_remote_code,
        "dtype_used": "float32",
        "processes": 1,
    }
    date = "2026-01-01T00:00:00+00:00"
    return {"scores": scores, "leaves": leaves, "settings": used, "versions": dict(VERSIONS), "date": date}
