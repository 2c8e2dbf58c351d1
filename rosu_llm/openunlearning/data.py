"""OpenUnlearning's data as the training step wants it, and clear errors where it cannot be used."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch

from ..errors import DataError, RosuError

PARTS = ("forget", "retain")


class AlternatesBeside:
    """A collator around OpenUnlearning's.

    Its IDK data nests once more: ``{"original": A, "alternate": B}``. Losses read the original where they expect a
    batch and find the other under ``alternate``; anything else passes unchanged.
    """

    def __init__(self, collator: Any) -> None:
        self.collator = collator

    def __call__(self, items: Any) -> Any:
        batch = self.collator(items)
        if isinstance(batch, Mapping):
            return {key: _beside(value) for key, value in batch.items()}
        return batch


def _beside(part: Any) -> Any:
    if isinstance(part, Mapping) and "original" in part and "alternate" in part:
        return {**part["original"], "alternate": part["alternate"]}
    return part


def check_parts(dataset: Any) -> None:
    """Raise before training if an item has no forget or no retain part."""
    if dataset is None or not hasattr(dataset, "__getitem__") or len(dataset) == 0:
        raise DataError("There is no training data: set data/datasets@data.forget and data/datasets@data.retain.")
    with torch.random.fork_rng(devices=[]):  # OpenUnlearning draws partners at random: looking must not change the run
        item = dataset[0]
    keys = sorted(map(str, item)) if isinstance(item, Mapping) else [type(item).__name__]
    for part in PARTS:
        if part not in keys:
            hint = "" if any(p in keys for p in PARTS) else " and --config-name=unlearn.yaml (mode: unlearn)"
            raise DataError(
                f"The data has no {part} part (its samples hold {', '.join(keys)}): unlearning needs forget and retain "
                f"samples. Set data/datasets@data.{part}=…{hint}."
            )


def load_holdout(config: Any, tokenizer: Any, template_args: Any) -> Any:
    """The never-trained samples of ``method_args.holdout_data``, loaded by OpenUnlearning itself.

    ``config`` has the form of its ``configs/data/datasets/*.yaml``: one named data set with ``handler`` and ``args``.
    """
    from omegaconf import OmegaConf

    if not isinstance(config, Mapping) and not OmegaConf.is_dict(config):
        raise DataError(
            f"method_args.holdout_data={config!r} must be a data set as in configs/data/datasets, e.g. "
            "+data/datasets@trainer.method_args.holdout_data=TOFU_QA_holdout."
        )
    tree = config if OmegaConf.is_config(config) else OmegaConf.create(dict(config))
    if len(tree) != 1:
        raise DataError(
            f"method_args.holdout_data must hold one data set, not {len(tree)}: {', '.join(map(str, tree))}."
        )
    try:
        return import_module("data").get_datasets(tree, tokenizer=tokenizer, template_args=template_args)
    except RosuError:
        raise
    except Exception as error:
        raise DataError(f"method_args.holdout_data could not be loaded: {' '.join(str(error).split())}") from error
