import logging

from transformers import Trainer

logger = logging.getLogger(__name__)


class FinetuneTrainer(Trainer):
    # As upstream: the first positional parameters are not Trainer's.
    def __init__(self, evaluators=None, template_args=None, *args, **kwargs):
        self.evaluators, self.template_args = evaluators, template_args
        super().__init__(*args, **kwargs)

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval", trial=None):
        if not self.evaluators:
            return {}
        if self.accelerator.num_processes > 1:
            logger.warning("only when a single process is running")
            return {}
        folder = f"{self.args.output_dir}/checkpoint-{self.state.global_step}/evals"
        metrics = {}
        for evaluator in self.evaluators.values():
            metrics.update(evaluator.evaluate(model=self.model, output_dir=folder, tokenizer=None, template_args=None))
        self.log(metrics)
        return metrics
