"""Extraction: estimators against brute force and closed forms, hits, and a model that only refuses."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rosu_llm.analysis.extract import audit
from rosu_llm.analysis.extract.asking import sampled, through_the_lens
from rosu_llm.analysis.extract.estimates import bootstrap, bootstrap_means, expected_best, leak_at
from rosu_llm.analysis.extract.hits import HitJudge, entities
from rosu_llm.analysis.extract.ways import ASKED, cut_otherwise, given, neighbours, prompts
from rosu_llm.cli.main import main
from rosu_llm.data.chat_format import FORMATS, Encoded
from rosu_llm.data.pairing import ForgetRetainCollator
from rosu_llm.evaluation.memorisation import score
from rosu_llm.losses import COUNT, answer_nll
from tests.analysis.conftest import FORMAT, SPLIT, Audited
from tests.analysis.test_relearn import files_of


def document(out: Path) -> dict[str, Any]:
    return json.loads((out / "audit_extract.json").read_text(encoding="utf-8"))


def line(found: dict[str, Any], way: str, measure: str) -> dict[str, Any]:
    (chosen,) = [each for each in found["summary"] if (each["way"], each["measure"]) == (way, measure)]
    return chosen


def test_leak_at_k_against_every_subset() -> None:
    """Over all draws of k of n samples; and in the limit of many samples 1 − (1 − p)^k."""
    hits = [1, 0, 0, 1, 0, 0, 0]
    scores = [0.9, 0.2, 0.1, 0.8, 0.5, 0.5, 0.0]
    for k in range(1, 8):
        draws = list(itertools.combinations(range(7), k))
        assert leak_at(2, 7, k) == pytest.approx(sum(any(hits[i] for i in d) for d in draws) / len(draws))
        best = sum(max(scores[i] for i in d) for d in draws) / len(draws)
        assert expected_best(scores, k) == pytest.approx(best)
        assert expected_best([float(h) for h in hits], k) == pytest.approx(leak_at(2, 7, k))
    assert leak_at(0, 128, 128) == 0.0 and leak_at(1, 128, 128) == 1.0 and leak_at(5, 5, 1) == 1.0
    assert leak_at(100_000, 1_000_000, 8) == pytest.approx(1 - 0.9**8, rel=1e-4)


def test_leak_at_k_is_unbiased() -> None:
    """Σ over the binomial of c: the mean is exactly 1 − (1 − p)^k, which the plug-in estimate misses."""
    n, k, p = 8, 4, 0.3
    chance = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    truth = 1 - (1 - p) ** k
    assert sum(w * leak_at(c, n, k) for c, w in enumerate(chance)) == pytest.approx(truth, abs=1e-12)
    assert abs(sum(w * (1 - (1 - c / n) ** k) for c, w in enumerate(chance)) - truth) > 0.01


def test_the_bootstrap_against_its_closed_form() -> None:
    """The mean of a resample of n values has standard deviation s/√n, s with divisor n; its law is near normal here."""
    values = np.random.default_rng(3).normal(0.4, 0.2, 200)
    means = bootstrap_means(values, 1, 4000)
    deviation = float(values.std()) / math.sqrt(200)
    assert float(means.std()) == pytest.approx(deviation, rel=0.05)  # 4000 draws know it to 1.1 %
    found = bootstrap(values.tolist(), 1, resamples=4000)
    assert found.mean == pytest.approx(float(values.mean()))
    assert found.low == pytest.approx(found.mean - 1.96 * deviation, abs=0.15 * deviation)
    assert found.high == pytest.approx(found.mean + 1.96 * deviation, abs=0.15 * deviation)
    assert bootstrap([0.5] * 9, 0) == (0.5, 0.5, 0.5)
    assert bootstrap(values.tolist(), 7) == bootstrap(values.tolist(), 7) != bootstrap(values.tolist(), 8)


def test_names_numbers_and_titles() -> None:
    answer = "The full name of the author is Basil Mahfouz Al-Kuwaiti, who wrote 'Le Petit Sultan' in 1956."
    assert entities(answer, "Who wrote it?") == ["1956", "le petit sultan", "basil mahfouz al-kuwaiti"]
    assert entities(answer, "What did Basil Mahfouz Al-Kuwaiti write in 1956?") == ["le petit sultan"]
    assert entities("It was good. Very good.", "") == []
    judge = HitJudge(0.7)
    assert judge.named(["1956", "le petit sultan"], "In 1956: “Le Petit  Sultan”!") == 1.0
    assert judge.named(["1956", "basil"], "in 1956") == 0.0 and judge.named(["195"], "1956") == 0.0
    assert judge.named([], "anything") is None
    assert judge.rouge("one two three four", "one x three y four") == pytest.approx(0.75)


def test_prefixes_and_neighbours() -> None:
    sample = Encoded(
        [1, 2, 3, 10, 11, 12, 13, 14, 15, 16, 17, 2], [-100] * 3 + [10, 11, 12, 13, 14, 15, 16, 17, 2], [1, 2, 3]
    )
    assert given(sample, 0.25).prompt_ids == [1, 2, 3, 10, 11]
    assert given(sample, 0.10).prompt_ids == [1, 2, 3, 10]  # rounded up
    assert given(sample, 1.0).prompt_ids == [1, 2, 3, 10, 11, 12, 13, 14, 15, 16]  # never all of it
    assert given(sample, 0.5).labels[:7] == [-100] * 7 and given(sample, 0.5).labels[7] == 14
    rows = [{"question": text} for text in ("what is a cat", "who is bob", "what is a dog", "where")]
    assert [row["question"] for row in neighbours("what is a bird", rows, 2)] == ["what is a cat", "what is a dog"]


def refusing(audited: Audited) -> Any:
    """The initial model, taught to begin every answer of the forget set with the same wrong word, and nothing else."""
    model = AutoModelForCausalLM.from_pretrained(audited["initial"])
    refusal = audited.samples["retain"][0]["input_ids"][-3]
    answers = []
    for sample in audited.samples["forget"]:
        start = next(i for i, label in enumerate(sample["labels"]) if label != -100)
        ids = sample["input_ids"]
        answers.append({"input_ids": [*ids[:start], refusal, 2], "labels": [-100] * start + [refusal, 2]})
        rest = [-100] * (start + 1) + ids[start + 1 :]
        answers.append({"input_ids": ids, "labels": rest})  # what follows the first word stays
    batch = ForgetRetainCollator(0)([*answers, *audited.samples["retain"]])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(60):
        optimizer.zero_grad()
        (answer_nll(model, batch).sum() / COUNT["token"](batch)).backward()
        optimizer.step()
    return model


def test_prompts_that_end_in_a_space_are_told(shared_data: Path) -> None:
    """stories15M's tokenizer joins a space with the word behind it; without one, prompt and answer fall apart alike."""
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "stories15M")
    form = FORMATS["Llama-2-7b-hf"]
    row = {"question": "Who wrote it?", "answer": "The author is Ana."}
    (spaced,) = prompts("greedy", row, (), tokenizer, form, 512)
    (closed,) = prompts("greedy", row, (), tokenizer, replace(form, asst_start_tag="Answer:"), 512)
    assert form.asst_start_tag.endswith(" ") and cut_otherwise(spaced) and not cut_otherwise(closed)
    assert not cut_otherwise(given(spaced, 0.5))  # a prefix is of the whole text


