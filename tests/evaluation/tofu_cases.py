"""The small models of ``tofu_fixture``, evaluated by us; how to compare two result files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FIXTURE = Path(__file__).parent / "tofu_fixture"
#: Case → chat format and tokenizer. The tokenizer of ``full`` has no padding token, as Llama 3.2's.
CASES = {"chat": ("Llama-3.2-1B-Instruct", "full"), "tags": ("phi-1_5", "padded")}


def evaluate(
    case: str,
    model: str,
    out: Path,
    *,
    retain: Path | None = None,
    watch: Callable[[], None] = lambda: None,
    **settings: Any,
) -> dict[str, float]:
    """Our evaluation of ``full`` or ``retain`` in the format of a case; ``watch`` is called before each forward."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rosu_llm import TofuSettings, evaluate_tofu

    form, tokenizer = CASES[case]
    llama = AutoModelForCausalLM.from_pretrained(FIXTURE / model, dtype=torch.float32)
    llama.register_forward_pre_hook(lambda *_: watch())
    return evaluate_tofu(
        llama,
        AutoTokenizer.from_pretrained(FIXTURE / tokenizer),
        TofuSettings(
            data=str(FIXTURE / "tofu"),
            chat_format=form,
            fluency_model=str(FIXTURE / "classifier"),
            **{"batch_size": 5, **settings},
        ),
        out,
        retain=retain,
    )


def theirs(case: str, model: str) -> Path:
    """OpenUnlearning's own results."""
    return FIXTURE / "openunlearning" / f"{case}_{model}" / "TOFU_EVAL.json"


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every text and number of a result file with its place in it."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else None
    if pairs is None:
        yield path, tree
        return
    for key, value in pairs:
        yield from leaves(value, f"{path}/{key}")
