"""What a run measures besides the batches it trains on: references, held-out levels, targets, the budget.

All of it is measured with the trainer's own collator, model and precision, and has a part in the checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..data.pairing import ForgetRetainDataset
from ..errors import ConfigError, DataError
from ..files import part_of
from ..losses.language import ALTERNATE, alternate_of, answer_nll
from ..losses.reference import evaluating
from ..step import Calibration, UnlearningStep
from .best import Best
from .budget import Budget, check_budget_data
from .checkpoints import MEMORY_FILE, STATE_FILE, load_memory
from .checks import is_indexable, paired_sets
from .config import MethodArguments
from .depth import Bound, Unseen, check_alternates, load_base
from .drift import Drift
from .ranks import Ranks
from .references import INITIAL_FILE, References
from .stored import check_layout, parts_of, read_stored, whole_retain, write_stored
from .window import WindowLoss, mean_nll, without_answers

if TYPE_CHECKING:
    from transformers import Trainer as Base
else:
    Base = object


class Measuring(Base):  # type: ignore[misc]
    """Measurements as a mixin over ``transformers.Trainer``; the trainer says which data they are made on."""

    method_args: MethodArguments
    layout: str
    _window: list[Mapping[str, Any]]
    _metrics: dict[str, list[float]]
    _holdout: Any
    _alternates: Any
    _base_model: Any
    _budget_data: Any
    _memory_data: Any
    _memory_file: str | None
    _step: UnlearningStep | None
    #: What the checkpoint of a resumed run says, and where it is.
    _known_state: Mapping[str, Any] = {}
    _resumed_from: str | None = None

    def mean_over_ranks(self, values: Tensor) -> Tensor:
        raise NotImplementedError

    def window_loss(self, part: str) -> WindowLoss:
        raise NotImplementedError

    def raw_optimizer(self) -> torch.optim.Optimizer:
        raise NotImplementedError

    def _build_step(self, model: nn.Module) -> UnlearningStep:
        raise NotImplementedError

    def _add_metrics(self, values: Mapping[str, float]) -> None:
        raise NotImplementedError

    def _note_rank(self) -> int:
        """Whose notes on its own weights this process reads and writes: replicas share theirs."""
        return 0 if self.layout in ("local", "ddp") else int(self.accelerator.process_index)

    def _build_measurements(self) -> None:
        """What the settings ask for, before the first step."""
        settings = self.method_args
        listed = ["forget"] if is_indexable(self.train_dataset) else []
        listed += ["retain"] if listed and is_indexable(getattr(self.train_dataset, "retain", None)) else []
        self._references = References(settings, self.model, self.layout, listed=listed)
        self._calibration = self._build_calibration()
        self._bound = None if settings.forget_until == "off" else Bound(settings, self.args.seed)
        self._budget: Budget | None = None
        self._drift = Drift() if settings.budget is not None and settings.budget_measure == "kl" else None
        if settings.budget is not None:
            measure = self._drift_from(self._drift) if self._drift else lambda: self._nll_of(self._budget_data)
            self._budget = Budget(settings, measure, self._add_metrics)
            self.add_callback(self._budget)
        self._best: Best | None = None
        if self._bound is not None and settings.keep_best == "depth":  # after the budget, which may go back
            self._best = Best(settings.budget_every, self._distance_to_targets, self._add_metrics)
            self.add_callback(self._best)

    def _build_calibration(self) -> Calibration | None:
        settings = self.method_args
        if settings.calibrate == "off":
            return None
        return Calibration(
            (lambda: self._nll_of(self._holdout)) if settings.calibrate == "holdout" else float(settings.calibrate),
            margin=settings.calibrate_margin,
            every=settings.calibrate_every,
            forget_loss=self._forget_nll,
        )

    def _nll_of(self, dataset: Any) -> float:
        """Mean answer-token NLL of a data set, each process measuring its share."""
        return self._mean_nll(self._counted_once(dataset))

    def _drift_from(self, initial: Drift) -> Callable[[], float]:
        """Measures the KL on the budget data from what the first measurement, before the first step, keeps."""
        initial.output_layer(self.model)  # refuse now what could not be measured then

        def measure() -> float:
            head, context = initial.output_layer(self.model), self.compute_loss_context_manager
            model = self.model_wrapped
            if not initial.known:
                batches = (batch for batch, _ in self._shared(self._budget_data))
                initial.capture(model, head, batches, context, self._ranks())
            return initial.measure(model, head, self._shared(self._budget_data), context, self.mean_over_ranks)

        return measure

    def _forget_nll(self, losses: Mapping[str, float]) -> float:
        """The forget loss on the scale of the target: mean answer-token NLL."""
        if self.method_args.forget_loss == "nll" and self.method_args.reduction == "window_tokens":
            return losses["forget"]
        return self._mean_nll(b["forget"] for b in self._window)

    def _mean_nll(self, batches: Iterable[Mapping[str, Any]]) -> float:
        return mean_nll(self.model_wrapped, batches, self.compute_loss_context_manager, self.mean_over_ranks)

    def _ranks(self) -> Ranks:
        """This process among the others."""
        return Ranks(self.accelerator.process_index, self.accelerator.num_processes, self.mean_over_ranks)

    def _batch(self, dataset: Any, rows: range) -> Mapping[str, Any]:
        """Some rows of a data set, collated and on the device."""
        batch: Mapping[str, Any] = self._prepare_inputs(self.data_collator([dataset[i] for i in rows]))
        return batch

    def _rows(self, dataset: Any) -> list[range]:
        """The rows of every batch of a data set, in order."""
        size = self.args.per_device_train_batch_size
        return [range(start, min(start + size, len(dataset))) for start in range(0, len(dataset), size)]

    def _batches(self, dataset: Any) -> Iterator[Mapping[str, Any]]:
        """All batches of a data set."""
        return (self._batch(dataset, rows) for rows in self._rows(dataset))

    def _shared(self, dataset: Any) -> Iterator[tuple[Mapping[str, Any], bool]]:
        """The batches of a data set that this process measures; not its own are those that only keep it busy."""
        return ((self._batch(dataset, rows), own) for rows, own in self._ranks().share(self._rows(dataset)))

    def _counted_once(self, dataset: Any) -> Iterator[Mapping[str, Any]]:
        """The same, without answers where another process counts them."""
        return (batch if own else without_answers(batch) for batch, own in self._shared(dataset))

    def compute_references(self, model: nn.Module) -> None:
        """Before the first step, with the model as it is wrapped for training (sharded weights gather themselves)."""
        with self.compute_loss_context_manager():
            if self._references.wants_states:
                self._keep_initial_states(model)
            sets = [self.train_dataset, *paired_sets(self.eval_dataset)]
            share = (batch for each in sets for batch in self._answers_share(each))
            self._references.compute(model, lambda: share, self._ranks())

    def _keep_initial_states(self, model: nn.Module) -> None:
        """Of all samples that training, the stored gradients and evaluation will meet, in the parts that need them."""
        compared, evaluated = self._references.compared, list(paired_sets(self.eval_dataset))
        listed: Iterable[Mapping[str, Any]] = ()
        if "retain" in compared:
            sets = [self.train_dataset.retain] + ([] if self._memory_data is None else [self._memory_data])
            sets += [each.retain if is_indexable(getattr(each, "retain", None)) else each for each in evaluated]
            batches = (batch for each in sets for batch, _ in self._shared(each))
            listed = (batch.get("retain", batch) for batch in batches if "retain" in batch or "forget" not in batch)
        if "forget" in compared:
            listed = chain(listed, *(self._forget_share(each) for each in (self.train_dataset, *evaluated)))
        pairs = self._batch(self.train_dataset, self._rows(self.train_dataset)[0])
        drawn = [pairs[part] for part in compared if part in pairs]
        file, writer = Path(self.args.output_dir) / INITIAL_FILE, bool(self.is_world_process_zero())
        self._references.keep_states(model, listed, drawn, self._ranks(), file, writer=writer)

    def _forget_batches(self) -> Iterator[Mapping[str, Any]]:
        return (batch["forget"] for batch in self._batches(self.train_dataset) if "forget" in batch)

    def _forget_share(self, dataset: Any) -> Iterator[Mapping[str, Any]]:
        # What is measured twice has the same key and the same value.
        return (batch["forget"] for batch, _ in self._shared(dataset) if "forget" in batch)

    def _answers_share(self, dataset: Any) -> Iterator[Mapping[str, Any]]:
        """This process's share of the forget samples, and of every third answer they will have in any epoch."""
        every = getattr(getattr(dataset, "forget", None), "every_alternate", None)
        for batch in self._forget_share(dataset):
            yield batch
            if every is None and ALTERNATE in batch:
                yield batch[ALTERNATE]
        if every is not None:
            yield from (batch for batch, _ in self._shared(every))

    def _measure_targets(self, model: nn.Module, bound: Bound) -> None:
        """Before the first step, likewise, and where they are due again."""
        unseen = Unseen(
            forget=self._forget_batches,
            share=lambda: self._forget_share(self.train_dataset),
            merge=self._ranks().merge,
            holdout=lambda: self._batches(self._holdout),
            alternates=lambda: (self._prepare_inputs(self.data_collator(list(own))) for own in self._alternates),
            base=lambda: load_base(self._base_model).to(self.args.device),
        )
        with self.compute_loss_context_manager():
            step = self.state.global_step
            returned = self._budget is not None and self._budget.returned_at == step > 0
            bound.compute(model, unseen, step, returned=returned)

    def _distance_to_targets(self) -> float:
        """Mean |T − ℓ| over all forget samples."""
        assert self._bound is not None
        model, found = self.model_wrapped, [(0.0, 0.0)]
        with torch.no_grad(), evaluating(model):
            for batch, own in self._shared(self.train_dataset):
                with self.compute_loss_context_manager():
                    measured = self._bound.depth.distance(answer_nll(model, batch["forget"]), batch["forget"])
                found += [measured] if own else []
        total = torch.tensor(found, dtype=torch.float64).sum(0)
        distance, count = self.mean_over_ranks(total).tolist()
        return float(distance / count) if count else 0.0

    def _store_gradients(self, step: UnlearningStep) -> None:
        """Before the first step, for rules that need no retain data afterwards."""
        count = step.rule.stored
        if self._memory_file is not None:
            check_layout(self.layout)
            step.space.memory.update(read_stored(self._memory_file, self._trained(), self.model, count))
            return
        samples = self._memory_data
        if samples is None:
            samples = getattr(self.train_dataset, "retain", None)
        loss, model = self.window_loss("retain"), self.model_wrapped
        with evaluating(model):
            parts = (list(self._counted_once(part)) for part in parts_of(samples, count))
            step.store([loss.closures(model, batches, "retain") for batches in parts])

    def _refresh_memory(self, step: UnlearningStep) -> None:
        """One pass over all retain data, whose gradient is protected until the next; without dropout."""
        loss, model = self.window_loss("retain"), self.model_wrapped
        with evaluating(model):
            batches = list(self._counted_once(whole_retain(self._memory_data, self.train_dataset)))
            step.refresh(loss.closures(model, batches, "retain"))

    def write_memory(self, path: str | Path) -> None:
        """Store the retain gradients at the weights as they are, and write them to ``path``."""
        check_layout(self.layout)
        self.compute_references(self.model_wrapped)
        step = self._build_step(self.model_wrapped)
        try:
            self._store_gradients(step)
            if self.is_world_process_zero():
                write_stored(step.space.memory, self._trained(), self.model, Path(path), layout=self.layout)
        finally:
            step.release()
            self._step = None

    def _trained(self) -> dict[str, nn.Parameter]:
        """The optimizer's parameters in its order, by their names in the model."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        return {names[id(p)]: p for group in self.raw_optimizer().param_groups for p in group["params"]}

    def _remaining(self) -> Callable[[], float] | None:
        """How much of the forgetting is still to be done, where it is bounded."""
        bound = self._bound
        return None if bound is None else lambda: bound.depth.remaining(self.mean_over_ranks)

    # -- a run begins or goes on ----------------------------------------------------------------

    def _restart(self, checkpoint: str | None) -> None:
        """Forget what earlier runs measured, or take what a checkpoint holds: the initial model is gone by then."""
        self._resumed_from = checkpoint
        new_model = self.model_init is not None
        state = Path(checkpoint or "") / STATE_FILE
        self._known_state = json.loads(state.read_text()) if checkpoint and state.is_file() else {}
        self._references.restart(checkpoint, new_model=new_model)
        if self._bound is not None:
            self._bound.restart(checkpoint, self._known_state.get("depth_start"), new_model=new_model)
        if self._budget is not None:
            known = self._known_state.get("budget", {})
            self._budget.restart(checkpoint, known, self._note_rank(), new_model=new_model)
        if self._drift is not None:
            self._drift.restart(checkpoint, new_model=new_model)
        if self._best is not None:
            self._best.restart(checkpoint, self._known_state.get("best", {}), self._note_rank())
        ahead = self._references.needs_logprobs or (self._bound is not None and self._bound.measured)
        if self._best is not None or (checkpoint is None and ahead):
            self._check_indexable()
        self._metrics.clear()
        self._metrics.update(self._known_state.get("since_last_log", {}))
        if self._calibration is not None:
            self._calibration.target = self._known_state.get("calibrate_target", self._calibration.target)

    def _restore_step(self, step: UnlearningStep) -> None:
        """The memory and the radius that the step had at the checkpoint."""
        rule = step.rule
        if (rule.remembers is not None or rule.refreshes or rule.stored) and self._resumed_from is not None:
            name, settings = MEMORY_FILE.format(rank=self._note_rank()), self.method_args
            wanted = "method='forget_only'" if rule.stored else f"protect={settings.protect!r}"
            path = part_of(self._resumed_from, name, wanted)
            step.space.memory.update(load_memory(path, self.args.device))
        if step.sweep is not None and self._resumed_from is not None:
            path = part_of(self._resumed_from, MEMORY_FILE.format(rank=self._note_rank()), "method='ssd'")
            step.space.memory.update(load_memory(path, self.args.device))
            step.sweep.counts = dict(self._known_state.get("sweep", step.sweep.counts))
        if step.radius is not None and "radius" in self._known_state:
            step.radius.rho, step.radius.size = self._known_state["radius"]

    # -- checks ---------------------------------------------------------------------------------

    def _check_data(self, train_dataset: Any, model_init: Any) -> None:
        settings = self.method_args
        for part in ("forget", "retain"):
            if model_init is not None and settings.loss(part).reference == "distributions":
                named = f"{part}_loss={getattr(settings, f'{part}_loss')!r}"
                raise ConfigError(f"{named} needs the initial model: pass model=… instead of model_init=….")
        if hasattr(train_dataset, "__len__") and len(train_dataset) == 0:
            raise DataError("train_dataset is empty: there is nothing to unlearn.")
        for name in ("calibrate", "forget_until"):
            if getattr(settings, name) != "holdout":
                continue
            if self._holdout is None:
                raise DataError(
                    f"{name}='holdout' needs never-trained samples of the same kind: pass holdout_dataset=…, or a "
                    f"target loss such as {name}=2.5."
                )
            if len(self._holdout) == 0:
                raise DataError(f"holdout_dataset is empty: {name}='holdout' has nothing to measure.")
        if settings.budget is not None:
            check_budget_data(self._budget_data)
        self._check_memory(train_dataset)
        if settings.loss("forget").alternative != "none" and isinstance(train_dataset, ForgetRetainDataset):
            alternate_of(train_dataset.forget[0])
        if settings.forget_until == "alternates":
            check_alternates(self._alternates, train_dataset)

    def _check_memory(self, train_dataset: Any) -> None:
        rule, method = self.method_args.rule(), self.method_args.method
        if self._memory_file is not None and not rule.stored:
            raise ConfigError(
                f"memory_file is for method='forget_only', and this is {method!r}: leave it out, or change the method."
            )
        if self._memory_data is not None and not (rule.stored or rule.refreshes):
            raise ConfigError(
                f"memory_dataset is for method='forget_only' and for memory_refresh, and this is {method!r} without: "
                "leave it out, or set one of them."
            )
        if rule.refreshes and train_dataset is not None:
            whole_retain(self._memory_data, train_dataset)

    def _check_indexable(self) -> None:
        if not hasattr(self.train_dataset, "__getitem__") or not hasattr(self.train_dataset, "__len__"):
            settings = self.method_args
            raise DataError(
                f"forget_loss={settings.forget_loss!r} with forget_until={settings.forget_until!r} and "
                f"keep_best={settings.keep_best!r} computes values of each sample and needs a data set with a length; "
                "for streamed data use nll or simnpo, forget_until 'off' or a number, and keep_best 'off'."
            )
