"""What OpenUnlearning asks of a contributed method (``community/methods/NAME``): a README.md and a run.sh.

Everything is taken from what the runs recorded about themselves. What they did not record stands there as a
visible ``TODO``, for the contributor to fill in.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from importlib.resources import files
from string import Template
from typing import Any

from .. import __version__
from ..errors import ConfigError
from ..evaluation.provenance import HydraRecord, read_record
from ..evaluation.tofu.methods import best_by_agg_mu, check_selectable
from ..evaluation.tofu.results import FORGET_QUALITY
from ..evaluation.tofu.summary import MODEL_UTILITY
from .tofu import Summarised, TofuTable
from .writers.markdown import table as pipe_table

TODO = "**TODO:**"
PAPER = "Retain-Neutral Surrogates for Min–Max Unlearning"
AUTHORS = "Junhao Cai, Dohun Kim, Dowon Kim, Sung Il Choi, Chengjun Jin, Juhyun Park, Changhee Joo"
INSTALL = f"pip install rosu-llm=={__version__}"
RULER = "#" * 100

_ARGUMENTS = """learning_rate num_train_epochs warmup_epochs lr_scheduler_type weight_decay optim
per_device_train_batch_size gradient_accumulation_steps gradient_checkpointing bf16 seed""".split()
_NOT_SEARCHED = ("task_name", "paths.", "hydra.", "model.model_args.pretrained_model_name_or_path", "retain_logs_path")


def contribution(table: TofuTable, name: str) -> dict[str, str]:
    """File name → text, for the method ``name`` among the table's runs."""
    methods = dict.fromkeys(run.method for run in table.runs)
    runs = [run for run in table.runs if len(methods) == 1 or run.method.lower() == name.lower()]
    if not runs:
        raise ConfigError(
            f"--name {name!r} is none of the methods of these runs ({', '.join(methods)}): give one of them, "
            "or runs of one method only."
        )
    at = best_by_agg_mu([name] * len(runs), [run.summary.agg_mu for run in runs])[name]
    check_selectable(name, runs[at].summary.agg_mu)
    return {"README.md": _readme(name, runs, runs[at], table), "run.sh": _script(name, runs, runs[at], table)}


def _readme(name: str, runs: Sequence[Summarised], best: Summarised, table: TofuTable) -> str:
    result, job = best.result, best.result.training
    record, state = (read_record(result.run / file) for file in ("rosu_run.json", "trainer_state.json"))
    ours = job.uses_plugin and (result.trainer or "").startswith("ROSU")
    devices = record["devices"] if isinstance(record.get("devices"), list) else []
    hardware = ", ".join(f"{devices.count(device)} × {device}" for device in dict.fromkeys(devices))
    effort = ""
    if "global_step" in state:
        seconds = [entry["train_runtime"] for entry in state.get("log_history", []) if "train_runtime" in entry]
        time = f" in {seconds[-1]:.0f} s of training" if seconds else ""
        effort = f" {state['global_step']} optimizer steps{time}."
    leaderboard = []  # the two figures of OpenUnlearning's
    for metric in (FORGET_QUALITY, MODEL_UTILITY):
        value = result.figures.get(metric)
        leaderboard.append(f"{metric} {f'{value:.3g}' if value is not None else f'{TODO} not in the results'}")
    known = {
        "todo": TODO,
        "title": PAPER if ours else f"{name} ({TODO} title of the paper)",
        "authors": AUTHORS if ours else f"{TODO} authors",
        "install": f"\nThe trainer comes from the package: `{INSTALL}`.\n" if job.uses_plugin else "",
        "hyperparameters": _hyperparameters(job),
        "search_space": _search_space(runs, best),
        "hardware": f"{hardware}." if hardware else f"{TODO} type and number of GPUs (not recorded).",
        "effort": effort,
        "launcher": f"launched with `{record['launcher']}`."
        if record.get("launcher")
        else f"{TODO} launcher and DeepSpeed configuration (not recorded).",
        "leaderboard": f"For the leaderboard ({result.split or 'split unknown'}): {', '.join(leaderboard)}.",
        "table": pipe_table(table.table, bold=True),
    }
    template = files("rosu_llm.presentation") / "templates" / "contribution.md"
    return Template(template.read_text(encoding="utf-8")).substitute(known)


