"""From a recipe to a trainer that is ready to begin; the only place that knows of two kinds of runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..training.trainer import ROSUMixin
from . import next_token, representation_level
from .checks import check_config, check_model, check_output
from .loading import Loaded
from .settings import Recipe


@dataclass(frozen=True)
class Prepared:
    """A run before its first step."""

    recipe: Recipe
    trainer: ROSUMixin
    loaded: Loaded

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, able to pad."""
        return self.loaded.tokenizer


def prepare(recipe: Recipe) -> Prepared:
    """Check, load, and build the trainer."""
    return assemble(recipe, load(recipe))


def load(recipe: Recipe) -> Loaded:
    """The first half of :func:`prepare`: whatever can be refused is refused before anything is loaded."""
    arguments, config = recipe
    arguments.check_run(next_token.parts_needed(config))
    check_output(arguments, config)
    check_config(config)
    check_model(arguments)
    loaded: Loaded = _level(recipe).load(recipe)
    return loaded


def assemble(recipe: Recipe, loaded: Loaded) -> Prepared:
    """The second half, for a model and data that are loaded already."""
    torch.manual_seed(recipe.config.seed)  # a new adapter is drawn when the trainer is built
    return Prepared(recipe, _level(recipe).build_trainer(recipe, loaded), loaded)


def _level(recipe: Recipe) -> Any:
    return representation_level if recipe.representation_level else next_token