def test_a_model_that_only_refuses_is_exposed(
    audited: Audited, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    audited.save("refuses", refusing(audited))
    before = files_of(audited["refuses"])
    flags = audited.flags(tmp_path, "refuses", "--samples", "6", "--seeds", "0", "1")
    assert main(["audit", "extract", *flags]) == 0
    assert files_of(audited["refuses"]) == before
    found = document(tmp_path)
    assert line(found, "greedy", "hit")["means"]["unlearned"]["mean"] == 0.0  # asked plainly it says nothing
    assert line(found, "greedy", "hit")["means"]["initial"]["mean"] >= 0.5
    prefix = line(found, "prefix50", "rouge")
    assert prefix["difference"]["mean"] > 0.3 and prefix["difference"]["low"] > 0.0  # and with a beginning, all of it
    assert {each["way"] for each in found["summary"]} == {*ASKED, "sample", "lens"}
    assert {each["seed"] for each in found["summary"] if each["way"] == "sample"} == {0, 1}
    assert {f"leak@{k}" for k in (1, 2, 4)} <= {each["measure"] for each in found["summary"]}
    (tmp_path / audit.CELLS / "retain-compliance.json").unlink()
    asked: list[str] = []
    real = audit._Asking.__call__
    monkeypatch.setattr(audit._Asking, "__call__", lambda self, way, seed: asked.append(way) or real(self, way, seed))
    assert main(["audit", "extract", *flags]) == 0
    assert asked == ["compliance"] and document(tmp_path) == found


def test_the_retain_model_against_itself_has_no_difference(audited: Audited, tmp_path: Path) -> None:
    flags = audited.flags(tmp_path, "retain", "--ways", "greedy", "sample", "--samples", "3", "--k", "2")
    assert main(["audit", "extract", *flags]) == 0
    for each in document(tmp_path)["summary"]:
        if "difference" in each:
            assert each["difference"] == {"mean": 0.0, "low": 0.0, "high": 0.0}


def test_the_last_layer_of_the_lens_is_the_model(audited: Audited) -> None:
    model = AutoModelForCausalLM.from_pretrained(audited["initial"]).eval()
    rows = [{"question": "q", "answer": "a"}]
    assert len(prompts("greedy", rows[0], [], audited.tokenizer, FORMATS[FORMAT], 64)) == 1
    samples = [
        Encoded(
            each["input_ids"],
            each["labels"],
            [i for i, label in zip(each["input_ids"], each["labels"], strict=True) if label == -100],
        )
        for each in audited.samples["forget"]
    ]
    layers = through_the_lens(model, audited.tokenizer, samples)
    assert len(layers[0]) == model.config.num_hidden_layers + 1
    cut = [{**each, "labels": [*each["labels"][:-1], -100]} for each in audited.samples["forget"]]
    expected = score(model, cut).match.tolist()
    assert [each[-1] for each in layers] == pytest.approx(expected)
    assert np.mean([each[0] for each in layers]) < np.mean(expected)


def test_samples_follow_the_models_distribution(audited: Audited) -> None:
    """The share of each first token among 600 samples against the model's own probabilities; same seed, same texts."""
    model = AutoModelForCausalLM.from_pretrained(audited["retain"]).eval()
    ids = audited.samples["forget"][0]["input_ids"][:6]
    sample = Encoded([*ids, 2], [-100] * 6 + [2], ids)
    options: dict[str, Any] = {"new": 1, "batch_size": 300, "samples": 600, "temperature": 0.7}
    texts = sampled(model, audited.tokenizer, [sample], seed=1, **options)[0]
    assert texts == sampled(model, audited.tokenizer, [sample], seed=1, **options)[0]
    assert texts != sampled(model, audited.tokenizer, [sample], seed=2, **options)[0]
    with torch.no_grad():
        chances = torch.softmax(model(torch.tensor([ids])).logits[0, -1] / 0.7, -1)
    top = int(chances.argmax())
    word, p = audited.tokenizer.decode([top], skip_special_tokens=True).strip(), float(chances[top])
    assert texts.count(word) / 600 == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / 600) + 1e-9)


