import hydra
from data import get_data, pad
from evals import get_evaluators
from model import get_model
from omegaconf import DictConfig
from trainer import load_trainer
from transformers import set_seed


class Tokenizer:
    pad_token_id = 0

    def save_pretrained(self, folder: str, **_: object) -> None: ...


@hydra.main(version_base=None, config_path="../configs", config_name="train.yaml")
def main(cfg: DictConfig) -> None:
    set_seed(cfg.trainer.args.seed)
    model = get_model(cfg.model, cfg.dtype)
    tokenizer = Tokenizer()
    data = get_data(cfg.data, mode=cfg.mode, tokenizer=tokenizer, template_args={})
    trainer = load_trainer(
        cfg.trainer,
        model,
        train_dataset=data["train"],
        eval_dataset="dummy",
        processing_class=tokenizer,
        data_collator=pad,
        evaluators=get_evaluators(cfg.eval) if cfg.get("eval") else None,
        template_args={},
    )
    trainer.train()
    trainer.save_model(trainer.args.output_dir)
    if trainer.args.do_eval:
        trainer.evaluate()


if __name__ == "__main__":
    main()
