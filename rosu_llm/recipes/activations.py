"""What a pass over one micro-batch keeps until its backward, as formulas of the model's sizes.

Counted are the tensors that autograd saves in a Llama layer (norm, attention without its L×L matrix, gated MLP); a test
weighs them on a small one. Other decoders differ in the factors, not in the terms. With T tokens in a micro-batch,
width h, queries of width q = heads × head size, MLP width i and e bytes per element (2 under bf16, else 4), a layer
keeps

    T · [ 4·n·h + e·(k·h + 4·q + 4·i) ]

n = 4 float32 inputs and outputs of norms (2 where norms are frozen); k = 2 inputs of linear layers, under bf16 one cast
for each: 5, and 6 with adapters. Attention keeps queries, keys and values (as wide as queries, since padding masks make
transformers repeat them) and its output; the MLP gate, activation, up and their product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..losses.answers import DEFAULT_CHUNK
from ..representation.names import text_config

#: Float32 tensors of the size of a chunk: logits, their log-softmax, its gradient.
_LOGIT_COPIES = 3


@dataclass(frozen=True)
class PassShape:
    """One pass over one micro-batch.

    Attributes:
        layers: through which gradients flow.
        hidden, query, intermediate: widths h, q and i.
        vocabulary: rows of the output layer; 0 where it does not run.
        tokens: of a micro-batch, padding included.
        stream: bytes per element of the hidden states between layers.
        bf16: compute in bf16 (autocast).
        checkpointing: keep the inputs of layers only, and compute the rest again.
        adapter: the layers' own weights are frozen.
        compiled: by torch.compile, so that all logits are computed at once.
    """

    layers: int
    hidden: int
    query: int
    intermediate: int
    vocabulary: int
    tokens: int
    stream: int = 4
    bf16: bool = False
    checkpointing: bool = False
    adapter: bool = False
    compiled: bool = False

    @property
    def layer_bytes(self) -> int:
        """What one layer keeps, per token."""
        inputs = 2 if not self.bf16 else 6 if self.adapter else 5
        wide = inputs * self.hidden + 4 * self.query + 4 * self.intermediate
        return 2 * self._norm_bytes + self._width * wide

    @property
    def _norm_bytes(self) -> int:
        """A norm's float32 input, and its output before it is scaled where the scale is trained."""
        return 4 * self.hidden * (1 if self.adapter else 2)

    @property
    def _width(self) -> int:
        return 2 if self.bf16 else 4

    @property
    def kept(self) -> int:
        """What the layers and the last norm keep for backward."""
        per_token = self.stream * self.hidden if self.checkpointing else self.layer_bytes
        return self.tokens * (self.layers * per_token + self._norm_bytes)

    @property
    def activations(self) -> int:
        """The most that exists at once: with one layer computed again, and the gradients of its MLP."""
        again = self.layer_bytes if self.checkpointing else 0
        return self.kept + self.tokens * (again + 3 * self._width * self.intermediate)

    @property
    def logits(self) -> int:
        """At answer positions alone, in chunks; at most those of every token."""
        whole = self.tokens * self.vocabulary
        return 4 * _LOGIT_COPIES * (whole if self.compiled else min(max(DEFAULT_CHUNK, self.vocabulary), whole))


def pass_shape(described: Any, *, layers: int | None, tokens: int, **options: Any) -> PassShape:
    """From a model's configuration; ``layers`` are those with gradients, all of them and the output layer if None."""
    sizes = text_config(described)
    hidden, heads = int(sizes.hidden_size), int(sizes.num_attention_heads)
    head = getattr(sizes, "head_dim", None) or hidden // heads
    return PassShape(
        layers=int(sizes.num_hidden_layers) if layers is None else layers,
        hidden=hidden,
        query=heads * int(head),
        intermediate=int(getattr(sizes, "intermediate_size", None) or 4 * hidden),
        vocabulary=int(sizes.vocab_size) if layers is None else 0,
        tokens=tokens,
        **options,
    )
