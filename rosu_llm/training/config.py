"""``ROSUConfig``: ``TrainingArguments`` plus the method's parameters."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import TrainingArguments

from .arguments import MethodArguments


@dataclass
class ROSUConfig(MethodArguments, TrainingArguments):
    """Configuration of :class:`~rosu_llm.ROSUTrainer`.

    Everything ``transformers.TrainingArguments`` has keeps its meaning. Defaults that differ:
    ``remove_unused_columns=False`` (batches are nested) and ``output_dir="rosu-output"``.
    """

    # Redefined only because TrainingArguments requires one in older versions of transformers.
    output_dir: str = field(default="rosu-output", metadata={"help": "Where checkpoints and the model go."})
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Must stay false: the columns are nested under forget and retain."}
    )

    def __post_init__(self) -> None:
        self.check_method()
        super().__post_init__()
