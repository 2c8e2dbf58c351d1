"""The method's settings: wrong ones are refused by name, right ones survive every way they travel."""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Iterator
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
from transformers import HfArgumentParser, TrainingArguments

from rosu_llm import MethodArguments, ROSUConfig
from rosu_llm.errors import ConfigError, RosuError
from rosu_llm.geometry import METHODS, Gram
from rosu_llm.geometry.methods.registry import OPTIONS
from rosu_llm.recipes.settings import build


@pytest.fixture(autouse=True)
def _unchanged_fields() -> Iterator[None]:
    """HfArgumentParser writes into the types of the fields it looks at."""
    before = {f: f.type for cls in (MethodArguments, ROSUConfig) for f in dataclasses.fields(cls)}
    yield
    for f, kind in before.items():
        f.type = kind


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"method": "roso"}, "method 'roso'.*Did you mean 'rosu'"),
    ({"forget_loss": "npoo"}, "forget_loss 'npoo'.*Did you mean 'npo'"),
    ({"retain_loss": "mse"}, "retain_loss 'mse'"),
    ({"forget_loss": "kl"}, "forget_loss='kl' cannot work"),
    ({"retain_loss": "npo"}, "retain_loss='npo' cannot work"),
    ({"retain_loss": "simnpo"}, "retain_loss='simnpo' cannot work"),
    ({"rho": 0.0}, "rho=0.0"),
    ({"rho": -0.1}, "rho=-0.1"),
    ({"rho": nan}, "rho=nan"),
    ({"rho": inf}, "rho=inf"),
    ({"rho_schedule": "linear"}, "rho_schedule 'linear'"),
    ({"jacobian": "relax"}, "jacobian 'relax'.*Did you mean 'relaxed'"),
    ({"method": "minmax", "jacobian": "full"}, "jacobian 'full'"),
    ({"tau": -1e-8}, "tau=-1e-08"),
    ({"tau": nan}, "tau=nan"),
    ({"tau_mode": "rel"}, "tau_mode 'rel'"),
    ({"eps_q": -1.0}, "eps_q=-1.0"),
    ({"beta": "tight"}, "beta='tight'"),
    ({"beta": -0.1}, "beta=-0.1"),
    ({"beta": "-0.1"}, "beta=-0.1"),
    ({"beta": "nan"}, "beta=nan"),
    ({"beta": inf}, "beta=inf"),
    ({"beta": True}, "beta='true'"),
    ({"beta_start": -1.0}, "beta_start=-1.0"),
    ({"beta_high": nan}, "beta_high=nan"),
    ({"beta_low": -0.5}, "beta_low=-0.5"),
    ({"beta_warmup_ratio": 1.5}, "beta_warmup_ratio=1.5"),
    ({"beta_warmup_ratio": nan}, "beta_warmup_ratio=nan"),
    ({"amplify": "indirect"}, "amplify 'indirect'.*Did you mean 'direct'"),
    ({"kappa": -1.0}, "kappa=-1.0"),
    ({"kappa": nan, "amplify": "matched"}, "kappa=nan"),
    ({"amplify": "matched", "beta": 0.1}, "beta=0.1 would be ignored"),
    ({"amplify": "matched", "beta": "two_phase"}, "beta='two_phase' would be ignored"),
    ({"method": "graddiff", "forget_weight": -1.0}, "forget_weight=-1.0"),
    ({"method": "graddiff", "retain_weight": nan}, "retain_weight=nan"),
    ({"npo_beta": 0.0}, "npo_beta=0.0"),
    ({"simnpo_beta": -4.5}, "simnpo_beta=-4.5"),
    ({"simnpo_beta": nan}, "simnpo_beta=nan"),
    ({"reduction": "window_token"}, "reduction 'window_token'.*Did you mean 'window_tokens'"),
    ({"calibrate": "held-out"}, "calibrate='held-out'"),
    ({"calibrate": True}, "calibrate='true'"),
    ({"calibrate": "holdout", "calibrate_margin": 0.0}, "calibrate_margin=0.0"),
    ({"calibrate": 2.5, "calibrate_margin": nan}, "calibrate_margin=nan"),
    ({"calibrate": "holdout", "calibrate_every": 0}, "calibrate_every=0"),
    ({"calibrate": "holdout", "method": "graddiff"}, "method='graddiff' has no pull to calibrate.*minmax.*rosu"),
    ({"calibrate": 0.0, "method": "uam"}, "method='uam' has no pull to calibrate"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG, ids=[str(w) for w, _ in WRONG])
