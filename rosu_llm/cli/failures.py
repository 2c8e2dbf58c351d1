"""Whatever ends a command, as one line: what happened and what to do. ``ROSU_DEBUG=1`` shows the traceback as well."""

from __future__ import annotations

import errno
import os
import re
import sys
import traceback

from ..errors import RosuError, one_line

#: Optional package → the extra that installs it.
EXTRAS = {
    "peft": "peft",
    "deepspeed": "deepspeed",
    "lm_eval": "eval",
    "rouge_score": "eval",
    "sklearn": "eval",
    "scipy": "eval",
    "optuna": "sweep",
    "matplotlib": "plots",
    "jinja2": "report",
    "hydra": "openunlearning",
    "torchjd": "torchjd",
}
#: Libraries that settings are handed to, and that check them when they use them.
_VALUES_END_IN = ("transformers", "accelerate", "peft", "datasets", "tokenizers", "lm_eval", "optuna")
_PASSWORD = re.compile(r"(://[^\s:/@]*:)\S+(@)")
#: Exit codes: a mistake in the call or its files; anything else.
MISTAKE, UNEXPECTED = 2, 1


def report(verb: str, error: Exception) -> int:
    """Print the line (and the traceback, if asked for) on standard error; returns the exit code."""
    if os.environ.get("ROSU_DEBUG", "0") not in ("", "0"):
        print(without_passwords("".join(traceback.format_exception(error))), file=sys.stderr)
    text, code = explain(error)
    print(without_passwords(f"rosu {verb}: {text}"), file=sys.stderr)
    return code


def explain(error: Exception) -> tuple[str, int]:
    """What to say about an error, and the exit code."""
    name = type(error).__name__
    if isinstance(error, RosuError):
        return one_line(error), int(getattr(error, "exit_code", MISTAKE))
    if isinstance(error, ImportError):
        package = (getattr(error, "name", None) or "").split(".")[0]
        extra = EXTRAS.get(package)
        how = f"pip install 'rosu-llm[{extra}]'" if extra else f"pip install {package}" if package else ""
        return (f"{one_line(error)}{f' ({how})' if how else ''}"), MISTAKE
    if isinstance(error, UnicodeDecodeError):
        return f"a file is not UTF-8 text: {one_line(error)}. Save it as UTF-8.", MISTAKE
    if isinstance(error, UnicodeEncodeError):
        return f"a flag or file name holds bytes that are no text: {one_line(error)}.", MISTAKE
    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"{place}the disk is full. Free some space, or write elsewhere.", MISTAKE
        return f"{place}{one_line(error.strerror or error)}", MISTAKE
    if isinstance(error, ValueError) and "embedded null byte" in str(error):
        return "a path holds a null byte, which no file name can.", MISTAKE
    if name == "SafetensorError":
        return f"a safetensors file is broken or not whole: {one_line(error)}. Download or save it again.", MISTAKE
    if name == "OutOfMemoryError" or isinstance(error, MemoryError):
        return (
            "out of memory: lower per_device_train_batch_size and raise gradient_accumulation_steps, or train an "
            f"adapter (--lora-r 8). {one_line(error)[:200]}"
        ), MISTAKE
    where = traceback.extract_tb(error.__traceback__)
    package = next((p for p in _VALUES_END_IN if where and f"{os.sep}{p}{os.sep}" in where[-1].filename), None)
    if package is not None and isinstance(error, (TypeError, ValueError, AttributeError, KeyError)):
        return f"{package} does not take a value that was given: {one_line(error)[:400]} ({name})", MISTAKE
    place = f" in {os.path.basename(where[-1].filename)}:{where[-1].lineno}" if where else ""
    return f"unexpected {name}{place}: {one_line(error)[:400]} (ROSU_DEBUG=1 shows the traceback)", UNEXPECTED


def without_passwords(text: str) -> str:
    """The text with passwords in URLs of databases replaced."""
    return _PASSWORD.sub(r"\1***\2", text)
