"""``ROSUTrainer``: a ``transformers.Trainer`` whose training step is the paper's.

Trainer calls ``training_step`` once per micro-batch. The batches of a window are collected until its last one arrives;
then :class:`~rosu_llm.UnlearningStep` runs all passes over the window and leaves one gradient in ``.grad``. Clipping,
the optimizer, schedulers, checkpoints and callbacks go on as in any Trainer. The pull βδ is added by a hook on the
optimizer's step, so a step that is skipped (fp16 overflow) pulls nothing.

:class:`ROSUMixin` holds all of it and can sit on top of any Trainer subclass.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from ..compat import dtype_argument, load_causal_model, transformers_is
from ..data.pairing import ForgetRetainCollator, ForgetRetainDataset
from ..data.sweep import SweepDataset
from ..errors import ConfigError, EmptyUpdateError
from ..geometry.methods.others.ssd import SSD
from ..losses.depth import GATE
from ..losses.registry import Batch
from ..space import ParameterSpace
from ..space.select import select_space
from ..step import Closure, Outcome, UnlearningStep, over_steps
from .adapter import add_adapter, let_gradients_through, refused_adapter
from .checkpoints import Saving, resolve_resume
from .checks import (
    check_handed_over,
    check_host_memory,
    check_model,
    check_optimizer,
    check_room,
    check_second_derivatives,
    check_which_weights,
    tell_what_is_idle,
)
from .chosen import train_only
from .config import MethodArguments, ROSUConfig
from .depth import check_base
from .layout import check_layout, compute_dtype
from .measuring import Measuring
from .paired_evaluation import PairedEvaluation
from .per_sample import sample_closures
from .precision import prepare_precision
from .preemption import stopping_on_signals, without_jit_checkpoint
from .preflight import Preflight, capture_options, preflight
from .references import INITIAL_FILE
from .regroup import check_budget_of_tokens, regroup
from .supported import check_training_arguments
from .window import WindowLoss, check_batch

logger = logging.getLogger(__name__)


class _NoEmptyUpdate(TrainerCallback):
    """Ends a run in which the optimizer stepped before an update was computed, which would pass unnoticed."""

    def __init__(self) -> None:
        self.computed = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.computed:
            raise EmptyUpdateError(
                f"Step {state.global_step} changed nothing: Trainer stepped before the window of "
                f"gradient_accumulation_steps={args.gradient_accumulation_steps} micro-batches was complete, and did "
                "not say so. Use a number that divides the micro-batches of an epoch, and report this with your "
                "versions of transformers and accelerate."
            )
        self.computed = False


class _EpochPairing(TrainerCallback):
    """Tells the data set which epoch it is, also after resuming in the middle of one."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._dataset.set_epoch(int(state.epoch or 0))


class _ReachesForgetting(TrainerCallback):
    """Refuses a run of a method that forgets in its second epoch if ``max_steps`` ends it in the first."""

    def __init__(self, method: str) -> None:
        self._method = method

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.num_train_epochs < 2:
            raise ConfigError(
                f"max_steps={state.max_steps} ends in the first epoch, and method={self._method!r} keeps in that one "
                "and forgets from the second on: raise max_steps, or give num_train_epochs=5 in its place."
            )


