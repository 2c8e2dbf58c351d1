import hydra
import trainer  # noqa: F401  (as upstream's does)
from evals import get_evaluators
from model import get_model
from omegaconf import DictConfig


@hydra.main(version_base=None, config_path="../configs", config_name="eval.yaml")
def main(cfg: DictConfig) -> None:
    model = get_model(cfg.model)
    for evaluator in get_evaluators(cfg.eval).values():
        evaluator.evaluate(model=model, tokenizer=None, template_args=None)


if __name__ == "__main__":
    main()
