"""Every optimizer step follows an update, however the micro-batches of an epoch divide, in every supported version.

Runs with the installed transformers; the same file passes on 4.45, 4.51 and 5.x.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from rosu_llm import ForgetRetainCollator, ROSUConfig, ROSUTrainer
from rosu_llm.compat import transformers_is
from rosu_llm.errors import EmptyUpdateError
from tests.models import flat, samples, tiny_llama


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    def __init__(self, count: int) -> None:
        self._forget, self._retain = samples(count, seed=1), samples(count, seed=2)

    def __len__(self) -> int:
        return len(self._forget)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"forget": self._forget[index], "retain": self._retain[index]}


class Moves(TrainerCallback):
    """How far the weights moved in each step."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.before = model, flat(model.parameters())
        self.moved: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        now = flat(self.model.parameters())
        self.moved.append(float((now - self.before).norm()))
        self.before = now


def trainer(folder: Path, rows: int, accumulation: int, epochs: int) -> tuple[ROSUTrainer, Moves]:
    model = tiny_llama()
    config = ROSUConfig(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=epochs,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    moves = Moves(model)
    made = ROSUTrainer(
        model, config, train_dataset=Rows(rows), data_collator=ForgetRetainCollator(0), callbacks=[moves]
    )
    return made, moves


@pytest.mark.parametrize(
    ("rows", "accumulation", "epochs"),
    [
        (4, 4, 1),  # an epoch shorter than a window
        (6, 4, 3),
        (8, 4, 2),  # an epoch is one window
        (10, 2, 2),  # a part of a window is left over
        (5, 8, 2),
        (6, 1, 1),
    ],
)
def test_every_step_moves_the_weights(tmp_path: Path, rows: int, accumulation: int, epochs: int) -> None:
    made, moves = trainer(tmp_path, rows, accumulation, epochs)
    made.train()
    assert len(moves.moved) == made.state.global_step >= 1
    assert all(moved > 1e-6 for moved in moves.moved), moves.moved


def test_an_empty_update_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Trainer steps unannounced in a way that is not known yet."""
    made, _ = trainer(tmp_path, 4, 4, 1)
    monkeypatch.setattr(made, "_steps_next", lambda: False)
    with pytest.raises(EmptyUpdateError, match=r"Step 1 changed nothing.*gradient_accumulation_steps=4"):
        made.train()


@pytest.mark.skipif(transformers_is("4.46"), reason="newer versions of Trainer announce every step")
def test_the_update_of_a_short_epoch_is_that_of_its_whole_window(tmp_path: Path) -> None:
    """Accumulation 4 over an epoch of two micro-batches is accumulation 2."""
    short, _ = trainer(tmp_path / "short", 4, 4, 1)
    whole, _ = trainer(tmp_path / "whole", 4, 2, 1)
    short.train()
    whole.train()
    assert torch.equal(flat(short.model.parameters()), flat(whole.model.parameters()))


def test_batches_that_no_step_was_made_of_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in transformers 4.51 with two micro-batches and an accumulation of three; other versions make the step."""
    from transformers import Trainer

    made, _ = trainer(tmp_path, 4, 4, 1)
    monkeypatch.setattr(Trainer, "train", lambda self, *_, **__: self._window.extend([{}, {}]))
    with pytest.raises(EmptyUpdateError, match=r"2 micro-batches that no step .* gradient_accumulation_steps=4"):
        made.train()
