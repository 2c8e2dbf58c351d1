"""``--smoke``: run a recipe's every setting on a toy model and toy people, in seconds, on a CPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..recipes.loading import Loaded
from ..recipes.next_token import chat_format, parts_needed
from ..recipes.run import train
from ..recipes.settings import Recipe, RunArguments, build
from ..training.trainer import ROSUMixin

if TYPE_CHECKING:
    from ..experiments.demo.world import World

#: What a smoke run replaces; everything else of the recipe stays.
REPLACED: dict[str, Any] = {
    "max_steps": 2,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "dataloader_num_workers": 0,
    "bf16": False,
    "use_cpu": True,
    "report_to": [],
    "save_strategy": "no",
    "logging_steps": 1,
    "gradient_checkpointing": False,
    "eval_strategy": "no",
    "load_best_model_at_end": False,
    "resume_from_checkpoint": None,
    "dataloader_prefetch_factor": None,
    "dataloader_persistent_workers": False,
    "push_to_hub": False,
}


def run_smoke(values: dict[str, Any]) -> ROSUMixin:
    """Train two steps with the recipe's method on the demo's world.

    The toy model goes to a folder ``smoke`` inside ``output_dir``, where it can overwrite nothing real.
    """
    recipe = build({**values, **REPLACED})
    arguments, config = recipe
    config.output_dir = str(Path(config.output_dir) / "smoke")
    from ..experiments.demo.run import SMOKE
    from ..experiments.demo.world import build_world, small_llama

    world = build_world(config.seed, people=SMOKE.people)
    if recipe.representation_level:
        return _smoke_representation(world, arguments, config)
    model = small_llama(len(world.tokenizer), config.seed, hidden=SMOKE.hidden, layers=SMOKE.layers)
    if arguments.chat_format:
        _encode_again(world, arguments)
    learns = not arguments.forget_data and "forget" not in parts_needed(config)
    data = world.data
    forget = None if learns else data["forget"]
    return train(recipe, Loaded(model, world.tokenizer, forget, data["retain"], data["calibration"]))


def _encode_again(world: World, arguments: RunArguments) -> None:
    """The people's questions in the recipe's chat format, which may need a chat template."""
    from ..data.question_answer import QuestionAnswerDataset

    world.tokenizer.chat_template = "{% for turn in messages %}{{ turn['content'] + ' ' }}{% endfor %}"
    form = chat_format(arguments, world.tokenizer)
    for split, items in world.corpus.items.items():
        pairs = [(item.question, item.answer) for item in items]
        world.data[split] = QuestionAnswerDataset(pairs, world.tokenizer, chat_format=form)


def _smoke_representation(world: World, arguments: RunArguments, config: Any) -> ROSUMixin:
    """The same at representation level: a toy checkpoint with enough layers, the people's answers as corpora."""
    from tempfile import TemporaryDirectory

    from ..data.corpus import TextCorpus
    from ..experiments.demo.world import small_llama

    sources = arguments.forget_data if isinstance(arguments.forget_data, list) else [""]
    arguments = replace(arguments, dtype="float32", attn_implementation=None, overwrite=True)
    texts = {split: [item.answer for item in world.corpus.items[split]] for split in ("forget", "retain")}
    forget = [TextCorpus(texts["forget"][i :: len(sources)], world.tokenizer, corpus=i) for i in range(len(sources))]
    retain = TextCorpus(texts["retain"], world.tokenizer)
    with TemporaryDirectory() as folder:
        model = small_llama(len(world.tokenizer), config.seed, hidden=32, layers=config.target_layer + 2)
        model.save_pretrained(folder)
        world.tokenizer.save_pretrained(folder)
        return train(Recipe(arguments, config), Loaded(folder, world.tokenizer, forget, retain))
