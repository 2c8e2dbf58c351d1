"""Values from YAML files and flags as the types of the fields they are meant for."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from types import UnionType
from typing import Any, Union, get_args, get_origin

import yaml

from ..errors import ConfigError, unknown
from ..files import parse_yaml

_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")


def coerce(key: str, value: Any, hint: Any) -> Any:
    """A value from YAML or a flag as the type its field has, or one clear error.

    Flags are text throughout; YAML 1.1 reads ``1e-5`` as text and a bare ``no`` or ``off`` as a boolean.
    """
    kinds = _kinds(hint)
    word = str(value).strip().lower()
    if key == "resume_from_checkpoint" and word in (*_TRUE, *_FALSE, "none", "null"):
        return word in _TRUE or None
    if word in ("none", "null") and type(None) in kinds and str not in kinds:
        return None
    for enumeration in _enumerations(hint):
        known = [str(member.value) for member in enumeration]
        word = "no" if value is False else str(value)
        if word not in known:
            raise unknown(key, value, known)
        return word
    for kind in (type(None), bool, int, float, list, dict, str):
        if kind in kinds:
            done, result = _CONVERT[kind](value)
            if done:
                return result
    names = " or ".join("nothing" if k is type(None) else k.__name__ for k in kinds)
    raise ConfigError(f"{key}={value!r} cannot be read as {names}.")


def _enumerations(hint: Any) -> list[type[Enum]]:
    """The enumerations a hint names outright (not inside a list)."""
    if get_origin(hint) in (Union, UnionType):
        return [kind for part in get_args(hint) for kind in _enumerations(part)]
    return [hint] if isinstance(hint, type) and issubclass(hint, Enum) else []


def _kinds(hint: Any) -> list[type]:
    """The plain types a hint admits; an enumeration is written as text."""
    if get_origin(hint) in (Union, UnionType):
        return [kind for part in get_args(hint) for kind in _kinds(part)]
    kind = get_origin(hint) or hint
    if not isinstance(kind, type):
        return [str]
    if issubclass(kind, Enum):
        return [str]
    return [kind if kind in _CONVERT else str]


def _to_none(value: Any) -> tuple[bool, Any]:
    return value is None, None


def _to_bool(value: Any) -> tuple[bool, Any]:
    if isinstance(value, str) and value.strip().lower() in (*_TRUE, *_FALSE):
        return True, value.strip().lower() in _TRUE
    return isinstance(value, bool), value


def _to_number(kind: type, accepted: tuple[type, ...]) -> Callable[[Any], tuple[bool, Any]]:
    def convert(value: Any) -> tuple[bool, Any]:
        if isinstance(value, str):
            try:
                return True, kind(value)
            except ValueError:
                return False, None
        return isinstance(value, accepted) and not isinstance(value, bool), value

    return convert


def _to_container(kind: type) -> Callable[[Any], tuple[bool, Any]]:
    def convert(value: Any) -> tuple[bool, Any]:
        if isinstance(value, str) and value[:1] in ("[", "{"):
            try:
                value = parse_yaml(value)
            except yaml.YAMLError:
                return False, None
        return isinstance(value, kind), value

    return convert


def _to_str(value: Any) -> tuple[bool, Any]:
    if isinstance(value, bool):
        return True, "yes" if value else "no"
    if isinstance(value, str) and value[:1] in ("[", "{"):
        return False, None
    return isinstance(value, (str, int, float)), str(value)


_CONVERT: dict[type, Callable[[Any], tuple[bool, Any]]] = {
    type(None): _to_none,
    bool: _to_bool,
    int: _to_number(int, (int,)),
    float: _to_number(float, (int, float)),
    list: _to_container(list),
    dict: _to_container(dict),
    str: _to_str,
}
