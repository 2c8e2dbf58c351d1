"""The methods of the paper's TOFU table inside OpenUnlearning: experiment, trainer, and what each needs besides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from ..errors import ConfigError, unknown
from ..geometry import METHODS
from .offline import IDK, alternates
from .registration import TRAINERS

DEFAULT, WITH_IDK = "unlearn/tofu/default", "unlearn/tofu/idk"
_FORGET, _FORGET_IDK = "data.forget.TOFU_QA_forget", "data.forget.TOFU_QA_forget_idk"


@dataclass(frozen=True)
class TofuMethod:
    """One row of the table: what to type for it.

    Attributes:
        trainer: None where the experiment chooses it.
        overrides: further words; ``{alternates}`` stands for AltPO's file.
        held_out: its training looks at held-out questions, which every evaluation of the table then sets aside.
    """

    trainer: str | None
    experiment: str = DEFAULT
    overrides: tuple[str, ...] = ()
    held_out: bool = False

    @property
    def has_radius(self) -> bool:
        """Whether the trainer perturbs by ρ."""
        if self.trainer is None:
            return True
        return self.trainer in TRAINERS and METHODS[TRAINERS[self.trainer].method].perturbs

    def needs(self, model: str, split: str) -> Iterator[tuple[Path, str]]:
        """Files that must be there, and the command that makes each."""
        if self.experiment == WITH_IDK:
            yield IDK, "python setup_data.py --idk"
        if any("{alternates}" in word for word in self.overrides):
            make = f"python generate.py dataset_config.dataset_kwargs.name={split}"
            yield alternates(model, split), f"cd community/methods/AltPO && {make}"


#: The ten baselines of the paper's TOFU table in its order, then ours. Other names are taken as trainers.
TABLE: dict[str, TofuMethod] = {
    "GradDiff": TofuMethod("GradDiff"),
    "NPO": TofuMethod("NPO"),
    "IdkDPO": TofuMethod("DPO", WITH_IDK),
    # OpenUnlearning's data with alternate answers, as in its community/methods/AltPO/run.sh.
    "AltPO": TofuMethod(
        "DPO",
        overrides=(
            f"{_FORGET}.handler=QAwithAlternateDataset",
            f"~{_FORGET}.args.hf_args.name",
            f"{_FORGET}.args.hf_args.path=json",
            f"+{_FORGET}.args.hf_args.data_files={{alternates}}",
            f"+{_FORGET}.args.alternate_key=alternate",
            f"+{_FORGET}.args.return_original=true",
        ),
    ),
    "PCGrad": TofuMethod("PCGrad"),
    # OpenUnlearning has no such trainer. GradDiff with γ = −1 lowers the loss of its forget answers, and the data set
    # can give "I don't know" as these.
    "IdkNLL": TofuMethod(
        "GradDiff", WITH_IDK, (f"{_FORGET_IDK}.args.return_original=false", "trainer.method_args.gamma=-1.0")
    ),
    "UNDIAL": TofuMethod("UNDIAL"),
    "SimNPO": TofuMethod("SimNPO"),
    "UAM": TofuMethod("UAM"),
    "RMU": TofuMethod("RMU"),
    "ROSU": TofuMethod("ROSU"),
    "ROSU_matched": TofuMethod("ROSU_matched"),
    "ROSU_recommended": TofuMethod(None, "unlearn/tofu/rosu_recommended", held_out=True),
}


def tofu_method(name: str, checkout: Path) -> TofuMethod:
    """A row of the table, or any trainer of the checkout or of ours with its default experiment."""
    if name in TABLE:
        return TABLE[name]
    places = (checkout / "configs" / "trainer", files("rosu_llm.configs.openunlearning") / "trainer")
    found = {file.name.removesuffix(".yaml") for place in places for file in place.iterdir() if file.is_file()}
    trainers = found - {"finetune"}
    if name not in trainers:
        raise unknown("method", name, {*TABLE, *trainers})
    return TofuMethod(name)


def check_files(names: dict[str, TofuMethod], work: Path, model: str, split: str) -> None:
    """Raise before any work for a method whose data is not there."""
    for name, method in names.items():
        for path, command in method.needs(model, split):
            if not (work / path).is_file():
                raise ConfigError(f"{name} needs {path}, which is not there: {command}")