def _hyperparameters(job: HydraRecord) -> str:
    arguments = job.get("trainer.args")
    if not isinstance(arguments, dict):
        return f"- **Hyperparameters:** {TODO} the run has no .hydra/config.yaml."
    method = job.get("trainer.method_args")
    settings: dict[str, Any] = {f"trainer.args.{key}": arguments[key] for key in _ARGUMENTS if key in arguments}
    settings |= {f"trainer.method_args.{k}": v for k, v in (method if isinstance(method, dict) else {}).items()}
    lines = ["- **Hyperparameters** of the selected run:", "", "  | setting | value |", "  |---|---|"]
    return "\n".join([*lines, *(f"  | `{key}` | {value} |" for key, value in settings.items())])


def _search_space(runs: Sequence[Summarised], best: Summarised) -> str:
    lines = [
        f"- **Search Space:** {len(runs)} run{'s' if len(runs) > 1 else ''}, selected by the highest "
        f"Agg_MU = HM(Mem, Util); no privacy figure was used. Selected: `{best.label}`."
    ]
    typed = [dict(word.split("=", 1) for word in run.result.training.overrides if "=" in word) for run in runs]
    if not all(typed):
        return f"{lines[0]}\n  {TODO} ranges (not every run has a .hydra/overrides.yaml)."
    for key in dict.fromkeys(key for overrides in typed for key in overrides):
        values = dict.fromkeys(overrides.get(key, "default") for overrides in typed)
        if len(values) > 1 and not key.startswith(_NOT_SEARCHED):
            lines.append(f"  - `{key}`: {', '.join(values)}")
    return "\n".join(lines)


def _script(name: str, runs: Sequence[Summarised], best: Summarised, table: TofuTable) -> str:
    lines = ["#!/bin/bash", f"# {name}: run inside an OpenUnlearning checkout.", "set -euo pipefail", ""]
    if best.result.training.uses_plugin:
        lines += [INSTALL, ""]
    if table.references:
        lines += _section("Reference models")
    for model in reversed(table.references):  # the retain model first: the other's evaluation reads its results
        lines += [f"# {model.label}", *_command(model.result.evaluation, "python", "eval", "evaluation"), ""]
    lines += _section("Hyper parameter tuning")
    for run in runs:
        lines += [line for line in _commands(run) if run is not best] or [f"# {run.label}: selected, see below", ""]
    return "\n".join([*lines, *_section("Final best parameters"), *_commands(best)])


def _section(title: str) -> list[str]:
    return [RULER, f" {title} ".center(len(RULER), "#"), RULER, ""]


def _commands(run: Summarised) -> list[str]:
    """The training and the evaluation of one run, as Hydra recorded them."""
    lines = [f"# {run.label}"]
    launcher = read_record(run.result.run / "rosu_run.json").get("launcher")
    if not launcher:
        lines.append("# TODO: the launcher is not recorded; python is one process on one device")
    lines += _command(run.result.training, str(launcher or "python"), "train", "training")
    if run.result.run != run.result.path.absolute().parent and run.result.checkpoint is None:
        lines += _command(run.result.evaluation, "python", "eval", "evaluation")
    return [*lines, ""]


def _command(job: HydraRecord, launcher: str, script: str, what: str) -> list[str]:
    if not job.overrides:
        return [f"# TODO: the command of the {what} is not recorded (no .hydra/overrides.yaml)"]
    words = [f"{launcher} src/{script}.py", *([f"--config-name={job.config_name}"] if job.config_name else [])]
    words += [shlex.quote(word) for word in job.overrides]
    local = [word for word in job.overrides if word.partition("=")[2].startswith(("/", "~"))]
    todo = [f"# TODO: replace the local path in {shlex.quote(word)}" for word in local]
    return [*todo, " \\\n    ".join(words)]
