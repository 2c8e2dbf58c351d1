"""``rosu demo``: a small Llama learns about fictitious people, then forgets ten of them.

Nothing is downloaded. For each seed one model is trained on everybody and one, the gold standard, only on
those to be kept; then every contender unlearns from a copy of the first.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ...data.pairing import ForgetRetainDataset
from .contenders import COMMON, CONTENDERS
from .measure import answer, measure
from .world import World, build_world, learn, small_llama

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Size:
    """How large the demo is; ``SMOKE`` only proves that every part runs."""

    people: dict[str, int] = field(
        default_factory=lambda: {"forget": 10, "retain": 40, "calibration": 10, "holdout": 10}
    )
    hidden: int = 128
    layers: int = 4
    learning_epochs: int = 36
    overrides: dict[str, Any] = field(default_factory=dict)


FULL = Size()
SMOKE = Size(
    people={"forget": 2, "retain": 3, "calibration": 1, "holdout": 1},
    hidden=32,
    layers=1,
    learning_epochs=2,
    overrides={"num_train_epochs": 1},
)


@dataclass
class SeedResult:
    """Rows, step logs and sample answers of one seed."""

    seed: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    logs: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    answers: list[dict[str, str]] = field(default_factory=list)


def run_seed(
    seed: int, *, size: Size = FULL, methods: Iterable[str] = tuple(CONTENDERS), progress: Progress
) -> SeedResult:
    """Everything for one seed."""
    result = SeedResult(seed)
    world = build_world(seed, people=size.people)
    everybody = [*world.data["forget"].samples, *world.data["retain"].samples]
    before = _teach(result, "before", world, everybody, size, progress)
    _teach(result, "retain_only", world, world.data["retain"].samples, size, progress)
    questions = _sample_items(world)
    result.answers = [
        {
            "split": split,
            "question": item.question,
            "truth": item.answer,
            "before": answer(before, world, item.question),
        }
        for split, item in questions
    ]
    for name in methods:
        started = time.perf_counter()
        model = copy.deepcopy(before)
        result.logs[name] = unlearn(
            model, world, seed, {**COMMON, **CONTENDERS[name], **size.overrides}, name, progress
        )
        seconds = time.perf_counter() - started
        result.rows.append({"method": name, **measure(model, world), "seconds": seconds})
        for entry, (_, item) in zip(result.answers, questions, strict=True):
            entry[name] = answer(model, world, item.question)
    return result


def _teach(result: SeedResult, name: str, world: World, samples: list[Any], size: Size, progress: Progress) -> Any:
    started = time.perf_counter()
    model = small_llama(len(world.tokenizer), result.seed, hidden=size.hidden, layers=size.layers)
    learn(
        model,
        samples,
        epochs=size.learning_epochs,
        seed=result.seed,
        progress=lambda done, total, loss: progress(name, done, total),
    )
    seconds = time.perf_counter() - started
    result.rows.append({"method": name, **measure(model, world), "seconds": seconds})
    return model


def unlearn(
    model: Any, world: World, seed: int, settings: dict[str, Any], name: str, progress: Progress
) -> list[dict[str, float]]:
    """Unlearn the forget people in place; returns the log of every step."""
    from transformers import PrinterCallback, TrainerCallback

    from ...training.config import ROSUConfig
    from ...training.trainer import ROSUTrainer

    class Report(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            progress(name, state.global_step, state.max_steps)

    with tempfile.TemporaryDirectory() as folder:
        config = ROSUConfig(
            output_dir=folder,
            use_cpu=True,
            seed=seed,
            report_to=[],
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
            **settings,
        )
        trainer = ROSUTrainer(
            model,
            config,
            train_dataset=ForgetRetainDataset(world.data["forget"], world.data["retain"], seed=seed),
            holdout_dataset=world.data["calibration"],
            callbacks=[Report()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def _sample_items(world: World, per_split: int = 3) -> list[tuple[str, Any]]:
    picked = []
    for split in ("forget", "retain"):
        items = world.corpus.items[split]
        stride = max(1, len(items) // per_split)
        picked += [(split, item) for item in items[::stride][:per_split]]
    return picked


def average(results: list[SeedResult]) -> list[dict[str, Any]]:
    """Rows averaged over seeds; with one seed they are that seed's rows."""
    rows = []
    for group in zip(*(r.rows for r in results), strict=True):
        numbers = [key for key in group[0] if key != "method"]
        rows.append(
            {
                "method": group[0]["method"],
                **{
                    key: float(torch.tensor([row[key] for row in group], dtype=torch.float64).mean()) for key in numbers
                },
            }
        )
    return rows
