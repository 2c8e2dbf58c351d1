import json
import os
from pathlib import Path

import torch

from evals.metrics import get_metrics


class StandIn:
    """Writes the mean absolute weight; fails on request, as broken evaluators do."""

    def __init__(self, config):
        self.fail = config.fail

    def evaluate(self, model, output_dir, tokenizer, template_args):
        if self.fail:
            raise ValueError("a metric is broken")
        model.eval()
        torch.rand(3)
        value = float(sum(p.detach().abs().mean() for p in model.parameters()))
        logits = model(torch.tensor([[3, 4, 5]])).logits
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        record = {"weights": value, "rank": int(os.environ.get("RANK", "0")), "logits": float(logits.float().sum())}
        (Path(output_dir) / f"STANDIN_{record['rank']}.json").write_text(json.dumps(record))
        return {"weights": value}


class TOFUEvaluator:
    """Computes what is not in its file yet, and writes every metric and the means, as upstream does."""

    def __init__(self, config):
        self.config, self.metrics = config, get_metrics(config.metrics)

    def evaluate(self, model, output_dir=None, **given):
        folder = Path(output_dir or self.config.output_dir)
        file = folder / "TOFU_EVAL.json"
        known = json.loads(file.read_text()) if file.is_file() and not self.config.overwrite else {}
        for name, metric in self.metrics.items():
            if not known.get(name):
                known.pop(name, None)
                metric(model, metric_name=name, cache=known, **given, **self.config.metrics[name])
        summary = {n: r["agg_value"] for n, r in known.items() if n in self.metrics and r.get("agg_value") is not None}
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(known))
        (folder / "TOFU_SUMMARY.json").write_text(json.dumps(summary))
        return summary


EVALUATOR_REGISTRY = {"StandIn": StandIn, "TOFUEvaluator": TOFUEvaluator}


def get_evaluators(configs):
    return {name: EVALUATOR_REGISTRY[config.handler](config) for name, config in configs.items()}
