"""The tables of settings, methods, logged names and exports say what the code says; links and paths lead somewhere."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

import rosu_llm
from rosu_llm.geometry import METHODS
from rosu_llm.geometry.methods.registry import ALIASES
from rosu_llm.losses import LOSSES
from rosu_llm.recipes.settings import RunArguments
from rosu_llm.representation.config import RepresentationArguments
from rosu_llm.training.config import MethodArguments
from tests.conftest import ROOT

PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}
for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
    PAGES[name] = (ROOT / name).read_text(encoding="utf-8")


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def section(page: str, title: str) -> str:
    """What stands under a heading of the second level."""
    return PAGES[page].split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(text: str) -> dict[str, str]:
    """Setting → default, of all tables in a text."""
    found = re.findall(r"^\| `(\w+)` \| `(.*?)` \| ", text, re.MULTILINE)
    assert len({name for name, _ in found}) == len(found), "a setting is documented twice"
    return {name: default.replace(r"\|", "|") for name, default in found}


def as_written(value: Any) -> Any:
    """A default as the tables write it; numbers may be written in several ways."""
    return {None: "none", True: "true", False: "false"}.get(value, value) if not isinstance(value, float) else value


def check_table(table: dict[str, str], fields: dict[str, Any]) -> None:
    assert set(table) == set(fields)
    for name, default in fields.items():
        if isinstance(default, (int, float)) and not isinstance(default, bool):
            assert float(table[name]) == default, name
        else:
            assert table[name] == as_written(default), name


def test_every_setting_is_documented_with_its_default() -> None:
    method = {f.name: f.default for f in dataclasses.fields(MethodArguments)}
    check_table(rows(section("docs/settings.md", "Method")), method)
    check_table(rows(section("docs/settings.md", "Run")), {f.name: f.default for f in dataclasses.fields(RunArguments)})
    own = {f.name: f.default for f in dataclasses.fields(RepresentationArguments)}
    changed = {name: default for name, default in own.items() if name not in method or method[name] != default}
    check_table(rows(section("docs/settings.md", "Representation level")), changed)


def test_every_method_and_loss_is_documented() -> None:
    table, rest = PAGES["docs/methods.md"].split("\n## ", 1)
    names = {name for line in table.splitlines() if line.startswith("| `") for name in re.findall(r"`(\w+)`", line)}
    assert {*METHODS, *ALIASES} <= names
    for name in LOSSES:
        assert f"`{name}`" in rest


def test_every_logged_name_is_documented_and_nothing_else() -> None:
    """The names are the string constants ``group/name`` of the folders that log; those of losses are f-strings."""
    groups = r"(?:loss|coupling|norm|perturb|step|subspace|metric|calibrate|budget|depth|ssd)"
    logged = {
        "loss",
        *(f"loss/{part}" for part in ("forget", "retain", "surrogate", "forget_surrogate", "holdout", "mismatch")),
    }
    logged |= {f"depth/{name}" for name in ("remaining", "reached", "target", "loss", "beyond")}
    for folder in ("step", "training", "representation"):
        for path in (ROOT / "rosu_llm" / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    logged |= {*re.findall(rf"^{groups}/\w+$", node.value)}
    first = [line.split("|")[1] for line in PAGES["docs/metrics.md"].splitlines() if line.startswith("| `")]
    documented = [name for cell in first for name in re.findall(r"`([\w/]+)`", cell)]
    assert len(documented) == len(set(documented))
    assert set(documented) == logged


def test_a_run_logs_only_documented_names() -> None:
    import torch

    from rosu_llm import UnlearningStep

    model = torch.nn.Linear(3, 1)
    step = UnlearningStep(model, torch.optim.AdamW(model.parameters()), rho=0.1)
    rows = torch.randn(6, 3)
    for name in step(lambda: model(rows[:3]).square().mean(), lambda: model(rows[3:]).abs().mean()):
        assert f"`{name}`" in PAGES["docs/metrics.md"], name


def test_every_export_has_its_entry_in_the_api_reference() -> None:
    entries = re.findall(r"^::: rosu_llm\.(\w+)$", PAGES["docs/api.md"], re.MULTILINE)
    assert sorted(entries) == sorted(set(rosu_llm.__all__) - {"__version__"})


def anchors(text: str) -> set[str]:
    """The anchors that GitHub and mkdocs give to headings alike."""
    titles = re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", sorted(PAGES))
def test_relative_links_lead_somewhere(page: str) -> None:
    here = (ROOT / page).parent
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(PAGES[page])):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        path = (here / file).resolve() if file else ROOT / page
        assert path.is_file(), target
        if anchor:
            assert anchor in anchors(path.read_text(encoding="utf-8")), target


@pytest.mark.parametrize("page", sorted(PAGES))
def test_paths_that_a_page_names_exist(page: str) -> None:
    """Files and folders of the project in code quotes; those of the reader (outputs, saves, data) are not meant."""
    for path in re.findall(
        r"`\.?/?((?:rosu_llm|scripts|configs|tests|docs|examples|hydra_plugins)/[\w./-]+)`", PAGES[page]
    ):
        if page.startswith("docs/openunlearning") and path.startswith("configs/"):
            continue  # of OpenUnlearning's checkout
        assert (ROOT / path).exists(), path


def test_the_walk_of_each_verb_names_real_files_and_enters_each_folder_once() -> None:
    from rosu_llm.cli.main import VERBS

    walk = section("docs/architecture.md", "Walk of each verb")
    for path in re.findall(r"`([a-z_/0-9]+\.py)`", walk):
        assert (ROOT / "rosu_llm" / path).is_file(), path
    lines = dict(re.findall(r"^\| `([a-z ]+)` \| (.+) \|$", walk, re.MULTILINE))
    assert {verb.split()[0] for verb in lines} == set(VERBS)
    for verb, line in lines.items():
        folders = [[path.split("/")[0] for path in re.findall(r"`(.+?)`", part)] for part in line.split(" → ")]
        assert all(len(set(group)) == 1 for group in folders), verb
        entered = [group[0] for group in folders]
        assert len(set(entered)) == len(entered), verb


def test_every_table_of_figures_names_the_command_that_makes_it() -> None:
    """A table with a column of decimals stands below a paragraph with a command (a second table may share it)."""
    command = re.compile(
        r"`(?:python |\./)?(?:scripts/\S+|rosu (?:ablate|audit|diagnose|sweep|table|vision)\b)|scripts/\w+\.sh --"
    )
    for page, text in PAGES.items():
        for found in re.finditer(r"(?:^\|.*\n)+", text, re.MULTILINE):
            if len(re.findall(r"\| [+−-]?\d*\.\d+ ", found[0])) >= 6:
                before = text[: found.start()].split("\n## ")[-1]
                assert command.search(before), f"{page}: {found[0].splitlines()[0]}"


def test_the_picture_of_the_layers_shows_the_import_rules(tmp_path: Path) -> None:
    """Following its arrows reaches exactly what a folder may import; the file is what the script draws."""
    import importlib.util

    from tests.test_architecture import ALLOWED

    path = ROOT / "scripts" / "draw_layers.py"
    spec = importlib.util.spec_from_file_location("draw_layers", path)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.picture() == (ROOT / "docs" / "layers.svg").read_text(encoding="utf-8")

    base = "errors files compat"

    def reached(name: str) -> set[str]:
        return {found for other in script.ARROWS.get(name, ()) for found in (other, *reached(other))}

    assert {*script.BOXES} - {base} == set(ALLOWED) - {*base.split()}
    for name in set(script.BOXES) - {base}:
        assert {part for found in reached(name) for part in found.split()} == ALLOWED[name], name
