"""Checkpoints, model files and the model card, written so that a killed run never leaves half of one."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..files import write_atomically
from ..step import Calibration
from .checkpoints import REFERENCE_FILE, STATE_FILE, last_complete, marked, numpy_state_allowed, rotate, staged
from .config import MethodArguments
from .model_card import model_card
from .references import References

if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object


class Saving(Base):  # type: ignore[misc]
    """Trainer's saving with a marker on unfinished checkpoints, the method's state, and staged model files."""

    method_args: MethodArguments
    _references: References
    _calibration: Calibration | None
    #: What a checkpoint says about its run, so that resuming can tell whether it is the same one.
    run_settings: Mapping[str, Any] | None = None
    _limit: int | None = None

    def _save_checkpoint(self, model: nn.Module, trial: Any, *args: Any, **kwargs: Any) -> None:
        """Trainer's, but old checkpoints are deleted after the new one is whole: killed in between, one is left."""
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        self._limit = self.args.save_total_limit
        with _limited(self.args, None), marked(folder, writer=self.args.should_save):
            if self.args.should_save:
                self._save_method(folder)
            super()._save_checkpoint(model, trial, *args, **kwargs)
            # Every rank writes its shards and random state: the checkpoint is whole when the last one has.
            self.accelerator.wait_for_everyone()
        if self.args.should_save:
            rotate(folder, self._limit, self.state.best_model_checkpoint)

    def _save_method(self, folder: Path) -> None:
        if self._references.logprobs.values:
            self._references.logprobs.save(folder / REFERENCE_FILE)
        state: dict[str, Any] = {}
        if self._calibration is not None:
            state["calibrate_target"] = self._calibration.target
        if self.run_settings is not None:
            state["settings"] = self.run_settings
        if state:
            write_atomically(folder / STATE_FILE, json.dumps(state))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As Trainer's, which writes no model at all when FSDP checkpoints are sharded: gather one here."""
        if not _internal_call and self._writes_sharded_checkpoints():
            state = self.accelerator.get_state_dict(self.model)  # collective; whole only on the main process
            if self.args.should_save:
                self._save(output_dir or self.args.output_dir, state_dict=state)
        super().save_model(output_dir, _internal_call)

    def _writes_sharded_checkpoints(self) -> bool:
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        return plugin is not None and "FULL_STATE_DICT" not in str(plugin.state_dict_type)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if not self.args.should_save:
            super()._save(output_dir, state_dict)
            return
        limit = self.args.save_total_limit or self._limit  # the arguments are written too, as the user gave them
        with staged(Path(output_dir or self.args.output_dir)) as stage, _limited(self.args, limit):
            super()._save(str(stage), state_dict)

    def save_state(self) -> None:
        """``trainer_state.json`` with all logs, beside the model."""
        if self.is_world_process_zero():
            path = Path(self.args.output_dir) / "trainer_state.json"
            write_atomically(path, json.dumps(dataclasses.asdict(self.state), indent=2, sort_keys=True) + "\n")

    def _load_rng_state(self, checkpoint: str | None) -> None:
        # transformers before 4.47 loads numpy's random state without allowing its types, which torch ≥ 2.6 refuses.
        with numpy_state_allowed():
            super()._load_rng_state(checkpoint)

    def last_checkpoint(self) -> str | None:
        """The newest complete checkpoint of this run, if any."""
        found = last_complete(Path(self.args.output_dir))
        return None if found is None else str(found)

    def create_model_card(self, model_name: str | None = None, tags: Any = None, **_: Any) -> None:
        """Write README.md: method, settings, versions, last logged values."""
        if not self.is_world_process_zero():
            return
        import transformers

        logged: Mapping[str, Any] = next((entry for entry in reversed(self.state.log_history) if "loss" in entry), {})
        config = getattr(self.model, "config", None)
        text = model_card(
            name=model_name or Path(self.args.output_dir).name,
            base_model=getattr(config, "_name_or_path", None) or None,
            settings={**self.method_args.method_dict(), **_training_summary(self.args)},
            versions={"torch": torch.__version__, "transformers": transformers.__version__},
            metrics={k: v for k, v in logged.items() if isinstance(v, (int, float))},
            tags=[tags] if isinstance(tags, str) else list(tags or []),
        )
        write_atomically(Path(self.args.output_dir) / "README.md", text)


@contextlib.contextmanager
def _limited(args: Any, limit: int | None) -> Iterator[None]:
    """Another ``save_total_limit`` for a while."""
    before, args.save_total_limit = args.save_total_limit, limit
    try:
        yield
    finally:
        args.save_total_limit = before


def _training_summary(args: Any) -> dict[str, Any]:
    names = ("learning_rate", "per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "seed")
    return {name: getattr(args, name) for name in names}
