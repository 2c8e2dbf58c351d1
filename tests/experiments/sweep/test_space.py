"""Spaces: what is read, what is refused before any trial."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import optuna
import pytest

from rosu_llm.errors import ConfigError
from rosu_llm.experiments.sweep.space import SearchAxis, read_space
from rosu_llm.recipes.settings import build

BASE: dict[str, Any] = {"method": "rosu", "learning_rate": 1e-3}

#: Settings that decide what a trial is asked, or of which model.
MEASURED = ["model_name_or_path", "forget_data", "retain_data", "holdout_data", "chat_format", "limit"]
MEASURED += ["question_key", "answer_key", "text_key", "max_length", "min_length"]


def axes(*entries: str, **base: Any) -> dict[str, SearchAxis]:
    return {axis.key: axis for axis in read_space(None, entries, {**BASE, **base}).axes}


def test_a_file_and_the_short_form_say_the_same(tmp_path: Path) -> None:
    file = tmp_path / "space.yaml"
    file.write_text(
        "method: [rosu, uam]\nlearning-rate: {low: 1e-6, high: 1e-4, log: true}\n"
        "num_train_epochs: {low: 2, high: 10, step: 2}\nmax_steps: {low: 8, high: 64}\nlora_r: [null, 8]\n"
    )
    short = ("method=rosu,uam", "learning_rate=1e-6..1e-4:log", "num-train-epochs=2..10:2", "max_steps=8..64")
    read = read_space(file, [], BASE)
    assert read.axes[:4] == read_space(None, short, BASE).axes
    assert [axis.kind for axis in read.axes] == ["choice", "float", "float", "int", "choice"]
    assert read.axes[1] == SearchAxis("learning_rate", "float", low=1e-6, high=1e-4, log=True)
    assert read.axes[4].choices == (None, 8)


def test_whole_numbers_stay_whole_and_others_do_not() -> None:
    found = axes("rho=1..2", "gradient_accumulation_steps=1..8:log", "beta=0.1..0.4", "include_mean=false,true")
    assert found["rho"].kind == "float" and found["rho"].low == 1.0 and isinstance(found["rho"].low, float)
    assert found["gradient_accumulation_steps"].kind == "int"
    assert found["beta"] == SearchAxis("beta", "float", low=0.1, high=0.4)
    assert found["include_mean"].choices == (False, True)


def test_suggestions_lie_in_the_space() -> None:
    space = read_space(None, ["learning_rate=1e-6..1e-4:log", "method=rosu,uam", "max_steps=8..64:8"], BASE)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    drawn = [space.suggest(study.ask()) for _ in range(60)]
    assert list(drawn[0]) == ["learning_rate", "method", "max_steps"]
    assert {values["method"] for values in drawn} == {"rosu", "uam"}
    assert {values["max_steps"] for values in drawn} == set(range(8, 65, 8))
    rates = [values["learning_rate"] for values in drawn]
    assert all(1e-6 <= rate <= 1e-4 for rate in rates)
    assert 0.25 < sum(rate < 1e-5 for rate in rates) / 60 < 0.75  # a tenth of them without log


def test_all_values_of_an_axis() -> None:
    assert axes("rho=0.1..0.7:0.2")["rho"].values() == pytest.approx([0.1, 0.3, 0.5, 0.7])
    assert axes("max_steps=8..11")["max_steps"].values() == [8, 9, 10, 11]
    assert axes("method=rosu,uam")["method"].values() == ["rosu", "uam"]
    for entry in ("rho=0.1..0.7", "max_steps=8..64:log"):
        with pytest.raises(ConfigError, match="give it a list or a step"):
            next(iter(axes(entry).values())).values()


def test_lists_as_choices_come_back_as_lists(tmp_path: Path) -> None:
    (tmp_path / "space.yaml").write_text("lora_target_modules: [all-linear, [q_proj, v_proj]]")
    first, second = read_space(tmp_path / "space.yaml", [], BASE).axes[0].choices
    assert first == "all-linear" and isinstance(second, str)  # Optuna stores only scalars
    assert build({**BASE, "lora_target_modules": second})[0].lora_target_modules == ["q_proj", "v_proj"]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "Nothing to search"),
        (["rhoo=0.1..0.2"], "Did you mean rho"),
        (["rho"], "is not understood"),
        (["rho="], "is not understood"),
        (["rho=0.1..x"], "cannot be read as float"),
        (["rho=0.5..0.1"], "low ≥ high"),
        (["rho=0..1:log"], "low must be above 0"),
        (["rho=0..1:-0.1"], "must be above 0 and at most"),
        (["rho=0..inf"], "not finite"),
        (["rho=-1..1"], "cannot be searched at rho = -1.0: rho=-1.0 is no perturbation radius"),
        (["rho=0.1,0.1"], "a choice twice"),
        (["rho=0.1..0.2", "rho=0.3,0.4"], "in the space twice"),
        (["method=rosu,nope"], "cannot be searched at method = nope"),
        (["method=1..3"], "has no range"),
        (["bf16=0..1"], "cannot be read as bool"),
        (["max_steps=8.5..64"], "cannot be read as int"),
        (["seed=0,1"], "pass --seed"),
        (["output_dir=a,b"], "trials lie below --out"),
        (["rho=0.1..0.8:lin"], "ends in 'lin', which is neither log nor a step: write rho=0.1..0.8 for even"),
        (["rho=0.1..0.8:"], "ends in '', which is neither log nor a step"),
        (["rho=0.1,,0.2"], "'rho=0.1,,0.2' has an empty choice between its commas"),
        (["rho=0.1..0.2,0.4"], "rho='0.1..0.2' cannot be read as float"),
        (["retain_data=../a,b"], "no common Agg_MU"),
        *(([f"{key}=a,b"], f"^{key} is nothing to search: .*no common Agg_MU") for key in MEASURED),
        (["save_strategy=no,epoch"], "the same for every trial"),
    ],
)
def test_mistakes_are_told_before_any_trial(entries: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_space(None, entries, BASE)


def test_paths_are_no_ranges() -> None:
    assert axes("run_name=../a,../b")["run_name"].choices == ("../a", "../b")
    assert axes("run_name=../a")["run_name"].choices == ("../a",)


@pytest.mark.parametrize("text", ["rho: 0.4", "rho: []", "rho: {low: 0.1}", "rho: {low: 0.1, high: 0.2, lg: true}"])
def test_what_is_no_space_in_a_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "space.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"^rho: "):
        read_space(tmp_path / "space.yaml", [], BASE)


def test_values_are_checked_together_with_the_first_of_the_others() -> None:
    """Gradient difference has no pull to calibrate, ROSU has; only combinations with a first value are looked at."""
    assert axes("method=rosu,graddiff", "calibrate=off,2.5")
    with pytest.raises(ConfigError, match=r"at method = graddiff: .*no pull to calibrate"):
        axes("method=rosu,graddiff", "calibrate=2.5,off")
