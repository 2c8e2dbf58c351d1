"""Shows Hydra our configuration groups when, and only when, the application is OpenUnlearning.

``hydra_plugins`` is a namespace shared by all Hydra plugins, so it has no ``__init__.py``. Hydra imports this file in
every application of the environment: it loads nothing but Hydra's own base classes, and inside OpenUnlearning only a
few names.
"""

from __future__ import annotations

from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

#: Configurations that ours inherit from; an application without them has no use for ours.
_FOUNDATIONS = ("unlearn.yaml", "trainer/finetune.yaml")


class RosuSearchPath(SearchPathPlugin):
    """Appends our groups behind OpenUnlearning's own, which win where both have a name."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Called by Hydra before it composes the configuration."""
        if any(_is_openunlearning(element.path) for element in search_path.get_path()):
            search_path.append(provider="rosu-llm", path="pkg://rosu_llm.configs.openunlearning")
            from rosu_llm.openunlearning.registration import offer

            offer()


def _is_openunlearning(path: str | None) -> bool:
    scheme, separator, folder = (path or "").partition("://")
    if separator and scheme != "file":
        return False
    root = Path(folder if separator else scheme)
    return bool(path) and all((root / name).is_file() for name in _FOUNDATIONS)
