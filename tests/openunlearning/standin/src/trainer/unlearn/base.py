from trainer.base import FinetuneTrainer


class UnlearnTrainer(FinetuneTrainer):
    def compute_loss(self, model, inputs, **kwargs):
        if model.training:
            return self.compute_unlearn_loss(model, inputs, **kwargs)
        return super().compute_loss(model, inputs, **kwargs)
