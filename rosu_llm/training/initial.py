"""The initial model's next-token distributions on some samples, without a second model.

Kept of the initial model are its last hidden states h₀ at the positions that predict an answer token, by sample, and
its output layer (W₀, b₀). They give its distributions again, p₀ = softmax(W₀ h₀ + b₀), in the model's own precision.

The output layer is read inside its own forward pass: there its weight is whole in every layout. A model that changes
what its output layer returns (soft-capping, scaling) is refused.
"""

from __future__ import annotations

import contextlib
import logging
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as functional
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import ConfigError, DataError
from ..losses.answers import wide
from ..losses.language import answer_mask, logits_of
from ..losses.reference import evaluating, keys_and_answers, sample_keys
from ..losses.registry import Batch
from .ranks import Ranks

logger = logging.getLogger(__name__)

#: Nats by which the model's own log-probabilities may differ from those of hidden state and output layer.
_TOLERANCE = 1e-4
#: Bytes of hidden states that processes exchange at once; on GPUs they travel through device memory.
_PIECE = 1 << 26

Context = Callable[[], contextlib.AbstractContextManager[Any]]
Seen = TypeVar("Seen")


class OutputLayerError(ConfigError):
    """The initial model's distributions are not those of its last hidden states and its output layer."""


class InitialStates:
    """Hidden states and output layer of the initial model.

    Args:
        setting: what asked for them, for errors, such as ``retain_loss='kl'``.
        instead: what to use where they cannot be had.
        samples: what the samples are called.
        frozen_head: copy the output layer also where it is not trained, for use outside its forward pass.
    """

    def __init__(self, setting: str, instead: str, samples: str, *, frozen_head: bool = False) -> None:
        self._setting, self._instead, self._samples = setting, instead, samples
        self._frozen_head = frozen_head
        self.clear()

    def clear(self) -> None:
        """Forget the initial model."""
        self._hidden: dict[str, Tensor] = {}
        self._head: dict[str, Tensor] = {}  # initial weight and bias; empty where the model's own are used
        self._near: dict[tuple[Any, ...], dict[str, Tensor]] = {}
        self._file: Path | None = None
        #: Keys of batches that are still there: several passes go over one, and the host waits for its keys once.
        self._asked: Any = WeakTensorKeyDictionary()

    @property
    def known(self) -> bool:
        """Whether the initial model has been looked at."""
        return bool(self._hidden)

    @property
    def head_bytes(self) -> int:
        """Memory of the output layer's copy."""
        return _bytes(self._head.values())

    @property
    def extra_bytes(self) -> int:
        """Memory of all that is kept."""
        return _bytes(self._hidden.values()) + self.head_bytes

    # -- looking at the model -------------------------------------------------------------------

    @torch.no_grad()
    def capture(
        self, model: nn.Module, head: nn.Linear, batches: Iterable[Batch], context: Context, ranks: Ranks
    ) -> None:
        """Keep what the weights the model has now make of ``batches``, this process's share of them.

        ``context`` is entered around every forward (autocast).
        """
        hidden: dict[str, Tensor] = {}
        copied = dict(self._head)
        difference = 0.0

        def look(layer: nn.Linear, states: Tensor) -> tuple[Tensor, Tensor]:
            if not copied and (self._frozen_head or any(p.requires_grad for p in layer.parameters())):
                copied.update({name: p.detach().to("cpu", copy=True) for name, p in layer.named_parameters()})
            states = states.to(compute_type(states))  # as the layer itself would
            return states, functional.linear(states, layer.weight, layer.bias)

        with evaluating(model):
            for batch in batches:
                keep = answer_mask(batch["labels"])
                with before_layer(head, look) as seen, context():
                    own = wide(logits_of(model, batch)[:, :-1][keep]).log_softmax(-1)
                if len(seen) != 1:
                    raise self.refused("its forward pass does not call its output layer once")
                states, logits = (part[:, :-1][keep] for part in seen[0])
                difference = max(difference, _largest(own - wide(logits).log_softmax(-1)))
                rows = states.cpu().split(keep.sum(-1).tolist())
                hidden.update(zip(sample_keys(batch), (row.clone() for row in rows), strict=True))
        # all processes refuse, or none
        if float(ranks.mean(torch.tensor([float(not difference <= _TOLERANCE)], dtype=torch.float64))[0]) > 0.0:
            raise self.refused(
                f"its logits are not those of its output layer (log-probabilities differ by up to {difference:.2g} "
                "nats: soft-capped or scaled)"
            )
        self._hidden.update(_merged(hidden, ranks))
        self._head, self._near, self._file = copied, {}, None

    def output_layer(self, model: Any) -> nn.Linear:
        """The layer that makes logits of hidden states, where it is one matrix and nothing else."""
        find = getattr(model, "get_output_embeddings", None)
        head = find() if callable(find) else None
        if head is None:
            raise self.refused(f"{type(model).__name__} does not name one (get_output_embeddings)")
        if not isinstance(head, nn.Linear) or not head.weight.is_floating_point():
            kind = type(head).__name__
            raise self.refused(f"that of {type(model).__name__} is a {kind} (an adapter on it, or quantised)")
        return head

    def refused(self, why: str) -> OutputLayerError:
        """The error that says why the output layer does not tell."""
        return OutputLayerError(
            f"{self._setting} takes the initial model's probabilities from its output layer, but {why}: use "
            f"{self._instead}."
        )

    # -- asking ---------------------------------------------------------------------------------

    def know(self, batch: Batch) -> bool:
        """Whether the initial model was asked about every sample of the batch."""
        return all(key in self._hidden for key in sample_keys(batch))

    def rows(self, batch: Batch) -> Tensor:
        """The hidden states at the answer positions of a batch, in their order, in host memory."""
        labels = batch["labels"]
        if labels not in self._asked:
            self._asked[labels] = keys_and_answers(batch)
        keys = self._asked[labels]
        wanted = [(self._hidden.get(key), count) for key, count in keys if count]
        found = [row for row, count in wanted if row is not None and len(row) == count]
        if len(found) < len(wanted):
            raise DataError(
                f"{len(wanted) - len(found)} of {len(keys)} {self._samples} samples are none of those that the initial "
                f"model was asked about: the data set returned other tokens before the first step. Use "
                f"{self._samples} data without random augmentation, or {self._instead}."
            )
        return torch.cat(found) if found else next(iter(self._hidden.values()))[:0]

    def head(self, device: torch.device, dtype: torch.dtype | None = None) -> Mapping[str, Tensor]:
        """The copied weight and bias on a device, where they stay; nothing where the model's own are to be used."""
        if (device, dtype) not in self._near:
            self._near = {(device, dtype): {name: t.to(device, dtype) for name, t in self._head.items()}}
        return self._near[device, dtype]

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Hidden states at the answer positions, weight and bias, on the batch's device and as they are multiplied."""
        device = batch["input_ids"].device
        hidden = self.rows(batch).to(device)
        hidden = hidden.to(compute_type(hidden))
        layer = self.head(device, hidden.dtype)
        return hidden, layer["weight"], layer.get("bias")

    # -- files ----------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Into a checkpoint: a second name of the file that is mapped, where there is one, else a file of its own."""
        path.unlink(missing_ok=True)
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.link(self._file, path)
                return
        self._write(path)

    def load(self, path: Path) -> None:
        """Take what :meth:`save` wrote; the hidden states stay in the file until they are asked for."""
        found = load_file(path)
        keys = [bytes(row.tolist()).hex() for row in found.pop("keys")]
        rows = found.pop("hidden").split(found.pop("lengths").tolist())
        self.clear()
        self._hidden, self._file = dict(zip(keys, rows, strict=True)), path
        # Copies: where a tensor lies in memory decides how its sums round, and in the file it lies anywhere.
        self._head = {name: tensor.clone() for name, tensor in found.items()}

    def move_to(self, path: Path, ranks: Ranks, *, writer: bool) -> None:
        """From host memory to a file that is mapped, by every process that sees what ``writer`` wrote."""
        written = uuid.uuid4().hex
        if writer:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                partial = path.with_name(f".{path.name}.partial")
                self._write(partial, written)
                partial.replace(path)
            except OSError as error:
                logger.warning("%s keeps the initial model's hidden states in host memory: %s.", self._setting, error)
        written = ranks.merge({"written": written} if writer else {}).get("written", "")
        if path.is_file() and _mark(path) == written:
            self.load(path)

    def _write(self, path: Path, mark: str = "") -> None:
        """A safetensors file: keys as bytes, how many states each sample has, the states, the output layer."""
        keys = torch.tensor([list(bytes.fromhex(key)) for key in self._hidden], dtype=torch.uint8).reshape(-1, 16)
        lengths = torch.tensor([len(rows) for rows in self._hidden.values()])
        states = {"keys": keys, "lengths": lengths, "hidden": torch.cat(list(self._hidden.values()))}
        head = {name: tensor.contiguous() for name, tensor in self._head.items()}
        save_file({**states, **head}, path, metadata={"written": mark})


