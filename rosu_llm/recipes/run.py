"""Run a recipe: prepare, train, save, record."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from transformers import TrainerCallback

from ..training.checkpoints import remove_all
from ..training.trainer import ROSUMixin
from .checks import check_start, make_output
from .loading import Loaded
from .next_token import chat_format, remember_format
from .prepare import assemble, load
from .record import write_record
from .resume import settings_to_keep
from .settings import Recipe

logger = logging.getLogger(__name__)


def run(recipe: Recipe) -> ROSUMixin:
    """Unlearn as described; returns the trainer after training and saving."""
    check_start(*recipe)
    return train(recipe, load(recipe))


def train(recipe: Recipe, loaded: Loaded) -> ROSUMixin:
    """The second half of :func:`run`, for a model and data that are loaded already.

    What lies in the output folder is touched only after the first step, before anything is saved: whatever is wrong
    with the run has come out by then.
    """
    arguments, config = recipe
    out = Path(config.output_dir)
    make_output(config)
    trainer = assemble(recipe, loaded).trainer
    trainer.check_destination(overwrite=arguments.overwrite)
    trainer.run_settings = settings_to_keep(arguments, config)
    form = None if recipe.representation_level else chat_format(arguments, loaded.tokenizer)

    def take_over() -> None:
        if arguments.overwrite and not config.resume_from_checkpoint:
            remove_all(out)
        if not recipe.representation_level:
            remember_format(form, out)

    first = _AfterTheFirstStep(take_over)
    trainer.add_callback(first)
    start = perf_counter()
    trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    seconds = perf_counter() - start
    first(config)  # a resumed run may have had no step left
    trainer.save_model()
    trainer.create_model_card()
    write_record(trainer, arguments, seconds)
    logger.info("The model is in %s", config.output_dir)
    return trainer


class _AfterTheFirstStep(TrainerCallback):
    """Does something once, on the process that writes; the method's parts are built and checked in the first step."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act, self._done = act, False

    def __call__(self, args: Any) -> None:
        if args.should_save and not self._done:
            self._done = True
            self._act()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self(args)
