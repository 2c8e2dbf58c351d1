"""OpenUnlearning's evaluators during training on several processes.

Its trainer runs them on a single process only. Where every process holds whole weights (DDP, ZeRO-1/2) the main process
runs them here on its copy while the others wait, and broadcasts the result or the error. Where weights are split
(ZeRO-3, FSDP2) one process cannot run the model alone: a warning gives the command to evaluate after training.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object

logger = logging.getLogger(__name__)

#: An evaluation may take hours; the default of the training collectives (10 minutes under NCCL) would end the run.
_PATIENCE = timedelta(days=7)


class MainProcessEvaluation(Base):  # type: ignore[misc]
    """A mixin between our training step and OpenUnlearning's ``FinetuneTrainer``."""

    evaluators: Mapping[str, Any] | None
    template_args: Any
    layout: str
    _waiting_group: Any = None

    def __init__(self, model: Any = None, args: Any = None, **kwargs: Any) -> None:
        # By name: the first positional parameter of OpenUnlearning's trainer is not the model.
        super().__init__(model=model, args=args, **kwargs)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval", trial: Any = None
    ) -> dict[str, float]:
        """As OpenUnlearning's on one process; on several, as described above."""
        if not self.evaluators or self.accelerator.num_processes == 1:
            # Some attention kernels take only 16-bit inputs and the weights may be float32: autocast as in training.
            with self.accelerator.autocast():
                result: dict[str, float] = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix, trial)
            return result
        split = self.layout == "fsdp2"
        if self.layout == "zero":
            split = int(self.accelerator.state.deepspeed_plugin.zero_stage) == 3
        if split:
            self._say_how_to_evaluate_afterwards()
            return {}
        metrics = self._evaluate_on_main(trial)
        self.log(dict(metrics))
        return metrics

    def _say_how_to_evaluate_afterwards(self) -> None:
        if self.accelerator.is_main_process and not getattr(self, "_said_afterwards", False):
            logger.warning(
                "No evaluation during training: the weights are split over %d processes. Evaluate afterwards with "
                "'python src/eval.py … model.model_args.pretrained_model_name_or_path=%s', or train on one process or "
                "under DDP to evaluate on the way.",
                self.accelerator.num_processes,
                self.args.output_dir,
            )
        self._said_afterwards = True

    def _evaluate_on_main(self, trial: Any) -> dict[str, float]:
        if self._waiting_group is None:
            self._waiting_group = torch.distributed.new_group(backend="gloo", timeout=_PATIENCE)
        outcome: list[Any] = [None, None]
        error: BaseException | None = None
        if self.accelerator.is_main_process:
            try:
                outcome[0] = self._run_evaluators(trial)
            except Exception as caught:
                error, outcome[1] = caught, f"{type(caught).__name__}: {caught}"
        torch.distributed.broadcast_object_list(outcome, src=0, group=self._waiting_group)
        if outcome[1] is not None:
            reason = f"The evaluation failed on the main process: {outcome[1]}"
            if error is None:
                logger.error(reason)
            # A launcher ends the others as soon as one has left: none leaves before all have told the reason.
            with contextlib.suppress(RuntimeError):
                torch.distributed.barrier(group=self._waiting_group)
            raise error or RuntimeError(reason)
        result: dict[str, float] = outcome[0]
        return result

    def _run_evaluators(self, trial: Any) -> dict[str, float]:
        assert self.evaluators is not None
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}" / "evals"
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer = getattr(self, "processing_class", None) or getattr(self, "tokenizer", None)
        given = {"template_args": self.template_args, "model": self.model, "tokenizer": tokenizer}
        metrics: dict[str, float] = {}
        # The other processes draw no random numbers meanwhile. If this one did, their orders of data would diverge.
        with torch.random.fork_rng(), self.accelerator.autocast():
            for evaluator in self.evaluators.values():
                metrics.update(evaluator.evaluate(output_dir=str(folder), **given))
        return metrics
