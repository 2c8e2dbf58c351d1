"""Run a recipe: prepare, train, save, record; or measure at the point where training starts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

from transformers import TrainerCallback

from ..errors import ConfigError
from ..training.checkpoints import remove_all
from ..training.trainer import ROSUMixin
from .next_token import write_format
from .prepare import Loaded, assemble, check_start, load
from .record import settings_to_keep, write_record
from .settings import Recipe, RunArguments

logger = logging.getLogger(__name__)
T = TypeVar("T")


def run(recipe: Recipe) -> ROSUMixin:
    """Unlearn as described; returns the trainer after training and saving."""
    check_start(*recipe)
    return train(recipe, load(recipe))


def train(recipe: Recipe, loaded: Loaded) -> ROSUMixin:
    """The second half of :func:`run`, for a model and data that are loaded already.

    The output folder's old contents are touched only after the first step, before anything is saved: by then every
    check of the run has passed.
    """
    arguments, config = recipe
    if config.should_save:
        try:
            Path(config.output_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"output_dir={config.output_dir!r} cannot be made ({error.strerror}): give another --output-dir."
            ) from error
    trainer = assemble(recipe, loaded).trainer
    trainer.check_destination(overwrite=arguments.overwrite)
    trainer.run_settings = settings_to_keep(arguments, config)

    @cache
    def replace_old_run() -> None:
        """Once, on the process that writes."""
        if not config.should_save:
            return
        if arguments.overwrite and not config.resume_from_checkpoint:
            remove_all(Path(config.output_dir))
        write_format(arguments, trainer)  # now, for whoever evaluates a checkpoint

    class AfterTheFirstStep(TrainerCallback):
        """The first step builds and checks the method's parts."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            replace_old_run()

    trainer.add_callback(AfterTheFirstStep())
    start = perf_counter()
    trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    seconds = perf_counter() - start
    replace_old_run()  # a resumed run may have had no step left
    save(trainer, arguments, seconds)
    logger.info("The model is in %s", config.output_dir)
    return trainer


def save(trainer: ROSUMixin, arguments: RunArguments, seconds: float) -> None:
    """Write all that a finished run leaves in its folder: the model, its card, its chat format and the record."""
    trainer.save_model()
    trainer.create_model_card()
    if trainer.is_world_process_zero():
        write_format(arguments, trainer)
        write_record(trainer, arguments, seconds)


def instead_of_training(trainer: ROSUMixin, action: Callable[[], T]) -> T:
    """Let the trainer wrap and distribute the model, then run ``action`` in place of the first step.

    It sees the model, losses, precision and layout that training has.
    """

    class Instead(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise _Done(action())

    trainer.add_callback(Instead())
    try:
        trainer.train()
    except _Done as done:
        result: T = done.args[0]
        return result
    raise AssertionError("the training loop did not begin")


class _Done(Exception):
    """Leaves the training loop before its first step, with a result."""