def test_a_setting_that_cannot_work_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        MethodArguments(**settings).check_method()
    assert isinstance(caught.value, RosuError)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)


def test_the_trainers_configuration_checks_itself(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rho=-1"):
        ROSUConfig(output_dir=str(tmp_path), rho=-1.0)


@pytest.mark.parametrize("target", [nan, inf, "nan", "-inf"])
def test_a_target_loss_that_is_no_number_is_refused(target: str | float) -> None:
    """The pull's factor would be 0 at every step: a run that silently forgets nothing."""
    with pytest.raises(ConfigError, match="calibrate"):
        MethodArguments(calibrate=target).check_method()


RIGHT: list[dict[str, Any]] = [
    {},
    *({"method": m} for m in ("rosu", "minmax", "uam", "graddiff", "ft", "ng")),
    {"method": "graddiff", "forget_loss": "npo", "retain_loss": "kl", "forget_weight": 0.0},
    {"forget_loss": "simnpo", "simnpo_delta": -0.5},
    {"rho": 1e-3, "rho_schedule": "cosine", "jacobian": "none", "tau": 0.0, "tau_mode": "relative", "eps_q": 0.0},
    {"beta": "two_phase", "beta_start": 0.0, "beta_warmup_ratio": 0.0},
    {"beta": 0.0},
    {"beta": 0.3, "amplify": "direct"},
    {"amplify": "matched", "kappa": 0.0},
    {"amplify": "optimizer", "beta": 0.3},
    {"calibrate": "holdout", "calibrate_every": 10, "calibrate_margin": 0.1, "method": "minmax"},
    {"calibrate": 0.0},
    {"calibrate_margin": -1.0},  # irrelevant while calibrate is off
    {"reduction": "micro_mean", "upcast": False},
]


@pytest.mark.parametrize("settings", RIGHT, ids=str)
def test_settings_that_work_pass_and_survive_a_round_trip(settings: dict[str, Any], tmp_path: Path) -> None:
    arguments = MethodArguments(**settings)
    arguments.check_method()
    expected = arguments.method_dict()
    assert {name: expected[name] for name in settings} == settings
    assert set(expected) == {f.name for f in dataclasses.fields(MethodArguments)}
    again = MethodArguments(**json.loads(json.dumps(expected)))
    again.check_method()
    assert again == arguments
    config = ROSUConfig(output_dir=str(tmp_path), **expected)
    for other in (pickle.loads(pickle.dumps(config)), dataclasses.replace(config)):
        assert other.method_dict() == expected
    reread = HfArgumentParser(ROSUConfig).parse_dict(json.loads(config.to_json_string()), allow_extra_keys=True)[0]
    assert reread.method_dict() == expected


@pytest.mark.parametrize(
    ("given", "meant"),
    [("0.2", 0.2), ("1e-3", 1e-3), ("0", 0.0), (1, 1), ("tied", "tied"), ("two_phase", "two_phase")],
)
def test_beta_as_text_or_number(given: Any, meant: Any) -> None:
    arguments = MethodArguments(beta=given)
    arguments.check_method()
    assert arguments.beta == meant


@pytest.mark.parametrize(
    ("given", "meant"), [(False, "off"), ("off", "off"), ("holdout", "holdout"), ("2.5", 2.5), (2.5, 2.5), (3, 3)]
)
def test_calibrate_as_yaml_and_flags_hand_it_over(given: Any, meant: Any) -> None:
    """YAML reads a bare off as a boolean, flags hand over text."""
    arguments = MethodArguments(calibrate=given)
    arguments.check_method()
    assert arguments.calibrate == meant
    assert not isinstance(arguments.calibrate, bool)


def test_defaults_are_the_trainers_own_where_the_method_has_none(tmp_path: Path) -> None:
    ours, theirs = ROSUConfig(output_dir=str(tmp_path)), TrainingArguments(output_dir=str(tmp_path))
    for f in dataclasses.fields(TrainingArguments):
        if f.init and f.name not in ("remove_unused_columns", "logging_dir"):
            assert getattr(ours, f.name) == getattr(theirs, f.name), f.name
    assert ours.remove_unused_columns is False


def test_no_setting_of_the_method_shadows_one_of_the_trainer() -> None:
    names = {f.name for f in dataclasses.fields(MethodArguments)}
    assert not names & {f.name for f in dataclasses.fields(TrainingArguments)}


def test_every_setting_explains_itself() -> None:
    assert all(f.metadata.get("help", "").endswith(".") for f in dataclasses.fields(MethodArguments))


def test_the_schedules_are_those_the_settings_describe() -> None:
    """Checked at the ends and in the middle, where the shape is known without a formula."""
    arguments = MethodArguments(rho=0.4, rho_schedule="cosine")
    assert arguments.rho_at(0, 100) == 0.4
    assert arguments.rho_at(50, 100) == pytest.approx(0.2)  # half-way down; the cosine of 90° is 6e-17
    assert 0.0 < arguments.rho_at(99, 100) < 1e-3
    tied = MethodArguments().beta_schedule()
    assert tied.at(3, 10, learning_rate=0.02, rho=0.4) == pytest.approx(0.05)  # one division
    assert tied.at(3, 10, learning_rate=0.0, rho=0.4) == 0.0
    phases = MethodArguments(beta="two_phase", beta_start=0.1, beta_high=0.5, beta_low=0.2, beta_warmup_ratio=0.5)
    values = [phases.beta_schedule().at(t, 10, learning_rate=1.0, rho=1.0) for t in range(10)]
    assert values == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5] + [0.2] * 5)  # a straight line, then flat