class ROSUMixin(Measuring, PairedEvaluation, Saving):
    """The unlearning step as a mixin over ``transformers.Trainer``.

    Args:
        method_args: the method's parameters; taken from ``args`` when that is a ``ROSUConfig``.
        holdout_dataset: never-trained samples of the same kind, for ``calibrate`` and ``forget_until="holdout"``.
        alternates_dataset: for each forget sample a list of samples with other answers to its question, for
            ``forget_until="alternates"``.
        budget_dataset: samples that take no part in training, for ``budget``.
        memory_dataset: retain samples whose gradients are stored before the first step, for ``forget_only``, or every
            so many steps, for ``memory_refresh``; those of a :class:`ForgetRetainDataset` if not given.
        memory_file: gradients that 'rosu memory build' has stored, in place of them.
        base_model: the model before it learned the forget samples, or its name, for ``forget_until="base"``.
        peft_config: wrap the model in this adapter first.
        tokenizer, processing_class: either name is accepted, whatever the installed version calls it.

    All other arguments are Trainer's.
    """

    #: Training arguments and method's parameters that the trainer takes.
    _config_class: type[ROSUConfig] = ROSUConfig
    _arguments_class: type[MethodArguments] = MethodArguments
    #: What each part of a batch must hold.
    _batch_keys: tuple[str, ...] = ("input_ids", "labels")
    #: Whether passes run parts of the model on their own, past the wrapper that averages gradients.
    _bypasses_wrapper = False

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *rest: Any,
        method_args: MethodArguments | None = None,
        holdout_dataset: Any = None,
        alternates_dataset: Any = None,
        budget_dataset: Any = None,
        memory_dataset: Any = None,
        memory_file: str | None = None,
        base_model: Any = None,
        peft_config: Any = None,
        **kwargs: Any,
    ) -> None:
        args, settings = self._take_settings(args, method_args)
        check_training_arguments(args)
        check_which_weights(args, settings)
        tell_what_is_idle(settings)
        check_handed_over(kwargs, persistent=bool(getattr(args, "dataloader_persistent_workers", False)))
        self._holdout, self._alternates, self._base_model = holdout_dataset, alternates_dataset, base_model
        self._budget_data, self._memory_data, self._memory_file = budget_dataset, memory_dataset, memory_file
        self._check_data(kwargs.get("train_dataset"), kwargs.get("model_init"))
        if isinstance(model, str):
            model = load_causal_model(model, **dtype_argument(torch.float32))
        if settings.forget_until == "base":
            check_base(base_model, model)
        if model is not None:
            model = self._prepare_model(model, args, peft_config)
        elif kwargs.get("model_init") is not None:
            given = kwargs["model_init"]
            kwargs["model_init"] = wraps(given)(lambda *trial: self._prepare_model(given(*trial), args, peft_config))
        _rename_tokenizer(super().__init__, kwargs)
        tokenizer = kwargs.get("processing_class", kwargs.get("tokenizer"))
        dataset = kwargs.get("train_dataset")
        if kwargs.get("data_collator") is None and isinstance(dataset, (ForgetRetainDataset, SweepDataset)):
            kwargs["data_collator"] = ForgetRetainCollator(getattr(tokenizer, "pad_token_id", None) or 0)
        with without_jit_checkpoint(args) as self.stops_on_signals:
            super().__init__(model, args, *rest, **kwargs)
        self.layout = check_layout(self.accelerator, self.model, self.args.n_gpu)
        self._check_samples()
        if settings.capture_dtype == "bfloat16" and self.accelerator.mixed_precision == "fp16":
            raise ConfigError(
                "capture_dtype='bfloat16' with fp16=True: a gradient that loss scaling saved from underflow would lose "
                "its digits after all. Train with bf16=True, or leave capture_dtype out."
            )
        if self.accelerator.mixed_precision == "fp16":  # a launcher may have set it
            settings.check_half_precision()
        check_budget_of_tokens(settings.micro_batch_tokens, dataset)
        check_second_derivatives(settings, self.args, self.model, self.layout)
        if hasattr(dataset, "set_epoch"):
            self.add_callback(_EpochPairing(dataset))
        if settings.rule().alternates:
            self.add_callback(_ReachesForgetting(settings.method))
        self._no_empty_update = _NoEmptyUpdate()
        self.add_callback(self._no_empty_update)

        self._build_measurements()
        self._step: UnlearningStep | None = None
        self._pull_hook: Any = None
        self.preflight: Preflight | None = None
        self._window: list[Mapping[str, Any]] = []
        self._metrics: dict[str, list[float]] = defaultdict(list)
        self._eval_parts: dict[str, list[float]] = {}

    def _take_settings(self, args: Any, method_args: Any) -> tuple[Any, Any]:
        """The training arguments and the method's, which may be the same object; checked."""
        if args is None and method_args is None:
            args = self._config_class()
        self.method_args = settings = method_args or args
        if not isinstance(settings, self._arguments_class):
            raise ConfigError(
                f"args is a {type(args).__name__} without the method's parameters: pass "
                f"args={self._config_class.__name__}(…), or method_args={self._arguments_class.__name__}(…) beside it."
            )
        settings.check_method()
        if args is not None:
            if settings.rule().sweeps:
                args.num_train_epochs = 1
            settings.check_run_of_method(args)
        return args, settings

    # -- checks ---------------------------------------------------------------------------------

    def _prepare_model(self, model: Any, args: Any, peft_config: Any) -> Any:
        """The model as it is trained: checked, with its adapter, in the precision that perturbations need."""
        check_model(model)
        if self.method_args.rule().sweeps and (peft_config is not None or hasattr(model, "peft_config")):
            raise refused_adapter(self.method_args.method)
        self._choose_parameters(model, peft_config)
        if peft_config is not None:
            model = add_adapter(model, peft_config, args.seed)  # Trainer seeds later
        if getattr(args, "gradient_checkpointing", False):
            let_gradients_through(model)
        self._prepare_precision(model, args)
        return model

    def _choose_parameters(self, model: nn.Module, peft_config: Any) -> None:
        pattern = self.method_args.trainable_parameters
        if pattern is None:
            return
        if peft_config is not None:
            raise ConfigError(
                f"trainable_parameters={pattern!r} with an adapter, which is what is trained then: choose its layers "
                "with lora_target_modules, or leave one of the two out."
            )
        train_only(model, pattern)

    def _prepare_precision(self, model: nn.Module, args: Any) -> None:
        # DeepSpeed keeps a float32 master of bf16 weights itself. A launcher sets the plugin, not the argument.
        deepspeed = getattr(args, "deepspeed", None) or getattr(args, "deepspeed_plugin", None)
        upcast = self.method_args.upcast and not deepspeed
        prepare_precision(model, upcast=upcast, autocast=bool(getattr(args, "bf16", False)))

    def _check_samples(self) -> None:
        """Refuse more protected samples than a window has; a shorter one at the end of an epoch takes what it has."""
        wanted = self.method_args.rule().samples
        each, steps, world = self.args.train_batch_size, self.args.gradient_accumulation_steps, self.args.world_size
        size = each * steps * world
        if self.method_args.protect_rank is not None and wanted > size:
            raise ConfigError(
                f"protect_rank={wanted} is larger than the retain window, which has {size} samples (batch size {each} "
                f"× accumulation {steps} × processes {world}): lower protect_rank, or enlarge the window."
            )

    def to_device(self, batch: Any) -> Any:
        """A collated batch where the model is."""
        return self._prepare_inputs(batch)

    def end_window(self) -> None:
        """Drop what the passes over a window share; a hook for trainers that keep something between them."""

    def check_destination(self, *, overwrite: bool = False) -> None:
        """Raise now for an output folder that the model could not be written to at the end."""
        if self.args.should_save:
            check_room(Path(self.args.output_dir), self.model)

    # -- training -------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's; ``resume_from_checkpoint=True`` takes the newest *complete* checkpoint."""
        checkpoint = resolve_resume(resume_from_checkpoint, self.args.output_dir)
        self._window.clear()
        self._release()
        self._restart(checkpoint)
        try:
            with stopping_on_signals(self) if self.stops_on_signals else nullcontext():
                result = super().train(checkpoint, *args, **kwargs)
        finally:
            self._release()
            if self.args.should_save:  # what is mapped stays readable
                with contextlib.suppress(OSError):
                    (Path(self.args.output_dir) / INITIAL_FILE).unlink(missing_ok=True)
        if self._window:  # transformers 4.51 where an epoch is shorter than a window, for any trainer
            raise EmptyUpdateError(
                f"Trainer ended with {len(self._window)} micro-batches that no step was made of: an epoch has fewer "
                f"than gradient_accumulation_steps={self.args.gradient_accumulation_steps}. Lower that or the batch "
                "size."
            )
        return result

    def _release(self) -> None:
        if self._step is not None:
            self._step.release()
        if self._pull_hook is not None:
            self._pull_hook.remove()
        self._step = self._pull_hook = None

    def get_batch_samples(self, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:
        """No batches where a resumed run has ended already: transformers would make one more step of them."""
        spent = self._budget is not None and self._budget.spent
        if spent or 0 < self.state.max_steps <= self.state.global_step:
            self.control.should_training_stop = True
            if self._best is not None and self._step is None:  # its weights are put back at the end
                self._best.begin(self._build_step(self.model_wrapped))
            return [], None
        return super().get_batch_samples(epoch_iterator, *args, **kwargs)

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Collect the micro-batch; on the last one of the window run all passes. Returns the outer loss."""
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        settings = self.method_args
        passes = settings.rule().passes
        check_batch(inputs, passes, self._batch_keys, {part: settings.loss(part).keys for part in passes})
        self._window.append(self._prepare_inputs(inputs))
        if not self._steps_next():
            return torch.zeros((), device=self.args.device)
        try:
            outcome = self._update(model, self._window)
            self._no_empty_update.computed = True
        finally:
            self._window = []
        return torch.tensor(outcome.objective, dtype=torch.float32, device=self.args.device)

    def _steps_next(self) -> bool:
        """Whether Trainer lets the optimizer step after this micro-batch.

        accelerate knows, but for one case: before transformers 4.46 Trainer also steps at the end of an epoch that has
        no more micro-batches than a window, and tells accelerate only afterwards.
        """
        if self.accelerator.sync_gradients or transformers_is("4.46"):
            return bool(self.accelerator.sync_gradients)
        loader = self.callback_handler.train_dataloader
        short = hasattr(loader, "__len__") and len(loader) <= self.args.gradient_accumulation_steps
        return bool(short and self.accelerator.gradient_state.end_of_dataloader)

    def _update(self, model: nn.Module, batches: Sequence[Mapping[str, Any]]) -> Outcome:
        self.compute_references(model)
        step = self._step or self._build_step(model)
        if step.rule.stored and not step.space.memory:
            self._store_gradients(step)
        if step.refresh_due(self.state.global_step):
            self._refresh_memory(step)
        if self._budget is not None:
            self._budget.begin(step)
        parts_now = step.rule.parts_in(int(self.state.epoch or 0))
        losses = {part: self.window_loss(part) for part in parts_now}
        if self._bound is not None:
            self._measure_targets(model, self._bound)
            if self._best is not None:
                self._best.begin(step)
            if "forget" in losses:  # epochs of scrub that keep have none
                losses["forget"] = replace(losses["forget"], gated=True)
        if isinstance(step.rule, SSD) and step.rule.fisher == "sample":
            everything = len(batches) * max(len(b["input_ids"]) for both in batches for b in both.values())
            count = self._longest([everything])[0] * self.accelerator.num_processes
            window = {part: self._sample_closures(model, batches, part, count) for part in losses}
        else:
            parts = self._micro_batches({part: [b[part] for b in batches] for part in losses})
            if self._bound is not None and "forget" in parts:
                parts["forget"] = [{**batch, GATE: self._bound.depth.gate(batch)} for batch in parts["forget"]]
            longest = dict(zip(losses, self._longest([len(parts[part]) for part in losses]), strict=True))
            window = {
                # of a sweep the shorter set ends first, and what follows it counts for nothing
                part: loss.closures(model, parts[part], part, longest[part], required=not step.rule.sweeps)
                for part, loss in losses.items()
            }
            if self._bound is not None and self._bound.depth.returns:
                beyond = losses["forget"].returning()
                window["retain"] += beyond.closures(model, parts["forget"], "forget", longest["forget"])
        samples = self._sample_closures(model, batches) if step.rule.samples else []
        outcome = step.compute(
            window, samples, step=self.state.global_step, total=self.state.max_steps, remaining=self._remaining()
        )
        self._add_metrics(step.logs(outcome))
        if self._bound is not None:
            depth = self._bound.depth.logs(self.mean_over_ranks)
            self._add_metrics(depth)
            if self.state.global_step == 0 and depth.get("depth/remaining") == 0.0:
                logger.warning(
                    "All forget samples of the first step are at their targets already (loss %.3g, target %.3g), so "
                    "that it forgets nothing: does forget_until=%r look at what the model has never seen?",
                    depth["depth/loss"],
                    depth["depth/target"],
                    self.method_args.forget_until,
                )
        if self.layout == "zero" and step.sweep is None and step.space.step(self.raw_optimizer()):
            self._after_optimizer_step()
        return outcome

    def _micro_batches(self, parts: Mapping[str, Sequence[Batch]]) -> dict[str, list[Batch]]:
        """What each pass goes through, from the batches as they were collated."""
        tokens = self.method_args.micro_batch_tokens
        whole = self.method_args.reduction == "micro_mean"
        return regroup(parts, 0 if whole else tokens, self.method_args.padding_free)

    def _sample_closures(
        self, model: nn.Module, batches: Sequence[Mapping[str, Any]], part: str = "retain", count: int | None = None
    ) -> list[Closure]:
        """Losses of single samples of the window: of those retain samples that a rule protects, or of ``count``."""
        return sample_closures(
            self.window_loss(part),
            model,
            [b[part] for b in batches],
            self._ranks(),
            count=self.method_args.rule().samples if count is None else count,
            longest=self._longest([len(batches)])[0],
            seed=self.args.seed,
            step=self.state.global_step,
            required=count is None,
        )

    def window_loss(self, part: str) -> WindowLoss:
        """How the loss of ``forget`` or ``retain`` is computed over a window."""
        return self._references.window_loss(part, self.mean_over_ranks, self.compute_loss_context_manager)

    def raw_optimizer(self) -> torch.optim.Optimizer:
        # accelerate's and DeepSpeed's wrappers keep what they wrap under this name, and claim to be optimizers too.
        optimizer: Any = self.optimizer
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        result: torch.optim.Optimizer = optimizer
        return result

    def parameter_space(self) -> ParameterSpace:
        """A space over the optimizer's parameters, for the model as it is wrapped for training."""
        return select_space(
            self.model_wrapped,
            [p for group in self.raw_optimizer().param_groups for p in group["params"]],
            scaler=self.accelerator.scaler,
            compute_dtype=compute_dtype(self.accelerator),
            bypasses_wrapper=self._bypasses_wrapper,
        )

    def _reference_bytes(self) -> int:
        """Memory of what is kept of the initial model."""
        return self._references.extra_bytes

    def _build_step(self, model: nn.Module) -> UnlearningStep:
        settings, optimizer = self.method_args, self.raw_optimizer()
        check_optimizer(optimizer)
        self._step = step = UnlearningStep(
            model,
            optimizer,
            **settings.step_settings(),
            calibration=self._calibration,
            space=self.parameter_space(),
            devices={self.args.device},
            mean_over_ranks=self.mean_over_ranks,
            loss_scaling=self.accelerator.mixed_precision == "fp16",
        )
        self._restore_step(step)
        if self.layout != "zero":  # there the engine steps, group by group, and the pull follows the whole step
            self._pull_hook = optimizer.register_step_post_hook(self._after_optimizer_step)
        self.preflight = preflight(
            self.model, step.rule, optimizer, self._reference_bytes(), **capture_options(settings)
        )
        if self.preflight.host and self.args.device.type != "cpu":
            parts = self.accelerator.num_processes if self.layout in ("fsdp2", "zero") else 1
            here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            check_host_memory(here * -(-self.preflight.host // parts))
        where = (settings.method, self.layout, self.accelerator.num_processes)
        logger.info("method %s, layout %s, %d processes: %s", *where, self.preflight.line())
        return step

    def _after_optimizer_step(self, *_: Any) -> None:
        if self._step is not None:
            self._add_metrics(self._step.after_optimizer_step())

    # -- logging --------------------------------------------------------------------------------

    def _add_metrics(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._metrics[name].append(value)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds the step metrics since the last log to training logs."""
        if "loss" in logs and self._metrics:
            logs.update(over_steps(self._metrics))
            self._metrics.clear()
        super().log(logs, *args, **kwargs)

    def _longest(self, counts: Sequence[int]) -> list[int]:
        """For each count the largest over all ranks: every rank must join every collective."""
        if self.accelerator.num_processes == 1:
            return list(counts)
        everyone = self.accelerator.gather(torch.tensor(counts, device=self.accelerator.device))
        found: list[int] = everyone.view(-1, len(counts)).amax(0).tolist()
        return found

    def mean_over_ranks(self, values: Tensor) -> Tensor:
        if self.accelerator.num_processes == 1:
            return values
        reduced: Tensor = self.accelerator.reduce(values.to(self.accelerator.device), reduction="mean")
        return reduced.cpu()


class ROSUTrainer(ROSUMixin, Trainer):
    """Unlearn with ROSU, or any method of its family, exactly as you would train.

    Example::

        trainer = ROSUTrainer(model, ROSUConfig(output_dir="out", rho=0.4), train_dataset=pairs)
        trainer.train()
    """


def _rename_tokenizer(init: Any, kwargs: dict[str, Any]) -> None:
    """Pass the tokenizer under the name the installed Trainer uses."""
    known = inspect.signature(init).parameters
    for given, other in (("tokenizer", "processing_class"), ("processing_class", "tokenizer")):
        if given in kwargs and given not in known and other in known:
            kwargs[other] = kwargs.pop(given)
