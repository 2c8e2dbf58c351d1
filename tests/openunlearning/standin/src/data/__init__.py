import torch
from torch.nn.utils.rnn import pad_sequence

VOCABULARY = 40


def _sample(generator):
    length = int(torch.randint(6, 12, (1,), generator=generator))
    ids = torch.randint(3, VOCABULARY, (length,), generator=generator)
    labels = ids.clone()
    labels[:3] = -100
    return {"input_ids": ids, "labels": labels}


class Rows:
    """Random sequences that depend on the configuration's name alone; ``alternate`` nests a second answer."""

    def __init__(self, hf_args, tokenizer=None, template_args=None, alternate=False, **_):
        generator = torch.Generator().manual_seed(sum(map(ord, hf_args["name"])))
        first, _, last = hf_args["split"].removeprefix("train").strip("[]").partition(":")
        chosen = slice(int(first or 0), int(last or 24))
        self.rows = [_sample(generator) for _ in range(24)][chosen]
        self.alternates = [_sample(generator) for _ in range(24)][chosen] if alternate else None

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i] if self.alternates is None else {"original": self.rows[i], "alternate": self.alternates[i]}


class ForgetRetainDataset:
    def __init__(self, forget, retain, anchor="forget"):
        self.forget, self.retain = forget, retain

    def __len__(self):
        return len(self.forget)

    def __getitem__(self, i):
        item = {"forget": self.forget[i]}
        if self.retain:
            item["retain"] = self.retain[int(torch.randint(0, len(self.retain), (1,)))]
        return item


DATASET_REGISTRY = {"QADataset": Rows, "PretrainingDataset": Rows}


def get_datasets(configs, **kwargs):
    found = {c.get("access_key", n): DATASET_REGISTRY[c.handler](**c.args, **kwargs) for n, c in configs.items()}
    return next(iter(found.values())) if len(found) == 1 else found


def get_data(config, mode="train", **kwargs):
    parts = {name: get_datasets(c, **kwargs) for name, c in config.items() if name != "anchor"}
    return {"train": ForgetRetainDataset(**parts)} if mode == "unlearn" else {"train": parts["forget"]}


def pad(items):
    if "input_ids" not in items[0]:
        return {key: pad([item[key] for item in items]) for key in items[0]}
    ids = pad_sequence([i["input_ids"] for i in items], batch_first=True, padding_value=0)
    labels = pad_sequence([i["labels"] for i in items], batch_first=True, padding_value=-100)
    return {"input_ids": ids, "attention_mask": ids.ne(0), "labels": labels}
