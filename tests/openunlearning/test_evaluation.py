"""Where weights are split, evaluators are not run and the user is told how to; once."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from rosu_llm.openunlearning.evaluation import MainProcessEvaluation


class Upstream:
    def __init__(self, evaluators: Any = None, template_args: Any = None, **kwargs: Any) -> None:
        self.evaluators, self.given = evaluators, kwargs

    def evaluate(self, *args: Any) -> dict[str, float]:
        return {"upstream": 1.0}


class Trainer(MainProcessEvaluation, Upstream):
    def __init__(self, layout: str, stage: int = 0, processes: int = 2, evaluators: Any = None) -> None:
        super().__init__("the model", "the arguments", evaluators=evaluators)
        self.layout = layout
        self.args = SimpleNamespace(output_dir="saves/x")
        self.accelerator = SimpleNamespace(
            num_processes=processes,
            is_main_process=True,
            autocast=nullcontext,
            state=SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=stage)),
        )

    def _evaluate_on_main(self, trial: Any) -> dict[str, float]:
        return {"main": 1.0}

    def log(self, logs: dict[str, float]) -> None: ...


def test_positional_arguments_reach_upstream_by_name() -> None:
    assert Trainer("ddp").given == {"model": "the model", "args": "the arguments"}


@pytest.mark.parametrize(("layout", "stage"), [("fsdp2", 0), ("zero", 3)])
def test_split_weights_are_not_evaluated(layout: str, stage: int, caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer(layout, stage, evaluators={"tofu": object()})
    with caplog.at_level(logging.WARNING):
        assert trainer.evaluate() == {}
        assert trainer.evaluate() == {}
    (record,) = caplog.records
    assert "python src/eval.py … model.model_args.pretrained_model_name_or_path=saves/x" in record.getMessage()


@pytest.mark.parametrize(("layout", "stage"), [("ddp", 0), ("zero", 2)])
def test_whole_weights_are_evaluated_on_the_main_process(layout: str, stage: int) -> None:
    assert Trainer(layout, stage, evaluators={"tofu": object()}).evaluate() == {"main": 1.0}


def test_one_process_and_no_evaluators_are_upstreams_business() -> None:
    assert Trainer("local", processes=1, evaluators={"tofu": object()}).evaluate() == {"upstream": 1.0}
    assert Trainer("zero", 3).evaluate() == {"upstream": 1.0}