def test_transformers_own_parser_reads_the_settings(tmp_path: Path) -> None:
    """HfArgumentParser is how training scripts read a TrainingArguments; ours is one."""
    flags = ["--output_dir", str(tmp_path), "--rho", "0.3", "--beta", "tied", "--calibrate", "off"]
    config = HfArgumentParser(ROSUConfig).parse_args_into_dataclasses(flags)[0]
    assert (config.rho, config.beta, config.calibrate) == (0.3, "tied", "off")
    config = HfArgumentParser(ROSUConfig).parse_args_into_dataclasses([*flags[:2], "--beta", "0.25"])[0]
    assert config.beta == 0.25


def test_every_option_of_a_method_is_a_setting_with_its_default_and_words() -> None:
    """A method's file is the only place that says what its options are; the configuration repeats none of it."""
    settings = {f.name: f for f in dataclasses.fields(MethodArguments)}
    for name, declared in OPTIONS.items():
        assert settings[name].default == declared.default
        assert settings[name].metadata["help"] == declared.metadata["help"]
    for method, rule in METHODS.items():
        for name, declared in rule.options().items():
            assert declared.default == OPTIONS[name].default, f"{method} has another default for {name}"


@pytest.mark.parametrize(("fallback", "falls_back"), [("residue", True), ("paper", False)])
def test_the_papers_own_fallback_can_be_chosen(fallback: str, falls_back: bool) -> None:
    """f parallel to r leaves nothing but τ's residue: Algorithm 1 to the letter goes on, the default does not."""
    rule = MethodArguments(fallback=fallback).rule()
    gram = Gram({("f", "f"): 1e6, ("f", "r"): 1.0, ("r", "r"): 1e-6})
    assert rule.inner(gram, 0.4).fallback is falls_back


def test_fallback_is_rosus_alone() -> None:
    with pytest.raises(ConfigError, match=r"fallback='paper' does nothing for method='graddiff'.* use one of rosu\."):
        MethodArguments(method="graddiff", fallback="paper").check_method()


@pytest.mark.parametrize("name", ["npo", "simnpo", "idk_nll", "idk_dpo", "altpo", "undial", "wga", "satimp", "rmu"])
def test_a_method_may_be_named_after_its_loss(name: str, tmp_path: Path) -> None:
    """Every row of the paper's tables is one word, in a recipe and in Python."""
    common = {"model_name_or_path": "m", "forget_data": "f", "retain_data": "r", "output_dir": str(tmp_path)}
    config = build({**common, "use_cpu": True, "method": name}).config
    assert (config.method, config.forget_loss) == ("graddiff", name)
    if name == "rmu":
        assert type(config).__name__ == "RepresentationConfig"
    else:
        same = ROSUConfig(str(tmp_path), method=name, use_cpu=True, report_to=[])
        assert (same.method, same.forget_loss) == ("graddiff", name)
    with pytest.raises(ConfigError, match="leave one of them out"):
        build({**common, "method": name, "forget_loss": "wga" if name == "npo" else "npo"})


@pytest.mark.parametrize("name", ["divergence", "nll", "kl"])
def test_losses_that_are_no_methods_do_not_name_one(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"[Mm]ethod '{name}'"):
        ROSUConfig(str(tmp_path), method=name)
