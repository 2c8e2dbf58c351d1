"""What a TOFU evaluation measures, and how."""

from __future__ import annotations

from dataclasses import dataclass

from ...data.tofu import DEFAULT_SOURCE
from ...errors import ConfigError
from . import fluency
from .metrics import METRICS, needed


@dataclass(frozen=True, kw_only=True)
class TofuSettings:
    """Settings of one evaluation; the defaults are OpenUnlearning's where they change numbers.

    Attributes:
        data: hub id or folder of TOFU.
        chat_format: see :func:`rosu_llm.data.chat_format.find_format`.
        batch_size: samples at once and per process, at most; further limited by
        batch_tokens: tokens at once, with padding and with what is generated.
        limit: first rows of each data set only, for a trial.
        max_new_tokens: how long a generated answer may become.
        max_length: where formats without a chat template cut.
        fluency_model: hub id or folder of the classifier; None leaves fluency out.
        metrics: names out of ``METRICS``.
    """

    data: str = DEFAULT_SOURCE
    forget_split: str = "forget10"
    chat_format: str | None = None
    batch_size: int = 64
    batch_tokens: int = 8192
    limit: int | None = None
    max_new_tokens: int = 200
    max_length: int = 512
    fluency_model: str | None = fluency.DEFAULT
    metrics: tuple[str, ...] = METRICS

    def __post_init__(self) -> None:
        for name in ("batch_size", "batch_tokens", "max_new_tokens", "max_length", "limit"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {value} must be at least 1.")
        needed(self.metrics)
