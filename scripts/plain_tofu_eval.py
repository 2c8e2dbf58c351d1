"""TOFU's metrics one at a time, as benchmarks usually do it: what ``bench_eval.py`` measures ours against.

Every metric makes its own pass over its data, in the order of the data, in batches of a fixed size, padded to the
longest, with the logits of every token. Results that another metric is made from are reused.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

FORMAT = "Llama-3.2-1B-Instruct"  # of the benchmark's default model: chat template, system prompt, date
#: Metric → configuration and field of the answers it is measured on.
PROBABILITIES = {
    f"{name}_Q_A_{kind}Prob": (config, field)
    for name, config in (
        ("forget", "forget10_perturbed"),
        ("retain", "retain_perturbed"),
        ("ra", "real_authors_perturbed"),
        ("wf", "world_facts_perturbed"),
    )
    for kind, field in (("", "answer"), ("PARA_", "paraphrased_answer"), ("PERT_", "perturbed_answer"))
    if not (kind == "PARA_" and name in ("ra", "wf"))
}
ROWS = ("forget10", "holdout10", *dict.fromkeys(config for config, _ in PROBABILITIES.values()))


class Straightforward:
    """One metric at a time; names and definitions as in the benchmark."""

    def __init__(
        self, model: Any, tokenizer: Any, data: Path, classifier: Path, *, batch_size: int, max_new_tokens: int
    ) -> None:
        from rosu_llm.data.chat_format import FORMATS

        self.model, self.tokenizer, self.form = model, tokenizer, FORMATS[FORMAT]
        self.rows = {name: [json.loads(line) for line in (data / f"{name}.json").open()] for name in ROWS}
        self.classifier, self.batch_size, self.max_new_tokens = classifier, batch_size, max_new_tokens
        self.pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id

    def __call__(self) -> dict[str, float]:
        import numpy as np
        from scipy.stats import hmean

        forget, holdout = ("forget10_perturbed", "answer"), ("holdout10", "answer")
        found: dict[str, float] = {}
        losses: dict[str, Any] = {}
        for metric, (config, field) in PROBABILITIES.items():
            count = len(self.rows[config])
            losses[metric] = np.array(self.each(config, field, self.loss)).reshape(count, -1)
            found[metric] = float(np.exp(-losses[metric]).mean())
        found["exact_memorization"] = float(np.mean(self.each(*forget, self.exact)))
        found["extraction_strength"] = float(np.mean(self.each(*forget, self.strength)))
        for metric, score in (
            ("mia_loss", self.loss),
            ("mia_zlib", self.compressed),
            ("mia_min_k", self.min_k),
            ("mia_min_k_plus_plus", self.min_k_plus_plus),
        ):
            found[metric] = auc(self.each(*forget, score), self.each(*holdout, score))
        texts = {}
        for name in ("forget", "retain", "ra", "wf"):
            found[f"{name}_Q_A_ROUGE"], texts[name] = self.rouge(PROBABILITIES[f"{name}_Q_A_Prob"][0])
        found["forget_Q_A_gibberish"] = self.fluency(texts["forget"])
        for name in ("forget", "retain", "ra", "wf"):
            true = np.exp(-losses[f"{name}_Q_A_{'PARA_' if name in ('forget', 'retain') else ''}Prob"].mean(1))
            false = np.exp(-losses[f"{name}_Q_A_PERT_Prob"].mean(1))
            ratio = false / (true + 1e-10)
            if name == "forget":
                found["forget_truth_ratio"] = float(np.minimum(ratio, 1 / (ratio + 1e-10)).mean())
                found["forget_truth_ratio_prob_mean"] = float((true / (true + false + 1e-10)).mean())
            else:
                found[f"{name}_Truth_Ratio"] = float(np.maximum(0, 1 - ratio).mean())
            if name in ("ra", "wf"):
                right, wrong = (np.exp(-losses[f"{name}_Q_A_{kind}Prob"]).sum(1) for kind in ("", "PERT_"))
                found[f"{name}_Q_A_Prob_normalised"] = float((right / (right + wrong + 1e-10)).mean())
        utility = [found["retain_Q_A_Prob"], *(found[f"{name}_Q_A_Prob_normalised"] for name in ("ra", "wf"))]
        utility += [found[f"{name}_{kind}"] for name in ("retain", "ra", "wf") for kind in ("Q_A_ROUGE", "Truth_Ratio")]
        found["model_utility"] = float(hmean(utility))
        found["privleak"] = (1 - found["mia_min_k"] - 0.5) / (0.5 + 1e-10) * 100
        return found

    def batches(self, config: str, field: str) -> Iterator[Sequence[Any]]:
        from rosu_llm.data.chat_format import encode_chat

        samples = [
            encode_chat(row["question"], answer, self.tokenizer, self.form)
            for row in self.rows[config]
            for answer in ([row[field]] if isinstance(row[field], str) else row[field])
        ]
        for start in range(0, len(samples), self.batch_size):
            yield samples[start : start + self.batch_size]

    def each(self, config: str, field: str, score: Callable[[Any, Any], float]) -> list[float]:
        """``score(log-probabilities, labels)`` of every answer, from a pass of its own."""
        import torch

        found = []
        for batch in self.batches(config, field):
            longest = max(len(sample.input_ids) for sample in batch)
            ids = torch.tensor([[*s.input_ids, *[self.pad] * (longest - len(s.input_ids))] for s in batch])
            with torch.no_grad():
                logits = self.model(input_ids=ids, attention_mask=ids != self.pad).logits
            logs = torch.log_softmax(logits.float(), -1)
            for at, sample in enumerate(batch):
                first = len(sample.prompt_ids)
                labels = torch.tensor(sample.input_ids[first:])
                found.append(score(logs[at, first - 1 : len(sample.input_ids) - 1], labels))
        return found

    @staticmethod
    def loss(logs: Any, labels: Any) -> float:
        return float(-logs.gather(-1, labels[:, None]).mean())

    def compressed(self, logs: Any, labels: Any) -> float:
        text = self.tokenizer.decode(labels, skip_special_tokens=True)
        return self.loss(logs, labels) / len(zlib.compress(text.encode()))

    @staticmethod
    def exact(logs: Any, labels: Any) -> float:
        return float((logs.argmax(-1) == labels)[:-1].float().mean())

    @staticmethod
    def strength(logs: Any, labels: Any) -> float:
        hits = (logs.argmax(-1) == labels)[:-1].tolist()
        return next((1 - k / len(hits) for k in range(len(hits)) if all(hits[k:])), 1 / len(hits))

    @staticmethod
    def min_k(logs: Any, labels: Any) -> float:
        return lowest(logs.gather(-1, labels[:, None]).squeeze(-1)[:-1])

    @staticmethod
    def min_k_plus_plus(logs: Any, labels: Any) -> float:
        mean = (logs.exp() * logs).sum(-1)
        variance = (logs.exp() * logs.square()).sum(-1) - mean.square()
        z = (logs.gather(-1, labels[:, None]).squeeze(-1) - mean) / variance.clamp(min=1e-6).sqrt()
        return lowest(z[:-1])

    def rouge(self, config: str) -> tuple[float, list[str]]:
        import torch
        from rouge_score.rouge_scorer import RougeScorer

        scorer = RougeScorer(["rougeL"], use_stemmer=True)
        scores, texts = [], []
        for batch in self.batches(config, "answer"):
            longest = max(len(sample.prompt_ids) for sample in batch)
            ids = torch.tensor([[*[self.pad] * (longest - len(s.prompt_ids)), *s.prompt_ids] for s in batch])
            with torch.no_grad():
                output = self.model.generate(
                    ids,
                    attention_mask=(ids != self.pad).long(),
                    do_sample=False,
                    max_new_tokens=self.max_new_tokens,
                    pad_token_id=self.tokenizer.eos_token_id,
                )
            for sample, new in zip(batch, output[:, longest:], strict=True):
                asked, whole = (self.clean(ids) for ids in (sample.prompt_ids, sample.input_ids))
                texts.append(self.clean(new).strip())
                scores.append(scorer.score(whole.replace(asked, "").strip(), texts[-1])["rougeL"].recall)
        return sum(scores) / len(scores), texts

    def clean(self, ids: Any) -> str:
        return str(self.tokenizer.clean_up_tokenization(self.tokenizer.decode(ids, skip_special_tokens=True)))

    def fluency(self, texts: list[str]) -> float:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.classifier)
        classifier = AutoModelForSequenceClassification.from_pretrained(self.classifier, dtype=torch.float32)
        scores: list[float] = []
        for start in range(0, len(texts), 32):
            part = texts[start : start + 32]
            inputs = tokenizer(part, return_tensors="pt", padding=True, truncation=True, max_length=32)
            with torch.no_grad():
                scores += torch.softmax(classifier(**inputs).logits, -1)[:, 0].tolist()
        return sum(scores) / len(scores)


def auc(members: list[float], others: list[float]) -> float:
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score([0] * len(members) + [1] * len(others), [*members, *others]))


def lowest(values: Any) -> float:
    return float(-values.sort().values[: max(1, int(len(values) * 0.4))].mean())
