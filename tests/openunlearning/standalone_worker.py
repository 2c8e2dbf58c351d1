"""ROSUTrainer on OpenUnlearning's model, data and collator, outside its trainer and its script.

standalone_worker.py CHECKOUT OUTPUT override…
"""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path


def main() -> None:
    root, output, overrides = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    sys.path.insert(0, str(root / "src"))
    from data import get_collators, get_data
    from hydra import compose, initialize_config_dir
    from model import get_model
    from trainer.utils import seed_everything

    from rosu_llm import ROSUConfig, ROSUTrainer

    with initialize_config_dir(config_dir=str(root / "configs"), version_base=None):
        config = compose("unlearn.yaml", overrides=["task_name=x", f"trainer.args.output_dir={output}", *overrides])
    seed_everything(config.trainer.args.seed)
    model, tokenizer = get_model(config.model)
    data = get_data(config.data, mode="unlearn", tokenizer=tokenizer, template_args=config.model.template_args)
    arguments = {k: v for k, v in config.trainer.args.items() if k not in ("warmup_epochs", "logging_dir")}
    known = {field.name for field in fields(ROSUConfig)}  # the file also names what borrowed losses take
    trainer = ROSUTrainer(
        model,
        ROSUConfig(**arguments, **{k: v for k, v in config.trainer.method_args.items() if k in known}),
        train_dataset=data["train"],
        data_collator=get_collators(config.collator, tokenizer=tokenizer),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model(output)


if __name__ == "__main__":
    main()
