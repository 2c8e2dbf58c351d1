"""``python -m rosu_llm.openunlearning tofu …``: references → training → evaluation → table, in a checkout.

Every step is one of OpenUnlearning's own commands (``--dry-run`` prints them); what is finished is not repeated.
Settings are searched on a grid, and selected by Agg_MU only.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..compat import accelerator_kind, device_name
from ..errors import ConfigError, unknown
from ..evaluation.provenance import read_record
from ..evaluation.tofu.summary import auc_transform
from ..files import write_json
from .baselines import WITH_IDK, TofuMethod, check_files, tofu_method
from .offline import MODEL, alternates, write_offline

#: "Sensitivity to ρ on TOFU" has these radii. The paper says that η is searched but not where: these are
#: OpenUnlearning's default and its neighbours.
RHOS, RATES = ("0.20", "0.25", "0.30", "0.35", "0.40", "0.45", "0.50"), ("1e-5", "2e-5", "5e-5")
SPLITS = ("forget01", "forget05", "forget10")
DEVICE = "model.model_args.attn_implementation=sdpa model.model_args.torch_dtype=float32".split()
CPU_ARGUMENTS = ("warmup_epochs=0", "optim=adamw_torch", "bf16=false", "bf16_full_eval=false")
CPU_TRAIN = [*DEVICE, *(f"trainer.args.{word}" for word in CPU_ARGUMENTS), "++trainer.args.use_cpu=true"]
CPU_EVAL = [*DEVICE, "model.model_args.device_map=cpu", "eval.tofu.fluency_device=cpu"]
_UTILITY = "model_utility.pre_compute."
_GENERATED = ("forget_Q_A_ROUGE", *(f"{_UTILITY}{name}_Q_A_ROUGE" for name in ("retain", "ra", "wf")))
SMOKE_EVAL = [f"eval.tofu.metrics.{name}.generation_args.max_new_tokens=8" for name in _GENERATED]
SMOKE_ARGUMENTS = ("num_train_epochs=2", "per_device_train_batch_size=4", "gradient_accumulation_steps=1")
TRAINED, EVALUATED = ".trained", ".evaluated"


@dataclass(frozen=True)
class Run:
    """One training with its evaluation."""

    label: str
    name: str
    train: list[str]
    evaluate: list[str]

    @property
    def folder(self) -> Path:
        """Where OpenUnlearning puts the model; its results go to ``evals`` inside."""
        return Path("saves/unlearn") / self.name


@dataclass(frozen=True)
class TofuSearch:
    """What is run, as OpenUnlearning's commands."""

    checkout: Path
    methods: Mapping[str, TofuMethod]
    rhos: Sequence[str]
    rates: Sequence[str]
    model: str = MODEL
    split: str = "forget10"
    launcher: tuple[str, ...] = (sys.executable,)
    train: Sequence[str] = ()
    evaluate: Sequence[str] = ()
    transform: str = "range"

    @property
    def _portion(self) -> str:
        return self.split.removeprefix("forget")

    @property
    def retain(self) -> str:
        """The retain split."""
        return f"retain{100 - int(self._portion):02d}"

    @property
    def _suffix(self) -> str:
        """Questions that training looked at are set aside for all models of a table or for none."""
        return "_recommended" if any(method.held_out for method in self.methods.values()) else ""

    def reference(self, name: str) -> Path:
        """Where the evaluation of the model ``full`` or ``retain90`` goes."""
        return Path(f"saves/eval/tofu_{self.model}_{name}/evals_{self.split}{self._suffix}")

    def _evaluation(self, experiment: str, *words: str) -> list[str]:
        data = (f"model={self.model}", f"forget_split={self.split}", f"holdout_split=holdout{self._portion}")
        script = str(self.checkout / "src" / "eval.py")
        return [
            sys.executable,
            script,
            f"experiment=eval/tofu/{experiment}{self._suffix}",
            *words,
            *data,
            *self.evaluate,
        ]

    def reference_command(self, name: str) -> list[str]:
        """The evaluation of a reference model."""
        return self._evaluation("rosu_reference", f"reference={name}")

    def runs(self) -> Iterator[Run]:
        """Every method at every rate and, where it has one, radius."""
        for name, method in self.methods.items():
            for rate in self.rates:
                for rho in self.rhos if method.has_radius else (None,):
                    yield self._run(name, method, rate, rho)

    def _run(self, name: str, method: TofuMethod, rate: str, rho: str | None) -> Run:
        setting = f"lr{rate}" if rho is None else f"rho{rho}_lr{rate}"
        task = f"tofu_{self.model}_{self.split}_{name}_{setting}"
        words = [f"experiment={method.experiment}"]
        words += [f"trainer={method.trainer}"] if method.trainer else []
        words += [f"task_name={task}", f"model={self.model}"]
        words += [f"model.model_args.pretrained_model_name_or_path=open-unlearning/tofu_{self.model}_full"]
        words += [f"forget_split={self.split}", f"retain_split={self.retain}"]
        words += [] if method.experiment == WITH_IDK else [f"holdout_split=holdout{self._portion}"]
        words += [f"trainer.args.{word}" for word in ("eval_strategy=no", "eval_on_start=false", "do_eval=false")]
        words += [f"trainer.args.learning_rate={rate}"]
        words += [] if rho is None else [f"trainer.method_args.rho={rho}"]
        file = str(alternates(self.model, self.split))
        words += [word.replace("{alternates}", file) for word in method.overrides]
        script = str(self.checkout / "src" / "train.py")
        train = [*self.launcher, script, "--config-name=unlearn.yaml", *words, *self.train]
        more = (f"task_name={task}", f"retain_split={self.retain}", f"eval.tofu.auc_transform={self.transform}")
        return Run(f"{name} {setting}".replace("_", " "), task, train, self._evaluation("rosu", *more))

    def table_command(self, *words: str) -> list[str]:
        """The table of all runs."""
        references = ("--retain", str(self.reference(self.retain)), "--target", str(self.reference("full")))
        return [sys.executable, "-m", "rosu_llm", "table", *references, "--auc-transform", self.transform, *words]


