"""The list of requests: a YAML or JSON file with a source, or a source and settings of its own, for each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ...data.sources import named_rows, read_text
from ...errors import ConfigError, one_line
from ...files import find_file, parse_yaml

#: What a sequence decides itself.
_OWN = ("model_name_or_path", "output_dir", "overwrite", "resume_from_checkpoint")

#: The run's own sets, which are measured beside those of the requests.
RETAIN, HOLDOUT = "retain", "holdout"


@dataclass(frozen=True)
class ForgetRequest:
    """One request.

    Attributes:
        name: of its folder and in tables.
        forget_data: the source of what is to be forgotten.
        settings: of this request alone, over those of the run.
    """

    name: str
    forget_data: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def folder(self, number: int) -> str:
        """Its folder in the sequence's own, numbered from 1."""
        return f"{number:02d}-{self.name}"


def read_requests(path: str | Path) -> list[ForgetRequest]:
    """The requests of a file, in order."""
    file = find_file(path)
    if file is None:
        raise ConfigError(f"--requests {str(path)!r} is not a file: give a YAML or JSON list of sets to forget.")
    try:
        entries = parse_yaml(read_text(file))
    except yaml.YAMLError as error:
        raise ConfigError(f"--requests {path} is not valid YAML: {one_line(error)}") from error
    if not isinstance(entries, list) or not entries:
        raise ConfigError(
            f"--requests {path} must hold a list with at least one set to forget, e.g. '- forget_a.jsonl', not "
            f"{'an empty list' if entries == [] else f'a {type(entries).__name__}'}."
        )
    requests = [_request(entry, number, path) for number, entry in enumerate(entries, 1)]
    names = [request.name for request in requests]
    for number, name in enumerate(names, 1):
        if name in (RETAIN, HOLDOUT):
            raise ConfigError(
                f"Request {number} of {path} is called {name!r}, as the run's own {name} set is in tables: give it "
                "'name: …' of its own."
            )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"--requests {path} has the name {twice[0]!r} twice: give each request 'name: …' of its own.")
    return requests


def _request(entry: Any, number: int, path: str | Path) -> ForgetRequest:
    where = f"Request {number} of {path}"
    if isinstance(entry, str):
        return ForgetRequest(_name(entry), entry)
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where} is a {type(entry).__name__}: write a source, or 'forget_data: …' with settings.")
    settings = {str(key).replace("-", "_"): value for key, value in entry.items()}
    source, name = settings.pop("forget_data", None), settings.pop("name", None)
    if not isinstance(source, str) or not source.strip():
        raise ConfigError(f"{where} needs 'forget_data: SOURCE', one file, folder:name or owner/name:config.")
    for key in _OWN:
        if key in settings:
            raise ConfigError(f"{where} sets {key}, which the sequence decides: leave it out.")
    return ForgetRequest(_name(source) if name is None else _plain(str(name)), source, settings)


def _name(text: str) -> str:
    """A name for a folder, from a source's last part."""
    text, some = named_rows(text)
    last = text.rstrip("/").split("/")[-1]
    if "." in last and ":" not in last:
        last = last.rsplit(".", 1)[0]
    if some != slice(None):
        last += f"-{some.start or 0}-{'end' if some.stop is None else some.stop}"
    return _plain(last.split(":", 1)[-1] if ":" in last else last)


def _plain(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text).strip("-") or "request"
