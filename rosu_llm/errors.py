"""Errors of the package: one root, each also a builtin, so callers can catch either.

Every message says what was passed, why it cannot work, and what to type instead.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class RosuError(Exception):
    """Root of every error raised on purpose by this package."""


class ConfigError(RosuError, ValueError):
    """A setting that cannot work."""


class DataError(RosuError, ValueError):
    """A data set, file or batch that cannot be used."""


class NonFiniteError(RosuError, FloatingPointError):
    """A loss or gradient that is NaN or infinite; no weight was changed."""


class PerturbedWeightsError(RosuError, RuntimeError):
    """Weights still carry the surrogate perturbation where they must not."""


class EmptyUpdateError(RosuError, RuntimeError):
    """The optimizer stepped although no update had been computed."""


class UnsupportedLayoutError(RosuError, NotImplementedError):
    """A sharding or precision layout that is not supported."""


def unknown(kind: str, given: object, known: Iterable[str]) -> ConfigError:
    """The error for a name that is not in a registry, with the nearest one that is."""
    names = sorted(known)
    near = get_close_matches(str(given), names, n=1, cutoff=0.5)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return ConfigError(f"Unknown {kind} {given!r}: it is not one of {', '.join(names)}.{hint}")


def one_line(error: object) -> str:
    """A message without its line breaks."""
    return " ".join(str(error).split())
