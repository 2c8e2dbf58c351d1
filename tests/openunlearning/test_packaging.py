"""What the wheel must carry for Hydra to find us."""

from __future__ import annotations

from tests.conftest import ROOT

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef]


def test_every_package_is_listed() -> None:
    """Folders below ``configs/openunlearning`` are data of that package."""
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    needed = {str(f.parent.relative_to(ROOT)).replace("/", ".") for f in (ROOT / "rosu_llm").rglob("__init__.py")}
    shipped = [
        f for f in ROOT.glob("configs/**/__init__.py") if ROOT / "configs" / "openunlearning" not in f.parent.parents
    ]
    needed |= {"rosu_llm." + ".".join(f.parent.relative_to(ROOT).parts) for f in shipped}
    assert needed | {"rosu_llm.configs", "hydra_plugins", "hydra_plugins.rosu_llm_plugin"} == listed


def test_the_namespace_is_shared() -> None:
    assert not (ROOT / "hydra_plugins" / "__init__.py").exists()
    assert (ROOT / "configs" / "openunlearning" / "__init__.py").exists()
