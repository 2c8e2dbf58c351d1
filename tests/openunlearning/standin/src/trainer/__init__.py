from transformers import TrainingArguments

from trainer.base import FinetuneTrainer
from trainer.unlearn.base import UnlearnTrainer

TRAINER_REGISTRY = {}


def _register_trainer(cls):
    TRAINER_REGISTRY[cls.__name__] = cls


def load_trainer(config, model, **kwargs):
    cls = TRAINER_REGISTRY.get(config.handler)
    if cls is None:
        raise NotImplementedError(f"{config.handler} not implemented or not registered")
    arguments = {key: value for key, value in config.args.items() if key != "warmup_epochs"}
    return cls(model=model, args=TrainingArguments(**arguments), **kwargs, **config.get("method_args", {}))


class Plain(UnlearnTrainer):
    """Retain loss only."""

    def compute_unlearn_loss(self, model, inputs, **_):
        return model(**inputs["retain"]).loss


_register_trainer(FinetuneTrainer)
_register_trainer(Plain)
