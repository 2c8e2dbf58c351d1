"""Toy models, toy data and invented results: what every ``--smoke`` runs on, in seconds, with nothing downloaded."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from .compat import accelerator_kind
from .experiments.demo.world import SMOKE, World, build_world, small_llama
from .recipes.settings import WITHOUT_OUTPUT, Recipe, build
from .representation.config import RepresentationConfig

if TYPE_CHECKING:
    from .analysis.coupling.diagnosis import Diagnosis
    from .data.people import Item
    from .evaluation.muse.run import MuseRequest
    from .evaluation.tofu.results import Result
    from .evaluation.tofu.run import TofuRequest
    from .evaluation.wmdp.run import WmdpRequest
    from .experiments.sequence.requests import ForgetRequest
    from .experiments.sequence.run import SequenceDocument
    from .training.trainer import ROSUMixin

# -- world and checkpoint ---------------------------------------------------------------------------------------------


def toy_world(seed: int = 0) -> World:
    """A few invented people and a tokenizer of their words."""
    return build_world(seed, people=SMOKE.people)


def save_model(folder: Path, world: World, seed: int = 0, layers: int = SMOKE.layers) -> str:
    """Write a random model and the world's tokenizer into ``folder``; returns it as text."""
    from safetensors.torch import save_file

    model = small_llama(len(world.tokenizer), seed, hidden=SMOKE.hidden, layers=layers)
    model.config.save_pretrained(folder)
    # Not model.save_pretrained: of several processes it writes on the first alone, and each has a folder of its own.
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    world.tokenizer.save_pretrained(folder)
    return str(folder)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """A JSON-lines file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


# -- recipes ----------------------------------------------------------------------------------------------------------

#: What a toy run replaces in a recipe; every other setting stays. The progress bar stays, too.
TOY_SETTINGS: dict[str, Any] = {
    **{name: value for name, value in WITHOUT_OUTPUT.items() if name != "disable_tqdm"},
    "max_steps": 2,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "dataloader_num_workers": 0,
    "dataloader_prefetch_factor": None,
    "dataloader_persistent_workers": False,
    "bf16": False,
    "gradient_checkpointing": False,
}


def toy_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """What a toy run replaces; it runs where the real one would, so that devices and their collectives are tried."""
    # On a toy of random weights forget and retain information hardly differ: α = 10 would select nothing.
    own: dict[str, Any] = {"ssd_alpha": 1.0} if values.get("method") == "ssd" else {}
    if values.get("method") == "scrub":  # which forgets in its second epoch
        own = {"max_steps": -1, "num_train_epochs": 2}
    return {**TOY_SETTINGS, **own, "use_cpu": values.get("use_cpu", accelerator_kind() is None)}


#: How the tokenizer of a toy checkpoint joins a conversation, for recipes whose chat format has a template.
_CHAT_TEMPLATE = "{% for turn in messages %}{{ turn['content'] + ' ' }}{% endfor %}"


def toy_values(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The recipe with a toy checkpoint and toy data, which are written below ``folder``, in place of its own."""
    recipe = build({**values, **toy_settings(values), **WITHOUT_OUTPUT})
    arguments, config = recipe
    layers = config.target_layer + 2 if isinstance(config, RepresentationConfig) else SMOKE.layers
    if not recipe.representation_level and config.trainable_parameters is not None:
        layers = 9  # as many as the published recipes name, and one above
    toys = folder / f"toy-{layers}-layers"
    if not toys.is_dir():
        partial = toys.with_name(f"{toys.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        world = toy_world()
        world.tokenizer.chat_template = _CHAT_TEMPLATE
        save_model(partial / "model", world, layers=layers)
        for split in ("forget", "retain", "holdout"):
            people = world.corpus.items[split]
            write_rows(
                partial / f"{split}.jsonl",
                (
                    {
                        "question": item.question,
                        "answer": item.answer,
                        "text": item.answer,
                        "alternates": list(item.perturbed_answers),
                    }
                    for item in people
                ),
            )
        os.replace(partial, toys)
    corpora = len(arguments.forget_data) if isinstance(arguments.forget_data, list) else 0
    forget, third = str(toys / "forget.jsonl"), config.loss("forget").alternative == "alternates"
    return {
        **values,
        **toy_settings(values),
        "model_name_or_path": str(toys / "model"),
        "forget_data": [forget] * corpora or forget,
        "retain_data": str(toys / "retain.jsonl"),
        "holdout_data": None if recipe.representation_level else str(toys / "holdout.jsonl"),
        "budget_data": str(toys / "holdout.jsonl") if arguments.budget_data else None,
        "base_model": str(toys / "model") if arguments.base_model else None,
        "memory_file": None,
        "alternates_key": None,
        "alternates": forget if arguments.alternates or (arguments.alternates_key and third) else None,
        "refusals": None,
        "question_key": "question",
        "answer_key": "answer",
        "text_key": "text",
        "min_length": 0,
        "dtype": "float32",
        "attn_implementation": None,
    }


def train_toy(values: Mapping[str, Any]) -> ROSUMixin:
    """Train two steps of a recipe on a toy, or two epochs where the second one forgets.

    The toy model goes to a folder ``smoke`` inside ``output_dir``, where it can overwrite nothing real. Its record
    names the recipe's own model and data.
    """
    from .recipes.prepare import load
    from .recipes.run import train
    from .recipes.settings import parts_needed

    arguments, config = build({**values, **toy_settings(values)})
    config.output_dir = str(Path(config.output_dir) / "smoke")
    with TemporaryDirectory() as folder:
        toy = toy_values({**values, "output_dir": config.output_dir}, Path(folder))
        if not arguments.forget_data and "forget" not in parts_needed(config):
            toy["forget_data"] = None
        loaded = load(build(toy))
        own = {name: toy[name] for name in ("base_model", "memory_file", "dtype", "attn_implementation")}
        small = replace(arguments, overwrite=True, **own)
        return train(Recipe(small, config), loaded)


def sequence_toy(values: Mapping[str, Any], requests: Sequence[ForgetRequest]) -> SequenceDocument:
    """The requests on a toy, whose people are divided among them; results go to ``smoke`` in ``output_dir``."""
    from .experiments.sequence.run import FILE, run_sequence

    out = Path(str(values.get("output_dir") or "outputs")) / "smoke"
    (out / FILE).unlink(missing_ok=True)  # of an earlier toy
    with TemporaryDirectory() as folder:
        toy = toy_values({**values, "output_dir": str(out)}, Path(folder))
        rows = [json.loads(line) for line in Path(toy["forget_data"]).read_text(encoding="utf-8").splitlines()]
        own = []
        for at, request in enumerate(requests):
            path = Path(folder) / f"request-{at}.jsonl"
            write_rows(path, rows[at :: len(requests)] or rows)
            own.append(replace(request, forget_data=str(path)))
        return run_sequence({**toy, "chat_format": None}, own)


#: What a toy's diagnosis measures.
_TOY_PLAN = {"pairs": 2, "forget_batch_size": 2, "retain_batch_size": 2, "points": 0}


def diagnose_toy(values: Mapping[str, Any], asked: Mapping[str, Any], out: Path | None) -> tuple[Diagnosis, Recipe]:
    """The diagnosis of a toy, and the recipe that was measured; without ``out`` in ``smoke`` inside ``output_dir``."""
    from .analysis.coupling.recipe import diagnose, diagnosis_recipe
    from .recipes.prepare import Loaded

    recipe = diagnosis_recipe({**values, **toy_settings(values)}, out)
    arguments, config = recipe
    if out is None:
        config.output_dir = str(Path(config.output_dir) / "smoke")
    asked = {**asked, **_TOY_PLAN}
    if recipe.representation_level:  # reads its model from a checkpoint
        with TemporaryDirectory() as folder:
            recipe = diagnosis_recipe(toy_values(values, Path(folder)), Path(config.output_dir))
            return diagnose(recipe, asked), recipe
    world = toy_world(config.seed)
    model = small_llama(len(world.tokenizer), config.seed, hidden=SMOKE.hidden, layers=SMOKE.layers)
    recipe = Recipe(replace(arguments, model_name_or_path="toy"), config)
    return diagnose(recipe, asked, Loaded(model, world.tokenizer, world.data["forget"], world.data["retain"])), recipe


# -- TOFU -------------------------------------------------------------------------------------------------------------

#: Settings of a toy's evaluation.
TOY_EVALUATION: dict[str, Any] = {"max_new_tokens": 5, "fluency_model": None, "limit": None}
_CHAT_FORMAT, _QUESTIONS = "Llama-2-7b-hf", 4


def write_toy_data(folder: Path, forget_split: str, items: Mapping[str, list[Item]]) -> None:
    """A file for each of TOFU's configurations, with a few invented people in it."""
    from .data.tofu import split_names

    splits = split_names(forget_split)
    parts = {
        splits.forget: items["forget"],
        splits.forget_perturbed: items["forget"],
        splits.holdout: items["holdout"],
        splits.retain_perturbed: items["retain"],
        splits.real_authors: items["retain"][_QUESTIONS:],
        splits.world_facts: items["retain"][2 * _QUESTIONS :],
    }
    for name, people in parts.items():
        rows = [
            {
                "question": item.question,
                "answer": item.answer,
                "paraphrased_answer": item.paraphrased_answer,
                "perturbed_answer": list(item.perturbed_answers),
            }
            for item in people[:_QUESTIONS]
        ]
        write_rows(folder / f"{name}.jsonl", rows)


def toy_tofu(folder: Path, split: str) -> dict[str, Any]:
    """Write TOFU's files below ``folder``; returns the recipe's settings that point to them."""
    write_toy_data(folder / "toy-tofu", split, toy_world().corpus.items)
    return {"forget_data": f"{folder / 'toy-tofu'}:{split}", "chat_format": _CHAT_FORMAT}


def toy_alternates(folder: Path) -> str:
    """Write other answers to the toys' forget questions below ``folder``; returns the file."""
    path = folder / "toy-alternates.jsonl"
    items = toy_world().corpus.items["forget"]
    write_rows(path, ({"question": item.question, "alternates": list(item.perturbed_answers)} for item in items))
    return str(path)


@contextmanager
def tofu_toys(request: TofuRequest) -> Iterator[TofuRequest]:
    """The request for toy models; results go to ``smoke`` in its ``out``, else in ``outputs``."""
    from .evaluation.tofu.run import Loading

    world = toy_world()
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model, retain, target = (
            save_model(folder / name, world, seed) for seed, name in enumerate(("model", "retain", "target"))
        )
        write_toy_data(folder, request.settings.forget_split, world.corpus.items)
        aside = request.settings.held_out_questions and 1  # of the few there are
        yield replace(
            request,
            model=model,
            retain=retain if request.retain else None,
            target=target if request.target else None,
            settings=replace(
                request.settings, data=scratch, chat_format=_CHAT_FORMAT, held_out_questions=aside, **TOY_EVALUATION
            ),
            loading=Loading(dtype="float32"),
            out=(request.out or Path("outputs")) / "smoke",
            overwrite=True,
        )


# -- MUSE -------------------------------------------------------------------------------------------------------------


def write_muse(folder: Path, items: Mapping[str, list[Item]]) -> None:
    """MUSE's files, with a few invented people in place of news and books."""
    for which in ("forget", "retain"):
        people = items[which]
        asked = [{"question": item.question, "answer": item.answer} for item in people[2 : 2 + _QUESTIONS]]
        write_rows(folder / "knowmem" / f"{which}_qa.jsonl", asked)
        solved = [{"question": item.question, "answer": item.answer} for item in people[:2]]
        write_rows(folder / "knowmem" / f"{which}_qa_icl.jsonl", solved)
    passages = [{"prompt": item.question, "gt": item.answer} for item in items["forget"][:_QUESTIONS]]
    write_rows(folder / "verbmem" / "forget.jsonl", passages)
    for which in ("forget", "holdout"):
        texts = [{"text": f"{item.question} {item.answer}"} for item in items[which][:_QUESTIONS]]
        write_rows(folder / "privleak" / f"{which}.jsonl", texts)


@contextmanager
def muse_toys(request: MuseRequest) -> Iterator[MuseRequest]:
    """The request for toy models and toy texts; results go to ``smoke`` in its ``out``, else in ``outputs``."""
    from .evaluation.tofu.run import Loading

    world = toy_world()
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model, retain, target = (
            save_model(folder / name, world, seed) for seed, name in enumerate(("model", "retain", "target"))
        )
        write_muse(folder / "data", world.corpus.items)
        small: dict[str, Any] = {"data": str(folder / "data"), "chat_format": _CHAT_FORMAT, "limit": None}
        yield replace(
            request,
            model=model,
            retain=retain if request.retain else None,
            target=target if request.target else None,
            settings=replace(request.settings, **small),
            loading=Loading(dtype="float32"),
            out=(request.out or Path("outputs")) / "smoke",
            overwrite=True,
        )


# -- audits of an unlearned model -------------------------------------------------------------------------------------


class AuditToys(NamedTuple):
    """Folders of three toy models, and of toy data."""

    model: str
    retain: str
    target: str
    data: str
    chat_format: str


@contextmanager
def audit_toys(forget_split: str) -> Iterator[AuditToys]:
    """Toy models, TOFU's files, WMDP's questions and a text that has to do with none of them, for a while."""
    from .data.tofu import split_names

    world = toy_world()
    items = world.corpus.items
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model, retain, target = (
            save_model(folder / name, world, seed) for seed, name in enumerate(("model", "retain", "target"))
        )
        write_toy_data(folder, forget_split, items)
        kept = [{"question": item.question, "answer": item.answer} for item in items["retain"]]
        write_rows(folder / f"{split_names(forget_split).retain}.jsonl", kept)
        write_rows(folder / "unrelated.jsonl", ({"text": item.answer} for item in items["holdout"]))
        write_questions(folder)
        yield AuditToys(model, retain, target, scratch, _CHAT_FORMAT)


# -- WMDP -------------------------------------------------------------------------------------------------------------


def write_questions(folder: Path) -> None:
    """A few questions in the files of each task."""
    choices = ["one", "two", "three", "four"]
    questions = [
        {"question": f"Which is the number {'ABCD'[at % 4]}?", "choices": choices, "answer": at % 4} for at in range(6)
    ]
    for name in ("wmdp_bio", "wmdp_cyber", "mmlu/anatomy.test", "mmlu/astronomy.test"):
        write_rows(folder / f"{name}.jsonl", questions)


@contextmanager
def wmdp_toys(request: WmdpRequest) -> Iterator[WmdpRequest]:
    """The request for two toy models; the document goes to ``smoke`` in its ``out``."""
    from .evaluation.wmdp.evaluate import TASKS

    world = toy_world()
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model, base = (save_model(folder / name, world, seed) for seed, name in enumerate(("model", "base")))
        write_questions(folder)
        out = request.out / "smoke"
        (out / "wmdp_toy.json").unlink(missing_ok=True)  # of an earlier toy
        yield replace(
            request,
            model=model,
            base=base if request.base else None,
            settings=replace(request.settings, tasks=TASKS, device=None, dtype="float32"),
            data_dir=folder,
            tasks_dir=None,
            out=out,
            cache=folder / "cache",
            name="toy",
            fresh=True,
        )


# -- results ----------------------------------------------------------------------------------------------------------


# In the order of INPUTS: extraction, exact memorisation, paraphrase, truth ratio, four attacks, utility, fluency.
_FIGURES = {
    "full": (0.71, 0.98, 0.85, 0.66, 0.99, 0.99, 0.99, 0.99, 0.60, 0.87),
    "retain90": (0.06, 0.58, 0.11, 0.40, 0.39, 0.33, 0.39, 0.47, 0.59, 0.88),
    "ROSU_rho0.2_lr1e-5": (0.09, 0.62, 0.21, 0.44, 0.55, 0.48, 0.54, 0.58, 0.57, 0.80),
    "ROSU_rho0.4_lr1e-5": (0.06, 0.57, 0.14, 0.40, 0.44, 0.37, 0.44, 0.50, 0.56, 0.78),
    "GradDiff_lr1e-5": (0.00, 0.02, 0.00, 0.01, 0.00, 0.00, 0.00, 0.00, 0.45, 0.20),
}


def example() -> tuple[list[Result], Result | None, Result | None]:
    """Invented TOFU results of three runs, the retain model and the initial model, to see what a table looks like."""
    from .evaluation.tofu.results import Result
    from .evaluation.tofu.summary import INPUTS

    results = {}
    for name, values in _FIGURES.items():
        path = Path("saves/unlearn") / f"tofu_invented_forget10_{name}" / "evals" / "TOFU_EVAL.json"
        results[name] = Result(path, dict(zip(INPUTS, values, strict=True)))
    target, retain = results.pop("full"), results.pop("retain90")
    return list(results.values()), retain, target


def ablate_toy(folder: Path) -> Path:
    """Ablate ρ and the retain batch size on toys, as ``rosu ablate`` does; returns ``folder``, where the cells are."""
    from .experiments.ablate.cells import plan, run_cells
    from .experiments.ablate.grid import free_grid
    from .experiments.attempt import Unobserved
    from .experiments.demo.task import DemoTask

    task = DemoTask(SMOKE, {}, folder / "models")
    cells, _ = plan(task, [free_grid(["rho=0.2,0.4", "retain_per_forget=1,2"], task.base, {})], [0])
    run_cells(cells, task, folder, Unobserved())
    return folder


def demo_toy(folder: Path) -> Path:
    """Run the demo at toy size and write its files into ``folder``; returns it."""
    from .experiments.attempt import Unobserved
    from .experiments.demo.task import run_demo
    from .presentation.demo import write_demo

    write_demo(run_demo(SMOKE, [0], lambda _: nullcontext(Unobserved()), ("rosu", "graddiff")), folder)
    return folder
