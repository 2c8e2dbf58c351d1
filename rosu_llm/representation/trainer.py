"""``RepresentationTrainer``: the same step engine, with losses of hidden activations (paper, Algorithm 3).

Only the closures differ from :class:`~rosu_llm.ROSUTrainer`: they compare the activations of layer ℓ with those of
the initial model. Geometry, amplification, optimizer and logging are inherited.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import Trainer

from ..compat import dtype_argument, load_causal_model
from ..data.pairing import ForgetRetainCollator
from ..errors import ConfigError, DataError, UnsupportedLayoutError
from ..losses import LossContext
from ..losses.registry import Batch
from ..step import Outcome
from ..training.checkpoints import THETA_FILE, staged
from ..training.trainer import ROSUMixin
from ..training.window import PARTS, WindowLoss
from .activations import Activations, BatchActivations, FastActivations, PlainActivations, attach_casts
from .config import RepresentationArguments, RepresentationConfig
from .files import CheckpointFiles, refuse_held, stored_dtype
from .loading import load_truncated
from .losses import RepresentationContext, bootstrap_noise, control_vectors, unit_of
from .names import check_target, layer_index, layer_stack, names_below, trainable_names

logger = logging.getLogger(__name__)


class RepresentationMixin(ROSUMixin):
    """Representation-level unlearning as a mixin over ``transformers.Trainer``.

    Args:
        model: hub id or folder of a checkpoint (then only the layers up to ℓ are loaded and the result is a copy of
            it with the trained tensors replaced), or a model in memory.
        dtype: type of the frozen weights of a checkpoint; trained ones are float32.
        attn_implementation, trust_remote_code: for loading it.

    All other arguments are those of :class:`~rosu_llm.training.trainer.ROSUMixin`.
    """

    method_args: RepresentationArguments
    _config_class = RepresentationConfig
    _arguments_class = RepresentationArguments
    _batch_keys = ("input_ids",)
    _bypasses_wrapper = True

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *rest: Any,
        method_args: RepresentationArguments | None = None,
        dtype: torch.dtype = torch.float32,
        attn_implementation: str | None = None,
        trust_remote_code: bool = False,
        **kwargs: Any,
    ) -> None:
        args, settings = self._take_settings(args, method_args)
        if model is None or kwargs.get("peft_config") is not None:
            raise ConfigError("RepresentationTrainer needs model=… (a checkpoint or a model), and takes no adapter.")
        self._files: CheckpointFiles | None = None
        if isinstance(model, (str, Path)):
            options = {"attn_implementation": attn_implementation, "trust_remote_code": trust_remote_code}
            model, names = self._load(str(model), settings, dtype, options)
        else:
            names = self._select(model, settings)
        self._given_dtypes = {name: p.dtype for name, p in model.named_parameters()}
        self._theta: dict[str, nn.Parameter] = dict(_freeze_rest(model, names))
        attach_casts(model, names)
        # the plain path keeps a whole copy of its own
        self._initial = {name: p.detach().clone() for name, p in self._theta.items()} if settings.fast else {}
        stack = layer_stack(model, settings.layer_stack)
        self._activations = self._build_activations(model, stack, settings)
        self._prepared: dict[int, BatchActivations] = {}
        if kwargs.get("data_collator") is None:
            tokenizer = kwargs.get("processing_class", kwargs.get("tokenizer"))
            kwargs["data_collator"] = ForgetRetainCollator(getattr(tokenizer, "pad_token_id", None) or 0)
        super().__init__(model, args, *rest, method_args=settings, **kwargs)
        if self.layout not in ("local", "ddp"):
            raise UnsupportedLayoutError(
                f"Representation-level unlearning runs parts of the model on their own, which {self.layout} sharding "
                "does not allow; it needs little memory. Use one device, or ddp (configs/accelerate/ddp.yaml)."
            )
        window = getattr(kwargs.get("train_dataset"), "window", None)
        expected = self.args.train_batch_size * self.args.gradient_accumulation_steps * self.args.world_size
        if window is not None and window != expected:
            raise DataError(
                f"The corpora alternate every {window} samples, but one step takes {expected} (batch size × "
                f"accumulation × processes): build AlternatingCorpora with window={expected}."
            )

    # -- the model ------------------------------------------------------------------------------

    def _load(
        self, name: str, settings: RepresentationArguments, dtype: torch.dtype, options: Mapping[str, Any]
    ) -> tuple[Any, list[str]]:
        if not settings.fast or settings.trainable_parameters is None:
            extra = {k: v for k, v in options.items() if v}
            model = load_causal_model(name, **dtype_argument(dtype), **extra)
            return model, self._select(model, settings)
        part = load_truncated(
            name,
            target_layer=settings.target_layer,
            trainable_parameters=settings.trainable_parameters,
            layer_stack_name=settings.layer_stack,
            dtype=dtype,
            **options,
        )
        self._files, self._stored = part.files, part.stored
        return part.model, list(part.stored)

    def _choose_parameters(self, model: nn.Module, peft_config: Any) -> None:
        """Nothing to do: they were chosen when the model was loaded."""

    def _prepare_precision(self, model: nn.Module, args: Any) -> None:
        """Nothing to do: the trained weights are float32 and their modules cast what they are given."""

    @staticmethod
    def _select(model: Any, settings: RepresentationArguments) -> list[str]:
        stack = layer_stack(model, settings.layer_stack)
        check_target(settings.target_layer, len(model.get_submodule(stack)))
        names = (name for name, _ in model.named_parameters())
        if settings.trainable_parameters is None:
            return names_below(model, stack, settings.target_layer)
        return trainable_names(names, settings.trainable_parameters, stack, settings.target_layer)

    def _build_activations(self, model: Any, stack: str, settings: RepresentationArguments) -> Activations:
        if not settings.fast:
            return PlainActivations(model, stack, settings.target_layer)
        found = [layer_index(name, stack) for name in self._theta]
        first = min(i for i in found if i is not None)
        return FastActivations(model, model.get_submodule(stack), first, settings.target_layer, self._initial)

    # -- the step -------------------------------------------------------------------------------

    def compute_loss_context_manager(self) -> Any:
        """Autocast; accelerate puts it around the forward of the whole model only, and h must be computed like h₀."""
        return self.accelerator.autocast()

    def _update(self, model: nn.Module, batches: Sequence[Mapping[str, Any]]) -> Outcome:
        model.eval()  # no dropout: activations are compared with those of the initial model
        try:
            return super()._update(model, batches)
        finally:
            self.end_window()

    def _micro_batches(self, parts: Mapping[str, Sequence[Batch]]) -> dict[str, list[Batch]]:
        return {part: list(batches) for part, batches in parts.items()}  # sums over tokens and padding may count

    def end_window(self) -> None:
        """Drop the activations that the passes over a window share."""
        self._prepared.clear()

    def window_loss(self, part: str) -> WindowLoss:
        settings = self.method_args
        step, seed = self.state.global_step, self.args.seed
        noise = bootstrap_noise(seed, step, settings.noise_std, settings.noise_shape) if part == "forget" else None
        context = RepresentationContext(
            activations=self._of_forget if part == "forget" else self._of_retain,
            reduction=settings.reduction,
            mask_padding=settings.mask_padding,
            answers_only=settings.answers_only,
            noise=noise,
            control=control_vectors(seed, settings.steering),
        )
        unit = unit_of(settings.reduction, settings.mask_padding, settings.answers_only)
        spec = dataclasses.replace(settings.loss(part), unit=unit)
        return WindowLoss(
            spec,
            LossContext(representation=context),
            "window_tokens",
            self.compute_loss_context_manager,
            self.mean_over_ranks,
        )

    def _of_forget(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        prepared = self._activations.prepare(batch)
        return self._activations.current(prepared), prepared.reference

    def _of_retain(self, batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        """As for forget, but kept for the pass at the surrogate point, which sees the same batch."""
        if not torch.is_grad_enabled():  # evaluation: nothing follows
            return self._of_forget(batch)
        if id(batch) not in self._prepared:
            self._prepared[id(batch)] = self._activations.prepare(batch)
        prepared = self._prepared[id(batch)]
        return self._activations.current(prepared), prepared.reference

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Losses of paired batches; there is no next-token loss to fall back on."""
        if not any(part in inputs for part in PARTS):
            raise DataError(
                f"An evaluation batch has keys {sorted(map(str, inputs))}, but activations are compared on pairs: give "
                "eval_dataset the form of the training data ({'forget': …, 'retain': …})."
            )
        return super().prediction_step(model, inputs, *args, **kwargs)

    def _reference_bytes(self) -> int:
        whole = self._activations.extra_bytes if isinstance(self._activations, PlainActivations) else 0
        return whole + sum(t.numel() * t.element_size() for t in self._initial.values())

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        if hasattr(self.train_dataset, "window"):  # its order is the alternation
            return SequentialSampler(self.train_dataset)
        return super()._get_train_sampler(*args, **kwargs)

    # -- files ----------------------------------------------------------------------------------

    def check_destination(self, *, overwrite: bool = False) -> None:
        """Raise now for an output folder that the model could not be written to at the end."""
        if self.args.should_save:
            target = Path(self.args.output_dir)
            refuse_held(target, overwrite=overwrite)
            if self._files is not None:
                self._files.check_destination(target)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """The whole model: a copy of the checkpoint with the trained tensors replaced.

        A model that was handed over in memory is saved by its own ``save_pretrained``. Checkpoints hold the trained
        tensors alone.
        """
        if _internal_call:
            super().save_model(output_dir, _internal_call=True)
            return
        if self.args.should_save:
            target = Path(output_dir or self.args.output_dir)
            if self._files is not None:
                self._write_copy(self._files, target)
            else:
                self._write_whole(target)
        self.accelerator.wait_for_everyone()

    def _write_copy(self, files: CheckpointFiles, target: Path) -> None:
        wanted = kept = 0.0
        replaced = {}
        for name, stored in self._stored.items():
            now, before = self._theta[name].detach().float().cpu(), self._initial[name].float().cpu()
            rounded = now.to(stored_dtype(files.entries[stored])).float()
            wanted += float((now - before).double().square().sum())
            kept += float(((rounded - before).double() * (now - before).double()).sum())
            replaced[stored] = now
        files.write_copy(target, replaced)
        share = kept / wanted if wanted > 0.0 else 1.0
        logger.info("%d tensors replaced; %.1f %% of the update survives rounding", len(replaced), 100.0 * share)
        if share < 0.5:
            logger.warning(
                "Only %.0f %% of the trained update survives in the type in which the checkpoint stores weights: the "
                "saved model is closer to the original than the trained one. Train longer or with a higher "
                "learning_rate, or start from a float32 copy of the checkpoint.",
                100.0 * share,
            )

    def _write_whole(self, target: Path) -> None:
        tokenizer = getattr(self, "processing_class", None) or getattr(self, "tokenizer", None)
        model = self.accelerator.unwrap_model(self.model)
        state = {n: t.to(self._given_dtypes.get(n, t.dtype)) for n, t in model.state_dict().items()}
        with staged(target) as stage:
            model.save_pretrained(str(stage), state_dict=state, safe_serialization=True)
            if tokenizer is not None:
                tokenizer.save_pretrained(str(stage))

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self.args.should_save:
            with staged(Path(output_dir or self.args.output_dir)) as stage:
                tensors = {name: p.detach().cpu().contiguous() for name, p in self._theta.items()}
                save_file(tensors, str(stage / THETA_FILE))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        path = Path(resume_from_checkpoint) / THETA_FILE
        if not path.is_file():
            raise ConfigError(f"{resume_from_checkpoint!r} holds no {THETA_FILE}: it is no checkpoint of such a run.")
        saved = load_file(str(path))
        if set(saved) != set(self._theta):
            raise ConfigError(
                f"{path} holds {', '.join(sorted(saved))}, but this run trains {', '.join(sorted(self._theta))}: "
                "resume with the trainable_parameters it was started with."
            )
        with torch.no_grad():
            for name, tensor in saved.items():
                self._theta[name].copy_(tensor)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(self.state.best_model_checkpoint)


class RepresentationTrainer(RepresentationMixin, Trainer):
    """Unlearn by moving a few matrices so that hidden activations change on one corpus and stay on another.

    Example::

        config = RepresentationConfig(output_dir="out", max_steps=150, learning_rate=5e-5)
        trainer = RepresentationTrainer("HuggingFaceH4/zephyr-7b-beta", config, train_dataset=pairs)
        trainer.train()
        trainer.save_model()
    """


def _freeze_rest(model: nn.Module, names: Sequence[str]) -> list[tuple[str, nn.Parameter]]:
    chosen = set(names)
    kept = []
    for name, p in model.named_parameters():
        p.requires_grad_(name in chosen)
        if name in chosen:
            p.data = p.data.float()
            kept.append((name, p))
    return kept
