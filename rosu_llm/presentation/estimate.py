"""``rosu train --estimate`` as a section: memory of one process and what it exchanges, in every layout."""

from __future__ import annotations

from collections.abc import Iterator

from ..recipes.estimate import Needs, micro_batch
from ..recipes.settings import Recipe
from ..recipes.spreading import NAMES, Share, StepShape, share, traffic
from .blocks import Block, Row, Section, Table, TableCell, Text

DEVICES = (1, 2, 4, 8)
#: Heading → part of :class:`Share`; short, so that a terminal of 80 columns shows them all.
_PARTS = {
    "weights": "weights",
    "grads": "gradients",
    "optim": "optimizer",
    "held": "captured",
    "ref": "reference",
    "copies": "copies",
    "activ": "activations",
    "logits": "logits",
    "total": "device",
    "host": "host",
}


def estimate_section(recipe: Recipe, needs: Needs, name: str) -> Section:
    """One row for each layout and number of devices; ``name`` is what the model is called."""
    step, shape = needs.step, needs.shape
    share_of = 100.0 * step.trainable / max(1, step.total)
    told = (
        f"Estimate for {name}: {step.work}; "
        f"{step.trainable:,} of {step.total:,} parameters trainable ({share_of:.3g} %)."
    )
    blocks: list[Block] = [Text(told, strong=True), memory_table(shape, notes=tuple(_notes(recipe, needs)))]
    return Section("estimate", "rosu train --estimate", blocks)


def memory_table(shape: StepShape, devices: tuple[int, ...] = DEVICES, notes: tuple[str, ...] = ()) -> Table:
    """Memory and traffic of one process in each layout in which the step runs."""
    shares = [
        (layout, count, share(shape, layout, count), traffic(shape, layout).sent(count))
        for layout in shape.layouts
        for count in devices
        if (count == 1) == (layout == "local")
    ]
    unit, size = ("GiB", 2**30) if shares[0][2].device >= 2**29 else ("MiB", 2**20)
    parts = {name: part for name, part in _PARTS.items() if any(getattr(own, part) for *_, own, _ in shares)}

    def row(layout: str, count: int, own: Share, sent: int) -> Row:
        figures = [*(getattr(own, part) for part in parts.values()), sent]
        label = NAMES[layout] + (f" ×{count}" if count > 1 else "")
        return Row(label, tuple(TableCell(figure / size) for figure in figures))

    rows = tuple(row(*each) for each in shares)
    return Table((*parts, "sent"), rows, notes, heading="layout", caption=f"{unit} per process", digits=1)


def _notes(recipe: Recipe, needs: Needs) -> Iterator[str]:
    """What the figures mean and assume."""
    config, shape, work = recipe.config, needs.shape, needs.shape.work
    tokens, length = micro_batch(recipe)
    yield (
        "An estimate from the configuration of the model alone; nothing was loaded. total: all parts at once, a little "
        "more than a step holds; the device's own libraries and fragmentation come on top."
    )
    place = "host: captured gradients and backup, in host memory." if needs.step.host else ""
    yield place or "held: captured gradients and backup of the weights."
    if needs.step.reference:
        yield "ref: what is kept of the initial model."
    yield (
        "copies: bf16 casts of float32 weights (one device, DDP), DDP's buckets, gathered layers (FSDP2), DeepSpeed's "
        "buckets at their default sizes. The weights of ZeRO include its float32 master."
    )
    layers = "" if work.vocabulary else f", {work.layers} layers with gradients"
    yield (
        f"activ: micro-batches of {tokens:,} tokens (samples of max_length={length}; shorter ones take less), "
        f"{'bf16' if work.bf16 else 'float32'}, {'with' if work.checkpointing else 'without'} gradient checkpointing"
        f"{layers}, attention without its L×L matrix (flash or sdpa)."
    )
    if work.vocabulary:
        where = "of every token (torch_compile)" if work.compiled else "at answer positions alone, in chunks"
        yield f"logits: {where}, three float32 tensors."
    window = config.per_device_train_batch_size * config.gradient_accumulation_steps
    yield (
        f"sent: by one process in a step, {shape.micro_batches} micro-batches a pass, collectives in rings. A window "
        f"has {window} pairs per device: lower gradient_accumulation_steps to keep it the same on more devices."
    )
    if needs.step.single:
        yield "sent is that of one pass over each set, and with fisher=sample each sample is a pass that sends as much."
    if shape.whole:
        yield "FSDP2 and ZeRO refuse this recipe: it needs whole weights, or a second model, on every process."
