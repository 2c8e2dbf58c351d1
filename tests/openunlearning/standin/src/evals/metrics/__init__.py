import math

from evals.metrics.base import unlearning_metric

METRICS_REGISTRY = {}
ATTACKS = ("mia_loss", "mia_zlib", "mia_min_k", "mia_min_k_plus_plus")
MEASURED = ("probability", "rouge", "truth_ratio", "extraction_strength", "exact_memorization")
OTHERS = ("hm_aggregate", "privleak", "classifier_prob")


def _invented(model, name):
    """A figure between 0.2 and 0.8 that depends on the weights and the metric's handler."""
    weights = float(sum(p.detach().float().abs().mean() for p in model.parameters()))
    return 0.5 + 0.3 * math.sin(1e3 * weights + len(name))


def _handler(name):
    def measure(model, **kwargs):
        result = {"agg_value": _invented(model, name)}
        data = kwargs.get("data")
        if name in ATTACKS:
            rows = {part: {"value_by_index": {str(i): {} for i in range(len(data[part]))}} for part in data}
            return {**rows, **result}
        if name in MEASURED and data is not None:
            assert kwargs["collators"]
            result["value_by_index"] = {str(i): {} for i in range(len(data))}
        return result

    return unlearning_metric(name=name)(measure)


for _name in (*ATTACKS, *MEASURED, *OTHERS):
    METRICS_REGISTRY[_name] = _handler(_name)


def get_metrics(configs):
    found = {}
    for name, config in configs.items():
        found[name] = METRICS_REGISTRY[config.handler]
        found[name].before.update(get_metrics(config.get("pre_compute", {})))
    return found