@dataclass
class _Progress:
    """Runs commands in a folder, one line for each; their output goes to ``saves/logs``."""

    work: Path
    environment: Mapping[str, str]
    failed: list[str] = field(default_factory=list)

    def call(self, command: Sequence[str], log: str) -> bool:
        file = self.work / "saves" / "logs" / f"{log}.log"
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as out:
            out.write(f"$ {shlex.join(command)}\n")
            out.flush()
            done = subprocess.run(
                command, cwd=self.work, env=dict(self.environment), stdout=out, stderr=out, check=False
            )
        if done.returncode != 0:
            self.failed.append(f"{log} (see {file})")
        return done.returncode == 0

    def evaluate(self, command: Sequence[str], folder: Path, log: str) -> bool:
        """Unless it is finished; OpenUnlearning continues from what is in its file, if that is whole."""
        place = self.work / folder
        if self.finished(place / EVALUATED, command):
            return True
        try:
            json.loads((place / "TOFU_EVAL.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            (place / "TOFU_EVAL.json").unlink(missing_ok=True)
        if not self.call(command, log):
            return False
        write_json(place / EVALUATED, {"command": list(command)})
        return True

    @staticmethod
    def finished(marker: Path, command: Sequence[str]) -> bool:
        """Whether this very command made what is there; raises if another one did."""
        if not marker.is_file():
            return False
        before = read_record(marker).get("command", [])
        if changed := sorted({*before} ^ {*command}):
            raise ConfigError(
                f"{marker.parent} was made by another command (differing: {' '.join(changed)}): delete that folder to "
                "make it again, or use another --work."
            )
        return True

    def train(self, run: Run) -> bool:
        marker = self.work / run.folder / TRAINED
        if self.finished(marker, run.train):
            return True
        if not self.call(run.train, run.name):
            return False
        words = run.train[: run.train.index("--config-name=unlearn.yaml") - 1]
        launcher = "python" if words == [sys.executable] else shlex.join(words)
        write_json(self.work / run.folder / "rosu_run.json", {"launcher": launcher, "devices": _devices()})
        write_json(marker, {"command": run.train})
        return True


def _devices() -> list[str]:
    import torch

    kind = accelerator_kind()
    if kind is None:
        return ["CPU"]
    return [device_name(kind, at) for at in range(getattr(torch, kind).device_count())]


def _scores(folder: Path) -> str:
    """Those that may be looked at while searching."""
    found = read_record(folder / "TOFU_SUMMARY.json")
    return ", ".join(f"{k} {found[k]:.3f}" if k in found else f"{k} missing" for k in ("Agg_MU", "Mem", "Util"))


def search(plan: TofuSearch, work: Path, environment: Mapping[str, str], *, drop_models: bool = False) -> int:
    """Run everything that is not finished and print the tables; returns the exit code."""
    progress = _Progress(work, environment)
    for name in (plan.retain, "full"):
        folder, command = plan.reference(name), plan.reference_command(name)
        if not progress.evaluate(command, folder, f"{folder.parent.name}_{folder.name}"):
            print(f"reference {name}: evaluation FAILED: {progress.failed[0]}", file=sys.stderr)
            return 1
        print(f"reference {name}: evaluated", flush=True)
    runs, whole = list(plan.runs()), []
    for at, run in enumerate(runs, 1):
        began = time.monotonic()
        before = (work / run.folder / "evals" / EVALUATED).is_file()
        line = f"[{at}/{len(runs)}] {run.label}:"
        if not progress.train(run):
            print(f"{line} training FAILED: {progress.failed[-1]}", flush=True)
        elif not progress.evaluate(run.evaluate, run.folder / "evals", run.name):
            print(f"{line} evaluation FAILED: {progress.failed[-1]}", flush=True)
        else:
            whole.append(str(run.folder))
            spent = "finished before" if before else f"done in {time.monotonic() - began:.0f} s"
            print(f"{line} {spent}, {_scores(work / run.folder / 'evals')}", flush=True)
            if drop_models:
                for file in (work / run.folder).glob("*.safetensors"):
                    file.unlink()
    stem = f"saves/tofu_{plan.model}_{plan.split}"
    for flags in (["--out", f"{stem}.md"], ["--best", "--out", f"{stem}_selected.md"]) if whole else ():
        print(flush=True)
        subprocess.run(plan.table_command(*whole, *flags), cwd=work, env=dict(environment), check=True)
    for failure in progress.failed:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if progress.failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rosu_llm.openunlearning tofu",
        description="References, training, evaluation and the paper's table on TOFU, in an OpenUnlearning checkout.",
        epilog="Stop it whenever you like and start it again: what is finished is not repeated.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--methods", nargs="+", default=["ROSU"], metavar="NAME", help="rows of the table (default ROSU), or trainers")
    add("--rhos", nargs="+", metavar="RHO", help=f"radii of methods that have one (default {' '.join(RHOS)})")
    add("--lrs", nargs="+", metavar="LR", help=f"learning rates (default {' '.join(RATES)})")
    add("--model", default=MODEL, metavar="NAME", help=f"OpenUnlearning's model configuration (default {MODEL})")
    add("--forget-split", default="forget10", metavar="NAME", help="forget01, forget05 or forget10 (default)")
    add("--launcher", metavar="COMMAND", help="for training, such as 'accelerate launch --config_file FILE'")
    add("--train", default="", metavar="OVERRIDES", help="more Hydra overrides for every training")
    add("--eval", default="", metavar="OVERRIDES", help="more Hydra overrides for every evaluation")
    add("--cpu", action="store_true", help="the overrides that a machine without GPU needs")
    add("--auc-transform", default="range", metavar="NAME", help="range (default), privleak or span")
    add("--work", type=Path, metavar="DIR", help="where saves/ goes (default: here)")
    add("--drop-models", action="store_true", help="delete a run's weights once it is evaluated")
    add("--dry-run", action="store_true", help="print the commands instead of running them")
    add("--smoke", action="store_true", help="a few rows and a tiny model on a CPU, offline; figures mean nothing")
    add("--data", type=Path, metavar="DIR", help="TOFU's JSON-lines files, for --smoke (default $ROSU_DATA/tofu)")
    return parser


def main(argv: Sequence[str], checkout: Path) -> int:
    """Parse, check everything, run."""
    options = _parser().parse_args(argv)
    if options.forget_split not in SPLITS:
        raise unknown("forget split", options.forget_split, SPLITS)
    auc_transform(options.auc_transform)
    work = options.work or (Path("saves") / "smoke" if options.smoke else Path())
    methods = {name: tofu_method(name, checkout) for name in options.methods}
    cpu = options.cpu or options.smoke
    train, evaluate = (CPU_TRAIN, CPU_EVAL) if cpu else ([], [])
    if options.smoke:
        train, evaluate = [*train, *(f"trainer.args.{word}" for word in SMOKE_ARGUMENTS)], [*evaluate, *SMOKE_EVAL]
    plan = TofuSearch(
        Path() if work == Path() else checkout,
        methods,
        options.rhos or (("0.2", "0.4") if options.smoke else RHOS),
        options.lrs or (("1e-3",) if options.smoke else RATES),
        options.model,
        options.forget_split,
        tuple(shlex.split(options.launcher)) if options.launcher else (sys.executable,),
        [*train, *shlex.split(options.train)],
        [*evaluate, *shlex.split(options.eval)],
        options.auc_transform,
    )
    if options.dry_run:
        commands = [plan.reference_command(name) for name in (plan.retain, "full")]
        commands += [command for run in plan.runs() for command in (run.train, run.evaluate)]
        folders = [str(run.folder) for run in plan.runs()]
        commands.append(plan.table_command(*folders, "--best"))
        print("\n".join(shlex.join(["python" if word == sys.executable else word for word in c]) for c in commands))
        return 0
    environment = dict(os.environ)
    if options.smoke:
        data = options.data or Path(os.environ.get("ROSU_DATA", "data")) / "tofu"
        write_offline(data, work, options.forget_split)
        environment |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        environment["HF_DATASETS_CACHE"] = str((work / ".cache").absolute())
    check_files(methods, work, plan.model, plan.split)
    return search(plan, work, environment, drop_models=options.drop_models)
