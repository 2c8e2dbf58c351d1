"""The kinds of runs, each as one process sees it: what it computes, and what the device did meanwhile."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import json
import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState
from safetensors.torch import save_file

from rosu_llm import ForgetRetainDataset, ROSUConfig, ROSUTrainer, WithAlternates, measure_coupling
from rosu_llm.geometry import F, R
from rosu_llm.space import LocalSpace
from rosu_llm.step.engine import StepEngine
from tests.accelerator import device
from tests.accelerator.recorder import KINDS, Events, record
from tests.accelerator.selfcheck import allowed, counted, refused
from tests.distributed.trainer_worker import export_fsdp, trained_weights, zero_settings
from tests.models import samples, tiny_decoder, tiny_llama
from tests.representation.running import build

if importlib.util.find_spec("deepspeed") is not None:
    import deepspeed  # noqa: F401
if importlib.util.find_spec("peft") is not None:
    import peft

torch.set_num_threads(1)

STEPS = 3


def run(case: dict[str, Any], folder: Path) -> None:
    """One case in this process, whatever ran in it before."""
    AcceleratorState._reset_state(reset_partial_state=True)
    kinds = {"checks": checks, "hard": hard, "train": train, "represent": represent}
    kinds |= {"diagnosis": diagnosis, "memorisation": memorisation, "tofu": tofu}
    options = dict(case)
    kinds[options.pop("kind")](options, folder)


class Watch(transformers.TrainerCallback):  # type: ignore[misc]
    """What the device did in one step of a training, by default the last; the first ones also set things up."""

    def __init__(self, step: int = 0) -> None:
        self._at = step - 1
        self._events = Events("")
        self._ends: list[Events] = []

    def over(self, trainer: Any, *, quiet: bool) -> None:
        """Train, watched unless ``quiet``."""
        if quiet:
            trainer.train()
            return
        trainer.add_callback(self)
        with record() as self._events:
            trainer.train()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._ends.append(copy.deepcopy(self._events))

    def report(self) -> dict[str, Any]:
        if not self._ends:
            return {}
        step = self._ends[self._at].since(self._ends[self._at - 1])
        found = {kind: {"count": step.total(kind), "own": step.total(kind, own=True)} for kind in KINDS}
        for kind, counts in found.items():
            counts |= {"bytes": step.volume(kind), "own bytes": step.volume(kind, own=True)}
        return {"step": found, "sites": {kind: step.rows(kind) for kind in KINDS}}


def write(folder: Path, weights: dict[str, torch.Tensor], **found: Any) -> None:
    """What the first rank leaves for the tests."""
    if int(os.environ.get("RANK", "0")) == 0:
        save_file({name: value.detach().cpu().contiguous() for name, value in weights.items()}, folder / "weights")
        (folder / "found.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.barrier()


def faulty(fault: str | None, where: str | None, trainer: Any) -> contextlib.AbstractContextManager[Any]:
    """The second rank meets a fault when the given pass of the second step begins."""
    passed = StepEngine._pass

    def hindered(engine: Any, name: str, closures: Any) -> float:
        if name == where and trainer.state.global_step == 1:
            if fault == "oom":
                device.limit(1000)
            elif fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                time.sleep(1.0)
        return passed(engine, name, closures)

    if fault is None or os.environ.get("RANK") != "1":
        return contextlib.nullcontext()
    return mock.patch.object(StepEngine, "_pass", hindered)


def arguments(case: dict[str, Any], folder: Path, world: int) -> dict[str, Any]:
    """The training arguments that a case leaves open."""
    layout = case.pop("layout", "local")
    if layout == "fsdp2":
        export_fsdp(None)
    zero = {"deepspeed": zero_settings(layout)} if layout.startswith("zero") else {}
    return {
        "output_dir": str(folder / "run"),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2 // world,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.5,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": case.pop("on") == "cpu",
        **zero,
    }


def train(case: dict[str, Any], folder: Path) -> None:
    """ROSUTrainer over a window of four samples of each part, however many processes share it."""
    world = case.pop("world", 1)
    options = {name: case.pop(name, None) for name in ("fault", "where", "lora", "evaluate", "dropout", "watched")}
    config = ROSUConfig(**{**arguments(case, folder, world), **case})
    adapter = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM") if options["lora"] else None
    forget: Any = samples(16, seed=1)
    if config.loss("forget").alternative != "none":
        forget = WithAlternates(forget, [[other] for other in samples(16, seed=7)])
    trainer = ROSUTrainer(
        tiny_llama(dropout=options["dropout"] or 0.0),
        config,
        train_dataset=ForgetRetainDataset(forget, samples(20, seed=2), mismatch=config.method == "llmu"),
        eval_dataset=ForgetRetainDataset(samples(4, seed=4), samples(4, seed=5)) if options["evaluate"] else None,
        holdout_dataset=samples(5, seed=3),
        budget_dataset=samples(4, seed=6),
        base_model=tiny_llama(seed=1),
        peft_config=adapter,
    )
    if trainer.accelerator.num_processes != world:
        raise SystemExit(f"accelerate sees {trainer.accelerator.num_processes} processes instead of {world}")
    start = {f"start.{name}": value for name, value in trained_weights(trainer.model).items()}
    forwards = []
    trainer.model.register_forward_pre_hook(lambda *_: forwards.append(1))
    watch = Watch(options["watched"] or 0)
    with faulty(options["fault"], options["where"], trainer):
        watch.over(trainer, quiet=config.use_cpu or options["fault"] is not None)
    weights = trained_weights(trainer.model)
    kinds = sorted({value.device.type for value in weights.values()})
    logs = [{k: v for k, v in entry.items() if "/" in k} for entry in trainer.state.log_history]
    found = {"layout": trainer.layout, "devices": kinds, "logs": logs, "forwards": len(forwards)}
    write(folder, {**start, **weights}, **found, **watch.report())


def represent(case: dict[str, Any], folder: Path) -> None:
    """RepresentationTrainer."""
    on_cpu = case.pop("on") == "cpu"
    settings = {"max_steps": STEPS, "optim": "adamw_torch_fused", "amplify": "auto", **case}
    trainer = build(tiny_decoder(), folder, use_cpu=on_cpu, **settings)
    start, watch = trainer.theta(), Watch()
    watch.over(trainer, quiet=on_cpu)
    devices = sorted({p.device.type for p in trainer._theta.values()})
    write(folder, {"start.theta": start, "theta": trainer.theta()}, devices=devices, **watch.report())


def diagnosis(case: dict[str, Any], folder: Path) -> None:
    """`measure_coupling` of a model that is on the device."""
    model = tiny_llama().to(case["on"])
    plan: dict[str, Any] = {"pairs": 2, "forget_batch_size": 3, "retain_batch_size": 4, "micro_batch_size": 2}
    found = measure_coupling(
        model, samples(6, seed=1), samples(8, seed=2), **plan, rhos=(0.2, 0.8), points=0, progress=False
    )
    write(folder, {}, numbers=found.document, devices=[next(model.parameters()).device.type])


def memorisation(case: dict[str, Any], folder: Path) -> None:
    """Losses and matches of a model that is on the device."""
    from rosu_llm.evaluation.memorisation import membership_auc, score

    model = tiny_llama().to(case["on"])
    members, others = score(model, samples(11, seed=9)), score(model, samples(7, seed=8))
    numbers = {"nll": members.nll.tolist(), "match": members.match.tolist()}
    numbers["auc"] = [membership_auc(members.nll, others.nll)]
    write(folder, {}, numbers=numbers, devices=[next(model.parameters()).device.type])


def tofu(case: dict[str, Any], folder: Path) -> None:
    """All metrics of TOFU, generation among them."""
    from rosu_llm import evaluate_tofu
    from tests.evaluation.tofu_world import World

    world = World(folder)
    model = world.model().to(case["on"])
    numbers = evaluate_tofu(model, world.tokenizer, world.settings, folder / "evals")
    write(folder, {}, numbers=numbers, devices=[next(model.parameters()).device.type])


def checks(case: dict[str, Any], folder: Path) -> None:
    """What the device itself does, refuses and counts."""
    write(folder, {}, refused=refused(), allowed=allowed(), counted=counted())


def hard(case: dict[str, Any], folder: Path) -> None:
    """‖q‖ of gradients on the device that nearly coincide, over that in float64; what they cost in float64."""
    found: dict[str, Any] = {}
    for cosine in (0.3, 0.99, 0.9999, 0.999999):
        generator = torch.Generator().manual_seed(0)
        # entries over six orders of magnitude, so that a few products make up most of a sum
        forget = torch.randn(1 << 18, generator=generator) * torch.randn(1 << 18, generator=generator).mul(3).exp()
        other = torch.randn(1 << 18, generator=generator) * forget
        other *= (1.0 / cosine**2 - 1.0) ** 0.5 * forget.norm() / other.norm()
        retain = forget + other
        weights = torch.nn.Parameter(torch.zeros(1 << 18, device=device.NAME))
        space = LocalSpace([weights])
        space.begin()
        for name, gradient in (("f", forget), ("r", retain)):
            space.backward((weights * gradient.to(device.NAME)).sum())
            space.capture(name)
        with record() as events:
            gram = space.gram(["f", "r"])
        q = F - gram(F, R) / gram(R, R) * R
        f, r = forget.double(), retain.double()
        truth = f - (f @ r) / (r @ r) * r
        found[str(cosine)] = {
            "norm": gram.norm(q) / float(truth.norm()),
            "float64": events.volume("float64") / (8 * weights.numel()),
            "cosine": float(f @ r / f.norm() / r.norm()),
        }
    write(folder, {}, numbers=found)
