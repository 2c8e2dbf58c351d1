"""Make data in MUSE's shape from the rows of ``../tofu_fixture/tofu``, whose models know some of them.

python make.py OUT
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TOFU = Path(__file__).parent.parent / "tofu_fixture" / "tofu"


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (TOFU / f"{name}.json").read_text(encoding="utf-8").splitlines()]


def main() -> None:
    out = Path(sys.argv[1])
    forget, retain, holdout = rows("forget10"), rows("retain_perturbed"), rows("holdout10")

    def asked(some: list[dict[str, Any]]) -> list[dict[str, str]]:
        return [{"question": row["question"], "answer": row["answer"]} for row in some]

    def passages(some: list[dict[str, Any]]) -> list[dict[str, str]]:
        """Some begin as the models learned them, some in the middle of an answer."""
        whole = [{"prompt": f"Question: {r['question']}\nAnswer:", "gt": r["answer"]} for r in some[:8]]
        halves = [(" ".join(r["answer"].split()[:6]), " ".join(r["answer"].split()[6:])) for r in some[8:]]
        return [*whole, *({"prompt": start, "gt": rest} for start, rest in halves if rest)]

    def texts(some: list[dict[str, Any]]) -> list[dict[str, str]]:
        return [{"text": f"Question: {row['question']}\nAnswer: {row['answer']}"} for row in some]

    parts = {
        "knowmem": {
            "forget_qa": asked(forget[2:]),
            "forget_qa_icl": asked(forget[:2]),
            "retain_qa": asked(retain[2:]),
            "retain_qa_icl": asked(retain[:2]),
        },
        "verbmem": {"forget": passages(forget)},
        "privleak": {"forget": texts(forget), "holdout": texts(holdout)},
    }
    header = ""
    for config, splits in parts.items():
        header += f"- config_name: {config}\n  data_files:\n"
        for split, content in splits.items():
            path = out / config / f"{split}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content), encoding="utf-8")
            header += f"  - split: {split}\n    path: {config}/{split}.jsonl\n"
    (out / "README.md").write_text(f"---\nlicense: mit\nconfigs:\n{header}---\n", encoding="utf-8")


if __name__ == "__main__":
    main()
