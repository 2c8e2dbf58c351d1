"""Can it be had by asking differently? Sampling, prefixes, other words, few-shot prompts, and the layers inside."""
