"""What becomes of each field of ``transformers.TrainingArguments``: it works, is refused, or has no effect.

The one place that knows, for the checks, for the page ``docs/training_arguments.md`` and for resuming. A test walks all
fields of the installed transformers, so that a new one is noticed.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError

logger = logging.getLogger(__name__)

WORKS, REFUSED, NO_EFFECT = "works", "refused", "no effect"


def _given(value: Any) -> bool:
    return bool(value) and str(getattr(value, "value", value)).lower() not in ("no", "none", "false")


@dataclass(frozen=True)
class Support:
    """What becomes of a field.

    Attributes:
        status: ``works``, ``refused`` or ``no effect``.
        note: why, and what to use instead.
        wrong: which values are refused (or are without effect); those that ask for something, unless given.
        decides: the result depends on it, so that a run resumes only with the value it was started with.
    """

    status: str = WORKS
    note: str = ""
    wrong: Callable[[Any], bool] = _given
    decides: bool = False


def _steps_in_backward(value: Any) -> bool:
    name = str(getattr(value, "value", value)).lower()
    return "lomo" in name or "layerwise" in name


def _by_length(value: Any) -> bool:
    return "length" in str(getattr(value, "value", value))


def _names(text: str) -> list[str]:
    return text.split()


_RESULT = Support(decides=True)
_LOSS = "the losses are forget_loss and retain_loss: register one of your own with register_loss"
_PLAIN = "on plain evaluation data as in Trainer; of pairs only losses are computed"
_EVALUATED = "in Python, with an eval_dataset; rosu train has no evaluation data"
_SCRIPTS = "as in Trainer: it is for scripts around it"

#: Field → what becomes of it.
SUPPORT: dict[str, Support] = {
    **{
        name: Support()
        for name in _names(
            "output_dir per_device_train_batch_size num_train_epochs max_steps gradient_accumulation_steps "
            "bf16_full_eval fp16_full_eval gradient_checkpointing gradient_checkpointing_kwargs torch_compile_backend "
            "torch_compile_mode use_cache logging_strategy logging_steps logging_first_step log_on_each_node "
            "logging_nan_inf_filter log_level log_level_replica disable_tqdm report_to run_name project "
            "trackio_space_id trackio_bucket_id trackio_static_space_id "
            "per_device_eval_batch_size save_only_model save_strategy save_steps save_on_each_node save_total_limit "
            "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision "
            "ignore_data_skip "
            "restore_callback_states_from_checkpoint use_cpu dataloader_num_workers dataloader_pin_memory "
            "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order "
            "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_backend ddp_timeout debug "
            "skip_memory_metrics local_rank "
            # of older versions of transformers
            "per_gpu_train_batch_size per_gpu_eval_batch_size logging_dir no_cuda use_mps_device jit_mode_eval "
            "use_ipex fp16_opt_level half_precision_backend fp16_backend tpu_metrics_debug evaluation_strategy "
            "push_to_hub_model_id push_to_hub_organization push_to_hub_token _n_gpu ray_scope"
        )
    },
    **{
        name: _RESULT
        for name in _names(
            "learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps optim_args weight_decay adam_beta1 "
            "adam_beta2 adam_epsilon optim_target_modules max_grad_norm bf16 fp16 tf32 neftune_noise_alpha seed "
            "data_seed full_determinism dataloader_drop_last accelerator_config warmup_ratio adafactor"
        )
    },
    "optim": Support(
        WORKS, "without LOMO and layer-wise optimizers, which step inside each of the passes", _steps_in_backward, True
    ),
    "train_sampling_strategy": Support(WORKS, "random or sequential; pairs have no single length", _by_length, True),
    "group_by_length": Support(REFUSED, "pairs have no single length"),
    "length_column_name": Support(NO_EFFECT, "nothing is grouped by length", lambda value: value != "length"),
    "dataloader_persistent_workers": Support(WORKS, "with this package's data sets, whose workers learn the epoch"),
    "enable_jit_checkpoint": Support(
        WORKS, "by this package's own handling of SIGTERM and SIGUSR1, which rosu train has anyway"
    ),
    "resume_from_checkpoint": Support(WORKS, "true, a folder, or auto: the newest checkpoint if there is one"),
    **{
        name: Support(WORKS, _EVALUATED)
        for name in _names("eval_strategy eval_on_start eval_steps eval_delay metric_for_best_model greater_is_better")
    },
    "load_best_model_at_end": Support(WORKS, f"{_EVALUATED}; not beside budget or keep_best"),
    "torch_compile": Support(WORKS, "weights as without it, to rounding; not with jacobian exact, no_a1 or no_a2"),
    "torchdynamo": Support(WORKS, "not with jacobian exact, no_a1 or no_a2"),
    "use_liger_kernel": Support(
        WORKS, "its norms and layers, not its fused loss; not with jacobian exact, no_a1, no_a2"
    ),
    "liger_kernel_config": Support(WORKS, "as use_liger_kernel"),
    "fsdp": Support(WORKS, "version 2"),
    "fsdp_config": Support(WORKS, "version 2"),
    "fsdp_min_num_params": Support(REFUSED, "FSDP version 2 has no such setting"),
    "fsdp_transformer_layer_cls_to_wrap": Support(WORKS, "version 2"),
    "deepspeed": Support(WORKS, "ZeRO-1, 2 and 3, without offloading"),
    **{
        name: Support(WORKS, _PLAIN)
        for name in _names(
            "prediction_loss_only eval_do_concat_batches eval_use_gather_object eval_accumulation_steps "
            "include_for_metrics include_inputs_for_metrics batch_eval_metrics label_names past_index "
            "use_legacy_prediction_loop"
        )
    },
    "label_smoothing_factor": Support(REFUSED, _LOSS),
    "remove_unused_columns": Support(REFUSED, "batches are nested under forget and retain, and nothing would be left"),
    "auto_find_batch_size": Support(
        REFUSED,
        "a smaller batch is another window, and so another run: lower per_device_train_batch_size yourself and "
        "raise gradient_accumulation_steps",
    ),
    "include_num_input_tokens_seen": Support(REFUSED, "batches are nested, and Trainer would count nothing"),
    "include_tokens_per_second": Support(REFUSED, "batches are nested, and Trainer would count nothing"),
    "parallelism_config": Support(REFUSED, "tensors and sequences are not split: use DDP, FSDP2 or ZeRO"),
    "mp_parameters": Support(REFUSED, "SageMaker's model parallelism is not supported: use DDP, FSDP2 or ZeRO"),
    "tpu_num_cores": Support(REFUSED, "TPUs are not supported"),
    "ddp_static_graph": Support(REFUSED, "the passes of one step are not one static graph"),
    "save_safetensors": Support(
        REFUSED, "weights are written as safetensors only: leave it true", lambda value: value is False
    ),
    "dispatch_batches": Support(REFUSED, "every process reads its own batches: leave it out"),
    "split_batches": Support(REFUSED, "every process reads its own batches: leave it out"),
    "average_tokens_across_devices": Support(
        NO_EFFECT, "windows are counted over all devices anyway", lambda value: value is False
    ),
    "torch_empty_cache_steps": Support(NO_EFFECT, "the step keeps its buffers from step to step"),
    **{name: Support(NO_EFFECT, _SCRIPTS, lambda _: False) for name in _names("do_train do_eval do_predict")},
    "overwrite_output_dir": Support(NO_EFFECT, "rosu train has overwrite"),
}


#: Fields that hold named values; transformers takes text, too, and stumbles over it later.
_MAPPINGS = ("lr_scheduler_kwargs", "gradient_checkpointing_kwargs", "liger_kernel_config")


def check_seed(name: str, value: Any) -> None:
    """Raise for a number that is no seed to numpy."""
    if value is not None and not 0 <= value < 2**32:
        raise ConfigError(f"{name}={value} is no seed: give 0 to 4294967295.")


def check_training_arguments(args: Any) -> None:
    """Raise for the first field that is refused as it is given; say which ones do nothing."""
    for name in _MAPPINGS:
        value = getattr(args, name, None)
        if value and not isinstance(value, Mapping):
            raise ConfigError(f"{name}={value!r} holds no named values: write e.g. --{name} '{{\"key\": 1}}'.")
    for name in ("seed", "data_seed"):
        check_seed(name, getattr(args, name, None))
    for field in dataclasses.fields(args) if dataclasses.is_dataclass(args) else ():
        support, value = SUPPORT.get(field.name), getattr(args, field.name, None)
        if support is None or not support.note or not support.wrong(value):
            continue
        if support.status == NO_EFFECT:
            logger.warning("%s=%r has no effect: %s.", field.name, value, support.note)
        elif support.status == REFUSED or support.wrong is not _given:
            raise ConfigError(f"{field.name}={getattr(value, 'value', value)!r} is not supported: {support.note}.")


def deciding() -> list[str]:
    """The fields on which the result depends."""
    return [name for name, support in SUPPORT.items() if support.decides]


def as_table() -> str:
    """The table of the page, in markdown."""
    rows = [f"| `{name}` | {support.status} | {support.note} |" for name, support in sorted(SUPPORT.items())]
    return "\n".join(["| field | | |", "|---|---|---|", *rows])
