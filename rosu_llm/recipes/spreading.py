"""A training step on several devices: the memory of one process, and what it exchanges with the others.

Exchanged are gradients and weights; all scalars of a step together are about a hundred bytes. W are the bytes of the
weights as the model computes with them, G those of the gradients, p passes of m micro-batches each:

    DDP      all-reduce p·G: the last micro-batch of each pass alone synchronises
    ZeRO-1   all-reduce p·G; all-gather of the trained weights for perturbing, restoring, the step and the pull
    ZeRO-2   all-reduce p·m·G; the same gathers
    ZeRO-3   all-gather p·m·2W (a tied embedding once more each way; checkpointing: layers once more);
             reduce-scatter p·m·G
    FSDP2    all-gather p·m·(2W − root), for what is outside the layers stays gathered; reduce-scatter p·m·G

A test counts them on two processes (``scripts/count_exchange.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..training.preflight import Preflight
from .activations import PassShape

#: Layout → how it is written.
NAMES = {"local": "one device", "ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp2": "FSDP2"}
#: DeepSpeed's defaults, in elements: what is reduced at once, and how much stage 3 keeps gathered.
_BUCKET, _LIVE = 500_000_000, 1_000_000_000


@dataclass(frozen=True)
class StepShape:
    """What a step is made of, whatever the layout.

    Attributes:
        memory: of one process alone.
        work: one pass over one micro-batch.
        micro_batches: of each pass, on each process.
        layer: parameters of one decoder layer; ``outside``: those of embeddings, last norm and output layer.
        tied: parameters that input and output layer share.
        copied: float32 parameters of linear layers, of which autocast makes bf16 copies.
        perturbs, pulls: whether the weights are displaced for a pass, and moved after the optimizer's step.
        whole: the method needs whole weights on every process, so that layouts which split them refuse it.
    """

    memory: Preflight
    work: PassShape
    micro_batches: int = 1
    layer: int = 0
    outside: int = 0
    tied: int = 0
    copied: int = 0
    perturbs: bool = True
    pulls: bool = True
    whole: bool = False

    @property
    def layouts(self) -> tuple[str, ...]:
        """Those in which it runs."""
        return ("local", "ddp") if self.whole else tuple(NAMES)

    @property
    def width(self) -> int:
        """Bytes per element of what is gathered and reduced."""
        return 2 if self.memory.bf16 else 4


@dataclass(frozen=True)
class Share:
    """Bytes of one process: of its device, and ``host`` of its memory.

    Attributes:
        copies: of weights and gradients that a layout or autocast makes on the way.
    """

    weights: int
    gradients: int
    optimizer: int
    captured: int
    reference: int
    copies: int
    activations: int
    logits: int
    host: int = 0

    @property
    def device(self) -> int:
        """All of it at once, which is a little more than a step ever holds."""
        held = self.weights + self.gradients + self.optimizer + self.captured + self.reference
        return held + self.copies + self.activations + self.logits


def share(step: StepShape, layout: str, processes: int) -> Share:
    """The memory of one process in a layout."""
    own = step.memory.of_process(layout, processes)
    return Share(
        weights=own.weights,
        gradients=own.gradients,
        optimizer=own.optimizer,
        captured=own.buffers,
        reference=own.reference,
        copies=_copies(step, layout),
        activations=step.work.activations,
        logits=step.work.logits,
        host=own.host,
    )


def _copies(step: StepShape, layout: str) -> int:
    total, trained, width = step.memory.total, step.memory.trainable, step.width
    if layout == "fsdp2":  # what is outside the layers, two layers, and the gradients of one and of the outside
        gradients = step.layer + step.outside if trained == total else 0
        return width * (step.outside + 2 * step.layer + gradients)
    if layout == "zero3":
        return width * (_BUCKET + min(total, _LIVE))
    if layout.startswith("zero"):
        return width * _BUCKET
    casts = 2 * step.copied if step.memory.bf16 else 0
    return casts + (step.memory.gradients if layout == "ddp" else 0)  # DDP's buckets


@dataclass(frozen=True)
class Traffic:
    """Bytes of whole tensors that a step hands to each kind of collective."""

    reduced: int = 0
    gathered: int = 0
    scattered: int = 0

    def sent(self, processes: int) -> int:
        """What one process sends, and receives, if collectives run in rings; an all-reduce goes round twice."""
        return (2 * self.reduced + self.gathered + self.scattered) * (processes - 1) // processes


def traffic(step: StepShape, layout: str) -> Traffic:
    """What the processes of a layout exchange in a step."""
    width, memory, work = step.width, step.memory, step.work
    passes, every = memory.passes, (memory.passes + memory.returning) * step.micro_batches
    if layout == "local":
        return Traffic()
    if layout == "ddp":
        return Traffic(reduced=passes * memory.gradients)
    trained, whole = width * memory.trainable, width * memory.total
    if layout in ("zero1", "zero2"):
        gathers = 1 + 2 * step.perturbs + step.pulls
        return Traffic(reduced=(passes if layout == "zero1" else every) * trained, gathered=gathers * trained)
    if layout == "fsdp2":
        return Traffic(gathered=every * (2 * whole - width * step.outside), scattered=every * trained)
    # the last matrix of a layer that is computed again is still there when its backward begins
    again = work.layers * (step.layer - work.hidden * work.intermediate) if work.checkpointing else 0
    return Traffic(gathered=every * (2 * whole + width * (2 * step.tied + again)), scattered=every * trained)
