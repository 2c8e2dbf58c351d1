"""The house: which folder may import which, read from the import statements, lazy ones and those for types too."""

from __future__ import annotations

import ast
import importlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT

PACKAGE = ROOT / "rosu_llm"

_BASE = {"errors", "files", "compat"}
_STEP = _BASE | {"geometry", "space"}
_TRAINING = _STEP | {"step", "losses", "data"}
_RECIPES = _TRAINING | {"training", "representation"}
_EXPERIMENTS = _RECIPES | {"recipes", "evaluation"}
_ANALYSIS = _EXPERIMENTS | {"experiments"}
_PRESENTATION = _ANALYSIS | {"analysis"}
_PAGES = _PRESENTATION | {"vision"}

#: Folder (or module of the top level) → what it may import. ``__version__`` is everybody's.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "files": {"errors"},
    "compat": set(),
    "geometry": _BASE,
    "space": _BASE | {"geometry"},
    "step": _STEP,
    "losses": _BASE,
    "data": _BASE,
    "training": _TRAINING,
    "representation": _TRAINING | {"training"},
    "recipes": _RECIPES,
    "evaluation": _BASE | {"losses", "data"},
    "experiments": _EXPERIMENTS,
    "analysis": _ANALYSIS,
    "vision": _PRESENTATION,
    "presentation": _PAGES,
    "openunlearning": _RECIPES | {"evaluation"},
    "toys": _PAGES | {"presentation"},
    "cli": _PAGES | {"presentation", "toys"},
}


def imported(path: Path) -> Iterator[str]:
    """Folders and top-level modules that a file imports."""
    here = path.relative_to(PACKAGE).parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.ImportFrom) and node.level:
            base = list(here[: len(here) - node.level])
            full = [*base, *(node.module or "").split(".")] if node.module else base
            names = [full[0]] if full and full[0] else [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rosu_llm":
            rest = (node.module or "").split(".")[1:]
            names = rest[:1] or [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [a.name.split(".")[1] for a in node.names if a.name.startswith("rosu_llm.")]
        yield from (name for name in names if name != "__version__")


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = sorted(path for path in PACKAGE.rglob("*.py") if room(path) not in ("__init__", "__main__"))


@pytest.mark.parametrize("name", sorted(ALLOWED))
def test_imports_point_one_way(name: str) -> None:
    wrong = {
        f"{path.relative_to(PACKAGE)} imports {other}"
        for path in FILES
        if room(path) == name
        for other in imported(path)
        if other != name and other not in ALLOWED[name]
    }
    assert not wrong


def test_every_folder_has_its_place() -> None:
    assert {room(path) for path in FILES} == set(ALLOWED)


def test_no_class_name_is_used_twice() -> None:
    names = Counter(
        node.name
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_every_imported_name_exists() -> None:
    """Also those that a verb imports only when it is called."""
    missing = []
    for path in FILES:
        package = ["rosu_llm", *path.relative_to(PACKAGE).parts[:-1]]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = package[: len(package) - (node.level - 1)]
                module = importlib.import_module(".".join([*base, *([node.module] if node.module else [])]))
                for alias in node.names:
                    if not hasattr(module, alias.name):
                        try:
                            importlib.import_module(f"{module.__name__}.{alias.name}")
                        except ModuleNotFoundError:
                            missing.append(f"{path.relative_to(PACKAGE)}: {alias.name} of {module.__name__}")
    assert not missing
