import json
from pathlib import Path

from data import get_datasets


class UnlearningMetric:
    """A function that is given its data, the results it builds on, and those of reference models."""

    def __init__(self, name, function):
        self.name, self._metric_fn, self.before = name, function, {}

    def __call__(self, model, metric_name, cache, **kwargs):
        if kwargs.get("datasets") is not None:
            kwargs["data"] = get_datasets(kwargs.pop("datasets"))
        inputs = {}
        for name, config in kwargs.pop("pre_compute", {}).items():
            if name not in cache:
                self.before[name](model, metric_name=name, cache=cache, **config)
            inputs[config.get("access_key", name)] = cache[name]
        logs = {}
        for name, config in kwargs.pop("reference_logs", {}).items():
            if config.path is not None:
                found = json.loads(Path(config.path).read_text())
                logs[name] = {key: found.get(key) for key in config.include}
        more = {**({"pre_compute": inputs} if inputs else {}), **({"reference_logs": logs} if logs else {})}
        cache[metric_name] = self._metric_fn(model, **kwargs, **more)
        return cache[metric_name]


def unlearning_metric(name):
    return lambda function: UnlearningMetric(name, function)
