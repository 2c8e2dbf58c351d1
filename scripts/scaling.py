"""The tables of docs/scaling.md: recipes on one GPU, and ROSU at 1, 8 and 70 billion parameters on 8 to 64 GPUs.

Everything is computed from the sizes of the models by the formulas of ``rosu train --estimate``; nothing is downloaded,
loaded or run.

    python scripts/scaling.py
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rosu_llm.presentation.blocks import Table, text_table
from rosu_llm.presentation.estimate import memory_table
from rosu_llm.presentation.writers import render
from rosu_llm.recipes.estimate import estimate
from rosu_llm.recipes.settings import build, read_config
from rosu_llm.recipes.spreading import NAMES, StepShape, share, traffic

RECIPES = Path(__file__).parent.parent / "configs" / "recipes"
_COMMON = {"vocab_size": 128_256, "num_key_value_heads": 8, "max_position_embeddings": 131_072}
#: Sizes of the published models.
MODELS: dict[str, dict[str, Any]] = {
    "1B": {**_COMMON, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
           "num_attention_heads": 32, "head_dim": 64, "tie_word_embeddings": True},
    "8B": {**_COMMON, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
           "num_attention_heads": 32, "tie_word_embeddings": False},
    "70B": {**_COMMON, "hidden_size": 8192, "intermediate_size": 28_672, "num_hidden_layers": 80,
            "num_attention_heads": 64, "tie_word_embeddings": False},
}  # fmt: skip
#: One micro-batch of 4 × 512 tokens for each pass on every GPU.
LARGE = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "gradient_checkpointing": True,
    "bf16": True,
    "amplify": "matched",
}
GPUS = (8, 16, 32, 64)


@dataclass(frozen=True)
class Hardware:
    """The worked example: figures from data sheets, and a guess of what is reached of them.

    Attributes:
        flops: bf16, dense, per second.
        reached: share of them that training reaches (assumed).
        memory: bytes per second of device memory.
        inside, between: bytes per second that one GPU sends within a node of 8, and between nodes.
        room: bytes of device memory; what does not fit is left out.
    """

    flops: float = 989e12
    reached: float = 0.4
    memory: float = 3.35e12
    inside: float = 450e9
    between: float = 50e9
    room: float = 80 * 2**30


#: Reads and writes of a value for each own parameter: capture, inner products, perturb, restore, combine, pull.
ALGEBRA = 24


def shape_of(model: str, recipe: str, folder: Path, changes: Mapping[str, Any] | None = None) -> StepShape:
    """What a step of a shipped recipe is made of, with a model of these sizes in place of its own."""
    from transformers import LlamaConfig

    LlamaConfig(**MODELS[model]).save_pretrained(folder / model)
    values = {**read_config(RECIPES / f"{recipe}.yaml"), **(changes or {})}
    values |= {"model_name_or_path": str(folder / model), "use_cpu": True, "report_to": "none"}
    with redirect_stdout(sys.stderr):
        return estimate(build(values)).shape


def memory_by_gpus(shapes: Mapping[str, StepShape]) -> Table:
    """Total per GPU."""
    rows = [
        (f"{model}, {NAMES[layout]}", *(f"{share(step, layout, count).device / 2**30:.0f}" for count in GPUS))
        for model, step in shapes.items()
        for layout in step.layouts
        if layout != "local"
    ]
    return text_table("", ("GiB per GPU", *(f"{count} GPUs" for count in GPUS)), rows)


def sent_by_layout(shapes: Mapping[str, StepShape], count: int = GPUS[-1]) -> Table:
    """What one GPU sends in a step."""
    layouts = [layout for layout in NAMES if layout != "local"]
    rows = [
        (NAMES[layout], *(f"{traffic(step, layout).sent(count) / 1e9:.1f}" for step in shapes.values()))
        for layout in layouts
    ]
    return text_table("", (f"GB sent per GPU and step, {count} GPUs", *shapes), rows)


def seconds(step: StepShape, layout: str, count: int, on: Hardware) -> tuple[float, float, float]:
    """Passes, exchange and algebra of a step."""
    work, memory = step.work, step.memory
    per_token = (8 if work.checkpointing else 6) * memory.total  # 2 forward, 4 backward, 2 once more
    passes = memory.passes * step.micro_batches * work.tokens * per_token / (on.flops * on.reached)
    exchange = traffic(step, layout).sent(count) / (on.inside if count <= 8 else on.between)
    own = memory.trainable if layout == "ddp" else memory.trainable / count
    return passes, exchange, ALGEBRA * 4 * own / on.memory


def time_by_layout(shapes: Mapping[str, StepShape], on: Hardware) -> Table:
    """Seconds on one node and on eight."""
    rows = []
    for model, step in shapes.items():
        for layout in ("ddp", "zero3", "fsdp2"):
            for count in (GPUS[0], GPUS[-1]):
                if share(step, layout, count).device > on.room:
                    continue
                parts = seconds(step, layout, count, on)
                span = f"{max(parts[0] + parts[2], parts[1]):.2f}–{sum(parts):.2f}"
                rows.append((f"{model}, {NAMES[layout]} ×{count}", *(f"{part:.3f}" for part in parts), span))
    return text_table("", ("seconds", "passes", "exchange", "algebra", "step"), rows)


def tables() -> dict[str, str]:
    """Title → markdown."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        small = shape_of("1B", "tofu_llama-3.2-1b_24gb", folder)
        lora = shape_of("8B", "tofu_llama-3.1-8b_lora", folder)
        shapes = {model: shape_of(model, "tofu_llama-3.2-1b", folder, LARGE) for model in MODELS}
    found = {
        "tofu_llama-3.2-1b_24gb": memory_table(small),
        "tofu_llama-3.1-8b_lora": memory_table(lora),
        "Memory": memory_by_gpus(shapes),
        "Exchange": sent_by_layout(shapes),
        "Time": time_by_layout(shapes, Hardware()),
    }
    return {title: render(table, "markdown").strip() for title, table in found.items()}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for title, text in tables().items():
        print(f"{title}\n\n{text}\n")


if __name__ == "__main__":
    main()
