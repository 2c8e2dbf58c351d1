def compute_batch_ceu(model, inputs, ignore_first_n_answer_tokens=1):
    outputs = model(**inputs)
    return outputs.logits.square().mean() * ignore_first_n_answer_tokens, outputs
