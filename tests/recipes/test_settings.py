"""A run from YAML and flags: every value reaches its field with its type, or an error names it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import HfArgumentParser, TrainingArguments

from rosu_llm import ROSUConfig
from rosu_llm.analysis.coupling.recipe import diagnosis_recipe
from rosu_llm.errors import ConfigError
from rosu_llm.recipes.settings import RunArguments, build, read_config, read_flags
from rosu_llm.training.presets import PRESETS, WITHOUT_UNSEEN
from tests.conftest import ROOT


def one(key: str, value: Any) -> Any:
    """The value a setting ends up with."""
    run, config = build({key: value})
    return getattr(run if hasattr(run, key) else config, key)


def from_yaml(folder: Path, text: str) -> dict[str, Any]:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return read_config(path)


def same(a: Any, b: Any) -> bool:
    """Equal, and neither text nor a truth value where the other is a number."""
    kinds = [bool if isinstance(x, bool) else str if isinstance(x, str) else None for x in (a, b)]
    return kinds[0] is kinds[1] and bool(a == b)


# -- flags --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "values"),
    [
        ([], {}),
        (["--rho", "0.4"], {"rho": "0.4"}),
        (["--rho=0.4"], {"rho": "0.4"}),
        (["--per-device-train-batch-size", "8"], {"per_device_train_batch_size": "8"}),
        (["--per_device_train_batch_size=8"], {"per_device_train_batch_size": "8"}),
        (["--overwrite"], {"overwrite": "true"}),
        (["--overwrite", "--rho", "1"], {"overwrite": "true", "rho": "1"}),
        (["--simnpo-delta", "-0.5"], {"simnpo_delta": "-0.5"}),
        (["--run-name", "a=b"], {"run_name": "a=b"}),
        (["--run-name=a=b"], {"run_name": "a=b"}),
        (["--run-name="], {"run_name": ""}),
        (["--rho", "1", "--rho", "2"], {"rho": "2"}),
    ],
    ids=str,
)
def test_flags_are_names_with_hyphens(flags: list[str], values: dict[str, str]) -> None:
    assert read_flags(flags) == values


@pytest.mark.parametrize("flags", [["rho", "0.4"], ["--rho", "0.4", "0.5"], ["-r", "1"], ["--"]], ids=str)
def test_what_is_no_flag_is_named(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match="is not understood: settings are written --key value"):
        read_flags(flags)


# -- YAML ---------------------------------------------------------------------------------------------


def test_yaml_is_a_flat_mapping_hyphens_or_not(tmp_path: Path) -> None:
    values = from_yaml(tmp_path, "rho: 0.4\nmax-steps: 3\n# comment\nmodel_name_or_path: a/b\n")
    assert values == {"rho": 0.4, "max_steps": 3, "model_name_or_path": "a/b"}


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_file_sets_nothing(tmp_path: Path, text: str) -> None:
    assert from_yaml(tmp_path, text) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- rho\n- 0.4\n", "must hold 'key: value' lines, not a list"),
        ("rho 0.4\n", "not a str"),
        ("a: [1\n", "not valid"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"run\.yaml.*{message}"):
        from_yaml(tmp_path, text)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.yaml", tmp_path):
        with pytest.raises(ConfigError, match="is not a file"):
            read_config(path)


@pytest.mark.parametrize("name", ["configs/recipes/tofu_llama-3.2-1b.yaml", Path("configs/vision/cifar10.yaml")])
def test_files_of_the_package_are_found_from_any_folder(
    name: str | Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_config(name) == yaml.safe_load((ROOT / name).read_text())
    own = tmp_path / name  # one's own goes first
    own.parent.mkdir(parents=True)
    own.write_text("rho: 0.3")
    assert read_config(name) == {"rho": 0.3}
    with pytest.raises(ConfigError, match=r"not a file\. Recipes that come with the package"):
        read_config("configs/recipes/other.yaml")


# -- names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "near"),
    [("rhoo", "rho"), ("learning_rat", "learning_rate"), ("forget_dat", "forget_data"), ("calibrat", "calibrate")],
)
def test_an_unknown_key_comes_with_the_nearest(key: str, near: str) -> None:
    with pytest.raises(ConfigError, match=rf"Unknown setting '{key}'.*Did you mean .*\b{near}\b"):
        build({key: 1})


def test_a_key_near_nothing_gets_no_guess() -> None:
    with pytest.raises(ConfigError, match="Unknown setting 'xyzzy'") as caught:
        build({"xyzzy": 1})
    assert "Did you mean" not in str(caught.value)


# -- types of the method's and the run's settings --------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("rho", "0.3", 0.3),
        ("tau", "1e-5", 1e-5),
        ("calibrate_every", "3", 3),
        ("upcast", "false", False),
        ("upcast", "No", False),
        ("upcast", "on", True),
        ("overwrite", "true", True),
        ("beta", "tied", "tied"),
        ("beta", "0.25", 0.25),
        ("calibrate", "off", "off"),
        ("calibrate", "holdout", "holdout"),
        ("calibrate", "2.5", 2.5),
        ("max_length", "64", 64),
        ("limit", "none", None),
        ("limit", "None", None),
        ("limit", "7", 7),
        ("lora_r", "null", None),
        ("lora_r", "8", 8),
        ("lora_target_modules", "all-linear", "all-linear"),
        ("lora_target_modules", "[q_proj, v_proj]", ["q_proj", "v_proj"]),
        ("lora_target_modules", "q_proj,v_proj", "q_proj,v_proj"),
        ("model_name_or_path", "none/of-yours", "none/of-yours"),
        ("question_key", "1", "1"),
        ("resume_from_checkpoint", "true", True),
        ("resume_from_checkpoint", "out/checkpoint-3", "out/checkpoint-3"),
    ],
)
def test_text_becomes_what_the_field_is(key: str, text: str, value: Any) -> None:
    assert same(one(key, text), value)


@pytest.mark.parametrize("text", ["false", "none"])
def test_not_resuming_can_be_said_in_a_flag(text: str) -> None:
    assert not one("resume_from_checkpoint", text)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("kappa", "abc"),
        ("kappa", ""),
        ("calibrate_every", "1.5"),
        ("upcast", "maybe"),
        ("max_length", "none"),
        ("lora_r", "x"),
    ],
)
def test_text_of_the_wrong_kind_is_named(key: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}='{text}' cannot be read as"):
        build({key: text})


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ("tau: 1e-5", "tau", 1e-5),  # YAML 1.1 reads this as text
        ("tau: 1.0e-5", "tau", 1e-5),
        ("rho: 1", "rho", 1),
        ("calibrate: off", "calibrate", "off"),  # and this as a boolean
        ("calibrate: 'off'", "calibrate", "off"),
        ("calibrate: 2", "calibrate", 2),
        ("beta: tied", "beta", "tied"),
        ("upcast: no", "upcast", False),
        ("limit: none", "limit", None),
        ("limit: null", "limit", None),
        ("limit: ~", "limit", None),
        ("limit:", "limit", None),
        ("lora_target_modules: [q_proj]", "lora_target_modules", ["q_proj"]),
    ],
)
def test_yaml_becomes_what_the_field_is(tmp_path: Path, line: str, key: str, value: Any) -> None:
    run, config = build(from_yaml(tmp_path, line + "\n"))
    assert same(getattr(run if hasattr(run, key) else config, key), value)


@pytest.mark.parametrize(
    "line",
    ["rho: null", "rho: [0.4]", "rho: yes", "method: {name: rosu}", "max_length: 1.5", "upcast: 3", "lora_r: [1]"],
)
def test_yaml_values_of_the_wrong_kind_are_named(tmp_path: Path, line: str) -> None:
    """A ConfigError with the key, not a TypeError from the depths and not a silent acceptance."""
    with pytest.raises(ConfigError, match=line.split(":")[0]):
        build(from_yaml(tmp_path, line + "\n"))


def test_a_broken_list_in_a_flag_is_named() -> None:
    with pytest.raises(ConfigError, match="lora_target_modules"):
        build({"lora_target_modules": "[q_proj,"})


def test_checks_of_the_method_run() -> None:
    with pytest.raises(ConfigError, match="rho=-1"):
        build({"rho": "-1"})


# -- types of the trainer's settings ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("learning_rate", "1e-5", 1e-5),
        ("max_steps", "7", 7),
        ("per_device_train_batch_size", "8", 8),
        ("num_train_epochs", "2", 2.0),
        ("bf16", "false", False),
        ("use_cpu", "true", True),
        ("gradient_checkpointing", "false", False),
        ("save_total_limit", "none", None),
        ("save_total_limit", "2", 2),
        ("disable_tqdm", "true", True),
        ("run_name", "seven", "seven"),
        ("seed", "7", 7),
    ],
)
def test_text_becomes_what_the_trainers_field_is(key: str, text: str, value: Any) -> None:
    """The classes of TrainingArguments annotate with types, ours with text: both count."""
    assert same(one(key, text), value)


def test_types_are_known_also_after_transformers_parser_has_looked_at_them() -> None:
    """HfArgumentParser replaces the text of annotations by types in the fields themselves."""
    before = {f: f.type for f in dataclasses.fields(ROSUConfig)}
    try:
        HfArgumentParser(ROSUConfig)
        assert same(one("rho", "0.3"), 0.3)
        assert same(one("upcast", "no"), False)
        assert same(one("beta", "tied"), "tied")
    finally:
        for f, kind in before.items():
            f.type = kind


@pytest.mark.parametrize(("key", "text"), [("learning_rate", "fast"), ("max_steps", "1.5"), ("bf16", "maybe")])
def test_text_of_the_wrong_kind_for_the_trainer_is_named(key: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}='{text}' cannot be read as"):
        build({key: text})


@pytest.mark.parametrize(
    ("line", "key", "meant"),
    [
        ("learning_rate: 1e-5", "learning_rate", {"learning_rate": 1e-5}),
        ("learning_rate: 1.0e-5", "learning_rate", {"learning_rate": 1e-5}),
        ("save_strategy: no", "save_strategy", {"save_strategy": "no"}),
        ("save_strategy: epoch", "save_strategy", {"save_strategy": "epoch"}),
        ("report_to: none", "report_to", {"report_to": "none"}),
        ("report_to: []", "report_to", {"report_to": []}),
        ("lr_scheduler_type: cosine", "lr_scheduler_type", {"lr_scheduler_type": "cosine"}),
        ("optim: sgd", "optim", {"optim": "sgd"}),
        ("bf16: false", "bf16", {"bf16": False}),
    ],
)
def test_yaml_means_what_it_means_in_python(tmp_path: Path, line: str, key: str, meant: dict[str, Any]) -> None:
    """As written in the file is as passed to TrainingArguments."""
    _, config = build(from_yaml(tmp_path, line + "\n"))
    assert same(getattr(config, key), getattr(TrainingArguments(output_dir=str(tmp_path), **meant), key))


@pytest.mark.parametrize(
    "values", [{"lr_scheduler_type": "cosin"}, {"optim": "adamm"}, {"save_strategy": "never"}], ids=str
)
def test_a_name_the_trainer_does_not_know_is_an_error_of_the_package(values: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        build(values)


# -- the run ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["model_name_or_path", "forget_data", "retain_data"])
def test_what_a_run_cannot_do_without_is_named_as_key_and_flag(missing: str) -> None:
    given = {"model_name_or_path": "m", "forget_data": "f", "retain_data": "r", missing: ""}
    with pytest.raises(ConfigError, match=f"{missing} is missing.*--{missing.replace('_', '-')} "):
        RunArguments(**given).check_run()


@pytest.mark.parametrize("dtype", ["float16", "bf16", "double"])
def test_only_types_that_can_be_trained_are_loaded(dtype: str) -> None:
    with pytest.raises(ConfigError, match=f"dtype '{dtype}'"):
        RunArguments("m", "f", "r", dtype=dtype).check_run()


def test_settings_land_in_their_group() -> None:
    run, config = build({"forget_data": "f.jsonl", "rho": 0.2, "output_dir": "out", "lora_r": 4})
    assert (run.forget_data, run.lora_r) == ("f.jsonl", 4)
    assert (config.rho, config.output_dir) == (0.2, "out")


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "recipes").rglob("*.yaml")), ids=lambda p: p.name)
def test_shipped_recipes_are_understood(path: Path) -> None:
    """Every key is known; bf16 is checked by the trainer against the hardware, so it is left out here."""
    values = {**read_config(path), "bf16": False, "use_cpu": True}
    run, config = build(values)
    assert yaml.safe_load(path.read_text(encoding="utf-8"))
    assert config.output_dir
    for name in ("model_name_or_path", "forget_data", "retain_data"):
        run_value = getattr(run, name) or "filled in on the command line"
        setattr(run, name, run_value)
    run.check_run()


@pytest.mark.parametrize("name", list(PRESETS))
def test_presets_are_settings_to_start_from(name: str) -> None:
    """Those that are given go before, and a preset works alone."""
    config = build({"preset": name, "output_dir": "unused"}).config
    assert {key: getattr(config, key) for key in PRESETS[name]} == dict(PRESETS[name])
    config = build({"preset": name, "rho": 0.05, "forget_until": 2.0, "output_dir": "unused"}).config
    assert (config.rho, config.forget_until, config.amplify) == (0.05, 2.0, PRESETS[name]["amplify"])


@pytest.mark.parametrize("method", ["graddiff", "npo", "minmax", "forget_only", "torchjd.UPGrad"])
def test_a_preset_serves_other_methods(method: str) -> None:
    """With what they understand: here, everything that bounds."""
    config = build({"preset": "recommended", "method": method, "output_dir": "unused"}).config
    assert (config.forget_until, config.forget_level, config.fallback) == ("holdout", "both", "residue")
    with pytest.raises(ConfigError, match="fallback='paper' does nothing for"):
        build({"preset": "recommended", "method": method, "fallback": "paper", "output_dir": "unused"}).config.rule()
    with pytest.raises(ConfigError, match="Unknown method 'graddif'"):
        build({"preset": "recommended", "method": "graddif", "output_dir": "unused"}).config.rule()


@pytest.mark.parametrize(("method", "loss"), [("graddiff", "nll"), ("npo", "npo"), ("minmax", "nll"), ("rosu", "odds")])
def test_the_forget_loss_of_a_preset_belongs_to_its_method(method: str, loss: str) -> None:
    config = build({"preset": "small", "method": method, "output_dir": "unused"}).config
    assert (config.forget_loss, config.forget_until) == (loss, "holdout")
    config = build({"preset": "small", "method": "minmax", "forget_loss": "odds", "output_dir": "unused"}).config
    assert config.forget_loss == "odds"


@pytest.mark.parametrize("preset", ["recommended", "small"])
@pytest.mark.parametrize(
    ("given", "level"),
    [
        ({"method": "altpo"}, "sequence"),
        ({"forget_loss": "idk_dpo"}, "sequence"),
        ({"forget_until": "alternates"}, "sequence"),
        ({"keep_best": "depth"}, None),
        ({"rho": "auto"}, None),
    ],
)
def test_a_preset_leaves_out_what_does_not_go_along(preset: str, given: dict[str, Any], level: str | None) -> None:
    config = build({"preset": preset, "output_dir": "unused", **given}).config
    assert config.forget_level == (level or PRESETS[preset]["forget_level"])
    assert config.forget_until == given.get("forget_until", "holdout")


@pytest.mark.parametrize("preset", ["recommended", "small"])
@pytest.mark.parametrize("method", ["idk_nll", "ft", "ssd"])
def test_what_a_preset_gave_is_named_where_it_cannot_work(preset: str, method: str) -> None:
    with pytest.raises(ConfigError, match=rf"forget_until.* Given by preset='{preset}': forget_until"):
        build({"preset": preset, "method": method, "output_dir": "unused"})
    with pytest.raises(ConfigError, match="forget_until") as caught:
        build({"preset": preset, "method": method, "forget_until": 2.0, "forget_level": "sequence", "output_dir": "u"})
    assert "Given by" not in str(caught.value)
    assert build({"preset": preset, "method": method, "forget_until": "off", "output_dir": "unused"}).config.rule()


def test_the_recommended_preset_is_the_papers_but_for_its_depth() -> None:
    other = {key for key, value in PRESETS["recommended"].items() if PRESETS["paper"].get(key) != value}
    assert other == {"forget_until", "forget_level", "forget_margin", "forget_draw"}


def test_an_unknown_preset_comes_with_the_known_ones() -> None:
    for name in ("papers", ["papers"]):
        with pytest.raises(ConfigError, match=r"Unknown preset .*papers.*: it is not one of paper, recommended, small"):
            build({"preset": name, "output_dir": "unused"})


def test_a_diagnosis_leaves_out_what_a_run_would_look_at() -> None:
    values = {"forget_until": "alternates", "alternates": "a", "budget": 0.1, "budget_measure": "kl", "output_dir": "u"}
    for name in ("none", *PRESETS):
        arguments, config = diagnosis_recipe({**values, "preset": name})
        assert (config.forget_until, config.budget, config.budget_measure) == ("off", None, "loss")
        assert arguments.alternates is None
    assert diagnosis_recipe({**values, "method": "altpo"}).arguments.alternates == "a"


@pytest.mark.parametrize("own", [{"forget_beyond": "return"}, {"forget_refresh": 5}, {"keep_best": "depth"}])
def test_nothing_that_needs_unseen_data_is_left_where_it_is_left_out(own: dict[str, Any]) -> None:
    """For measurements of the model alone, from any recipe."""
    values = {**PRESETS["recommended"], "budget": 0.1, **own, "output_dir": "unused"}
    assert build(values).config.forget_until == "holdout"
    config = build({**values, **WITHOUT_UNSEEN}).config
    assert (config.forget_until, config.budget, config.calibrate) == ("off", None, "off")