def compute_type(tensor: Tensor) -> torch.dtype:
    """In which a linear layer multiplies the tensor here: autocast's, or its own."""
    kind = tensor.device.type
    lowered = torch.is_autocast_enabled(kind) and tensor.dtype != torch.float64
    return torch.get_autocast_dtype(kind) if lowered else tensor.dtype


@contextlib.contextmanager
def before_layer(head: nn.Linear, look: Callable[[nn.Linear, Tensor], Seen]) -> Iterator[list[Seen]]:
    """What ``look`` makes of the layer and its input, whenever the layer is about to run."""
    seen: list[Seen] = []
    hook = head.register_forward_pre_hook(lambda layer, inputs: seen.append(look(layer, inputs[0])))
    try:
        yield seen
    finally:
        hook.remove()


def _merged(hidden: dict[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """What all ranks have found, exchanged in pieces."""
    if ranks.world == 1:
        return hidden
    pieces: list[dict[str, Tensor]] = [{}]
    for key, rows in hidden.items():
        if _bytes(pieces[-1].values()) > _PIECE:
            pieces.append({})
        pieces[-1][key] = rows
    rounds = int(ranks.gather(torch.tensor([float(len(pieces))], dtype=torch.float64)).max())
    found: dict[str, Tensor] = {}
    for i in range(rounds):
        found.update(ranks.merge(pieces[i] if i < len(pieces) else {}))
    return found


def _mark(path: Path) -> str:
    with safe_open(path, "pt") as file:
        return str((file.metadata() or {}).get("written", ""))


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0
