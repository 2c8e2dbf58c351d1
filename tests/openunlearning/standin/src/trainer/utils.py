"""Losses with upstream's names, call signatures and returned pairs; the formulas are the papers'."""

import torch
from torch.nn.functional import cross_entropy, logsigmoid


def _token_losses(model, inputs):
    outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
    labels = inputs["labels"][:, 1:]
    return cross_entropy(outputs.logits[:, :-1].mT, labels, reduction="none"), labels != -100, outputs


def compute_dpo_loss(model, ref_model, win_inputs=None, lose_inputs=None, beta=1.0):
    margin = 0.0
    for sign, inputs in ((1.0, win_inputs), (-1.0, lose_inputs)):
        with torch.no_grad():
            before = _token_losses(ref_model, inputs)[0].sum(-1)
        now, _, outputs = _token_losses(model, inputs)
        margin = margin + sign * (before - now.sum(-1))
    return -2 / beta * logsigmoid(beta * margin).mean(), outputs


def compute_wga_loss(model, inputs, beta):
    losses, answers, outputs = _token_losses(model, inputs)
    return -((-losses).exp().detach() ** beta * losses)[answers].mean(), outputs


def compute_satimp_loss(model, inputs, beta1, beta2):
    losses, answers, outputs = _token_losses(model, inputs)
    p = (-losses).exp().detach()
    return -(p**beta1 * (1 - p) ** beta2 * losses)[answers].mean(), outputs


def compute_undial_loss(model, ref_model, inputs, beta):
    outputs = model(**inputs)
    with torch.no_grad():
        target = (ref_model(**inputs).logits - beta).softmax(-1)
    return cross_entropy(outputs.logits.flatten(0, 1), target.flatten(0, 1)), outputs
