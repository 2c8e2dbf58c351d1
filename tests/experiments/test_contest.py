"""The comparison: the same search for all, selection by Agg_MU on one seed, judgement on others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rosu_llm.errors import ConfigError, DataError
from rosu_llm.experiments.contest import (
    CONTESTANTS,
    Contest,
    paired_differences,
    ranking,
    run_contest,
    search_variants,
    sign_flip_p,
)
from rosu_llm.experiments.sweep.scoring import answers_scoring
from rosu_llm.presentation.contest import contest_section, paired_tests
from rosu_llm.presentation.writers import markdown
from rosu_llm.recipes.settings import build
from rosu_llm.training.presets import PRESETS
from tests.experiments.ablate.stand_in import StandIn
from tests.experiments.stand_in import Silent

COMMON = {"learning_rate": (1e-4, 1e-3, 1e-2), "num_train_epochs": (1, 2)}
GOLD = {"forget_em": 0.6, "mia_auc": 0.5, "retain_prob": 0.9, "holdout_em": 0.6, "forget_prob": 0.1}


class Landed(StandIn):
    """Figures follow from the settings: GradDiff forgets most at a high rate, ROSU lands on the retrained model."""

    columns = dict.fromkeys(GOLD, "")

    def refer(self, name: str, seed: int, steps: Any) -> Any:
        figures = {**GOLD, "forget_em": 1.0, "forget_prob": 0.9} if name == "before" else GOLD
        return super().refer(name, seed, steps)._replace(measure=lambda: dict(figures))

    def start(self, values: Any, seed: int, folder: Path, steps: Any) -> Any:
        self.calls.append((values["method"], values["learning_rate"], seed))
        return super().start({"rho": 0, **values}, seed, folder, steps)


def figures(values: Any, seed: int) -> dict[str, float]:
    if values["method"] == "rosu":
        return {**GOLD, "forget_em": 0.6 + 0.01 * seed, "mia_auc": 0.5}
    if values["learning_rate"] == 1e-4:
        raise DataError("diverged")
    return {**GOLD, "forget_em": 1e-3 / values["learning_rate"] * 0.5, "mia_auc": 0.1}


def task() -> Landed:
    return Landed(figures, references={"before": "before", "retain_only": "gold"})


CONTEST = Contest(["rosu_paper_bounded", "graddiff"], COMMON, 6, 10, [1, 2, 3])


def test_all_try_the_same_rates_and_lengths_with_settings_that_exist() -> None:
    contest = Contest(list(CONTESTANTS), COMMON, 4, 10, [0])
    drawn = {
        name: [tuple(variant.settings[key] for key in COMMON) for variant in search_variants(name, contest)]
        for name in CONTESTANTS
    }
    assert len({tuple(own) for own in drawn.values()}) == 1
    assert len(set(drawn["rosu"])) == 4
    for name, one in CONTESTANTS.items():
        for variant in search_variants(name, contest):
            build({**variant.settings, "output_dir": "unused", "use_cpu": True})
        assert (one.settings.get("forget_until", "off") == "holdout") == name.endswith(
            ("_bounded", "_returned", "_reversed", "_odds")
        )
    assert CONTESTANTS["rosu_paper"].settings == PRESETS["paper"]
    assert CONTESTANTS["rosu_paper_bounded"].settings == PRESETS["recommended"]
    assert CONTESTANTS["graddiff_odds"].settings == {**CONTESTANTS["graddiff_reversed"].settings, "forget_loss": "odds"}
    assert not {"npo_odds", "simnpo_odds"} & CONTESTANTS.keys()


def test_a_setting_that_several_search_has_the_same_values_in_all_of_them() -> None:
    contest = Contest(list(CONTESTANTS), COMMON, 4, 10, [0], values={"rho": (0.02, 0.05, 0.1, 0.4)})
    tried = {
        name: {key: [variant.settings[key] for variant in search_variants(name, contest)] for key in one.knobs}
        for name, one in CONTESTANTS.items()
    }
    radii = [own["rho"] for own in tried.values() if "rho" in own]
    assert len(radii) == 30 and all(own == radii[0] for own in radii)
    assert sorted(radii[0]) == [0.02, 0.05, 0.1, 0.4]  # the task's, each once
    for name in ("graddiff", "npo", "gu", "rosu"):
        assert tried[name] == tried[f"{name}_bounded"] == tried[f"{name}_returned"] == tried[f"{name}_reversed"]
        assert tried[name] == tried.get(f"{name}_odds", tried[name])
    for own in tried.values():
        for key, values in own.items():
            counts = [values.count(value) for value in values]
            assert max(counts) <= min(counts) + 1, (key, values)  # none again before all were tried


def test_the_highest_agg_mu_of_the_searched_seed_is_judged_on_the_others(tmp_path: Path) -> None:
    stand_in = task()
    document = run_contest(stand_in, CONTEST, tmp_path, Silent())
    graddiff = document["entries"][1]
    # by hand: among the rates that did not fail, the highest leaves the lowest EM and so the highest Mem
    assert graddiff["selected"]["learning_rate"] == 1e-2
    assert sum(trial["error"] is not None for trial in graddiff["trials"]) == 2
    assert [own["seed"] for own in graddiff["per_seed"]] == [1, 2, 3]
    score = answers_scoring(stand_in).scores
    known = {"initial": {**GOLD, "forget_em": 1.0, "forget_prob": 0.9}, "retain": GOLD}
    for own in graddiff["per_seed"]:
        assert own["distance"] == pytest.approx(abs(0.05 - 0.6) + 0.4)
        assert own["scores"] == score(own["figures"], known)
    searched = {call for call in stand_in.calls if len(call) == 3 and call[2] == 10}
    assert {call[1] for call in searched} == set(COMMON["learning_rate"])


def test_the_closest_comes_first_and_nothing_runs_twice(tmp_path: Path) -> None:
    document = run_contest(task(), CONTEST, tmp_path, Silent())
    assert [entry["name"] for entry in ranking(document["entries"])] == ["rosu_paper_bounded", "graddiff"]
    differences = paired_differences(*ranking(document["entries"]))
    assert differences == pytest.approx([0.95 - 0.01, 0.95 - 0.02, 0.95 - 0.03])
    assert "ROSU, recommended* is closest, by 0.930" in paired_tests(document["entries"])[0]
    page = markdown.section(contest_section(document), pictures={})
    rows = [line for line in page.splitlines() if line.startswith("| ROSU, recommended*")]
    assert len(rows) == 3  # figures, scores, search
    assert "0.620 ± 0.010" in rows[0]
    again = Silent()
    assert run_contest(task(), CONTEST, tmp_path, again) == document
    assert set(again.ends) == {"kept", "failed"}  # a failed trial is not tried again
    assert not again.labels


def test_the_sign_flip_test_is_exact() -> None:
    assert sign_flip_p([0.1, 0.2, 0.3, 0.4, 0.5]) == 2 / 32
    assert sign_flip_p([0.0, 0.0]) == 1.0
    # by hand: sums of ±1 ±2 ±3 are 6 4 2 0 0 2 4 6 in size; four of eight reach |1 + 2 − 3 …| = 4
    assert sign_flip_p([-1.0, 2.0, 3.0]) == 4 / 8


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="searched and reported"):
        Contest(["rosu"], COMMON, 2, 1, [0, 1])
    with pytest.raises(ConfigError, match="7 trials cannot be different: there are 6"):
        Contest(["rosu"], COMMON, 7, 10, [0])
    with pytest.raises(ConfigError, match="graddif"):
        Contest(["graddif"], COMMON, 2, 10, [0])
    common = {"learning_rate": (1e-4,)}
    with pytest.raises(DataError, match="No trial of GradDiff worked; the last one: diverged"):
        run_contest(task(), Contest(["graddiff"], common, 1, 10, [0]), tmp_path, Silent())