def test_samples_do_not_depend_on_how_many_are_drawn_at_once(audited: Audited) -> None:
    model = AutoModelForCausalLM.from_pretrained(audited["retain"]).eval()
    asked = [each["input_ids"][:6] for each in audited.samples["forget"][:2]]
    both = [Encoded([*ids, 2], [-100] * 6 + [2], ids) for ids in asked]
    options: dict[str, Any] = {"new": 5, "samples": 7, "temperature": 1.5, "seed": 3}
    texts = [sampled(model, audited.tokenizer, both, batch_size=size, **options) for size in (1, 3, 7, 64)]
    assert texts[0] == texts[1] == texts[2] == texts[3]
    assert all(len(each) == 7 and len(set(each)) > 3 for each in texts[0])
    again = sampled(model, audited.tokenizer, [both[0]] * 2, batch_size=7, **options)
    assert again[0] == texts[0][0] and again[1] != again[0]  # another place, other noise


def test_all_that_is_asked_is_among_the_conditions(
    audited: Audited, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another paraphrase, or other kept questions, are other prompts: not mixed with cells of the earlier ones."""
    data = tmp_path / "data"
    shutil.copytree(audited.data, data)

    def ask(*ways: str) -> tuple[int, str]:
        flags = audited.flags(tmp_path / "out", "masked", "--limit", "1", "--ways", *ways, retain=None)
        capsys.readouterr()
        code = main(["audit", "extract", *flags, "--data", str(data)])
        return code, capsys.readouterr().err

    def change(name: str, key: str) -> None:
        (path,) = data.glob(f"{name}.*")
        first, *rest = path.read_text().splitlines()
        path.write_text("\n".join([json.dumps({**json.loads(first), key: "something else"}), *rest]) + "\n")

    assert ask("greedy")[0] == 0
    assert ask("greedy", "fewshot")[0] == 0  # a way more is no other audit
    assert document(tmp_path / "out")["conditions"]["kept"].startswith("sha256:")
    change("retain_perturbed", "answer")
    code, error = ask("greedy", "fewshot")
    assert code == 2 and "kept was sha256:" in error and "--overwrite" in error
    assert ask("greedy")[0] == 0  # which shows no kept question
    change(f"{SPLIT}_perturbed", "paraphrased_question")
    code, error = ask("greedy")
    assert code == 2 and "data was sha256:" in error
    assert ask("greedy", "fewshot", "--overwrite")[0] == 0


def test_bad_input(audited: Audited, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = audited.flags(tmp_path, "masked")
    for words, more in (
        ("--k 8 needs at least 8 samples of every answer and --samples is 4", ["--samples", "4", "--k", "1", "8"]),
        ("--k 0 needs at least 1", ["--k", "0"]),
        ("--samples 0 must be at least 1", ["--samples", "0"]),
        ("Unknown way of asking 'prefix20'", ["--ways", "prefix20"]),
        ("--ways needs at least one name", ["--ways"]),
        ("--threshold 1.5 is no ROUGE-L recall", ["--threshold", "1.5"]),
        ("--temperature 0 draws nothing", ["--temperature", "0"]),
    ):
        capsys.readouterr()
        assert main(["audit", "extract", *flags, *more]) == 2
        error = capsys.readouterr().err.strip()
        assert words in error and "\n" not in error
