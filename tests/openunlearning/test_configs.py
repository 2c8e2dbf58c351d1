"""Every shipped configuration composes, its settings exist, and its name and the registry agree."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import get_type_hints

import pytest
import yaml

from rosu_llm.evaluation.tofu.summary import ATTACKS
from rosu_llm.geometry import METHODS
from rosu_llm.openunlearning.arguments import APART, HOLDOUT, NATIVE, read_method_args
from rosu_llm.openunlearning.losses import register_losses
from rosu_llm.openunlearning.registration import TRAINERS
from rosu_llm.training.presets import PRESETS
from rosu_llm.training.values import coerce
from tests.conftest import ROOT
from tests.openunlearning.standin_run import composed

OURS = ROOT / "configs" / "openunlearning"
TRAINER_FILES = sorted(f.stem for f in (OURS / "trainer").glob("*.yaml"))
EXPERIMENTS = sorted(
    str(f.relative_to(OURS / "experiment").with_suffix("")) for f in OURS.glob("experiment/unlearn/**/*.yaml")
)
DATASETS = sorted(f.stem for f in (OURS / "data" / "datasets").glob("*.yaml"))


def settings_of(config: object, trainer: str) -> object:
    register_losses()
    arguments = {k: v for k, v in config.trainer.get("method_args", {}).items() if k != HOLDOUT}  # type: ignore[attr-defined]
    return read_method_args(trainer, arguments)


@pytest.mark.parametrize("name", TRAINER_FILES)
def test_trainer_configurations(name: str) -> None:
    config = composed(f"trainer={name}", return_hydra_config=True)
    handler = config.trainer.handler
    assert handler == name  # so that task_name=${trainer.handler} tells runs apart
    assert settings_of(config, handler).method == TRAINERS[handler].method  # type: ignore[attr-defined]
    assert "rosu_llm" in config.hydra.callbacks
    assert "learning_rate" in config.trainer.args  # inherited


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiments(name: str) -> None:
    config = composed(f"experiment={name}", return_hydra_config=True)
    settings = settings_of(config, config.trainer.handler)
    assert "rosu_llm" in config.hydra.callbacks
    if settings.forget_until == "holdout":  # type: ignore[attr-defined]
        preset = PRESETS["recommended"]
        assert {key: getattr(settings, key) for key in preset} == preset
        (dataset,) = config.trainer.method_args[HOLDOUT].values()
        assert dataset.args.hf_args.name == "holdout10"
        assert dataset.args.hf_args.split == "train[:20]"
        attacks = config.eval.tofu.metrics
        places = [attacks[name] for name in ATTACKS.values()] + [attacks.privleak.pre_compute.mia_min_k]
        assert {place.datasets.TOFU_QA_holdout.args.hf_args.split for place in places} == {"train[20:]"}


@pytest.mark.parametrize("name", TRAINER_FILES)
def test_every_setting_can_be_overridden_without_a_plus_sign(name: str) -> None:
    """A setting that is added to the dataclass needs a line in configs/openunlearning/trainer/rosu_llm."""
    kind = resolve_name(TRAINERS[name].arguments)
    base = "representation" if name == "ROSURepresentation" else "tokens"
    defaults = {f.name: f.default for f in dataclasses.fields(kind)}
    written = yaml.safe_load((OURS / "trainer" / "rosu_llm" / f"{base}.yaml").read_text())["method_args"]
    extra = {HOLDOUT: None} if base == "tokens" else {}
    hints = get_type_hints(kind)
    made = kind(**{k: coerce(k, v, hints[k]) for k, v in written.items() if k not in extra})
    made._coerce()  # names or numbers
    assert dataclasses.asdict(made) == dataclasses.asdict(kind())
    assert written.keys() == {**defaults, **extra}.keys()
    config = composed(f"trainer={name}", *(f"trainer.method_args.{key}=null" for key in defaults))
    assert set(config.trainer.method_args) == {*defaults, *extra}


@pytest.mark.parametrize("name", DATASETS)
def test_data_sets(name: str) -> None:
    config = composed("trainer=ROSU", f"+data/datasets@trainer.method_args.holdout_data={name}")
    (dataset,) = config.trainer.method_args.holdout_data.values()
    assert dataset.handler == "QADataset"


def test_the_papers_values() -> None:
    settings = settings_of(composed("experiment=unlearn/tofu/rosu"), "ROSU")
    values = {
        "rho": 0.4,
        "beta": "tied",
        "amplify": "optimizer",
        "jacobian": "relaxed",
        "tau": 1e-8,
        "eps_q": 1e-6,
        "calibrate": "off",
        "forget_until": "off",
    }
    assert {key: getattr(settings, key) for key in values} == values


def test_every_alias_has_a_configuration_of_its_name() -> None:
    assert set(TRAINERS) <= set(TRAINER_FILES)


def test_every_method_can_be_named() -> None:
    """A new method needs a line in the alias table (or in that of methods OpenUnlearning has itself)."""
    assert {alias.method for alias in TRAINERS.values()} | {*NATIVE, *APART} == set(METHODS)


def test_other_applications_see_nothing_of_ours(tmp_path: Path) -> None:
    """The same group name elsewhere neither gains our options nor loads our package."""
    import subprocess

    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer" / "mine.yaml").write_text("x: 1\n")
    (tmp_path / "config.yaml").write_text("defaults: [{trainer: mine}]\n")
    code = (
        "import sys\nfrom hydra import compose, initialize_config_dir\n"
        f"with initialize_config_dir(config_dir={str(tmp_path)!r}, version_base=None):\n"
        "    compose('config')\n"
        "    try:\n        compose('config', overrides=['trainer=ROSU'])\n"
        "    except Exception as error:\n        print(type(error).__name__)\n"
        "print(sorted(m for m in sys.modules if m.partition('.')[0] in ('rosu_llm', 'torch', 'transformers')))\n"
        "print('hydra_plugins.rosu_llm_plugin' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.stdout.splitlines() == ["MissingConfigException", "[]", "True"], done.stderr
