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
from ..training.checkpoints import resolve_resume
from ..training.trainer import ROSUMixin
from .folder import RunFolder, locked
from .next_token import write_format
from .prepare import Loaded, assemble, check_output, check_start, load
from .record import settings_to_keep, write_record
from .settings import Recipe, RunArguments

logger = logging.getLogger(__name__)
T = TypeVar("T")


def run(recipe: Recipe) -> ROSUMixin:
    """Unlearn as described; returns the trainer after training and saving."""
    check_start(*recipe)
    return train(recipe, load(recipe))


def train(recipe: Recipe, loaded: Loaded) -> ROSUMixin:
    """The second half of :func:`run`, for a model and data that are loaded already."""
    config = recipe.config
    if not config.should_save:
        return _train(recipe, loaded, None)
    out = Path(config.output_dir)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"output_dir={config.output_dir!r} cannot be made ({error.strerror}): give another --output-dir."
        ) from error
    with locked(out):
        check_output(*recipe)  # again: it may have been filled while the model was loaded
        return _train(recipe, loaded, RunFolder(out))


def _train(recipe: Recipe, loaded: Loaded, folder: RunFolder | None) -> ROSUMixin:
    """Train and save; ``folder`` on the process that writes.

    The output folder's old contents are touched only after the first step, before anything is saved: by then every
    check of the run has passed.
    """
    arguments, config = recipe
    trainer = assemble(recipe, loaded).trainer
    resumes = resolve_resume(config.resume_from_checkpoint, config.output_dir) is not None
    trainer.check_destination(overwrite=arguments.overwrite or resumes)
    trainer.run_settings = settings_to_keep(arguments, config)

    @cache
    def replace_old_run() -> None:
        """Once, on the process that writes."""
        if folder is not None:
            folder.claim(replace=arguments.overwrite and not resumes)
            write_format(arguments, trainer)  # now, for whoever evaluates a checkpoint

    class AfterTheFirstStep(TrainerCallback):
        """The first step builds and checks the method's parts."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            replace_old_run()

    trainer.add_callback(AfterTheFirstStep())
    trainer.stops_on_signals = True
    start = perf_counter()
    trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    seconds = perf_counter() - start
    replace_old_run()  # a resumed run may have had no step left
    save(trainer, arguments, seconds)
    if folder is not None:
        folder.finish()
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


def build_memory(recipe: Recipe, path: Path) -> None:
    """Store gradients of the recipe's retain data under the model as it is, and write them to ``path``."""
    if recipe.representation_level:
        raise ConfigError("Stored gradients are of next-token losses, and this recipe is at representation level.")
    trainer = assemble(recipe, load(recipe, ("retain",))).trainer
    instead_of_training(trainer, lambda: trainer.write_memory(path))


class _Done(Exception):
    """Leaves the training loop before its first step, with a result."""
