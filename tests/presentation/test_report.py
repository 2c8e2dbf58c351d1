"""A report's content: numbers, what is missing, runs of different kinds; and both forms of the page."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from rosu_llm.cli.main import main
from rosu_llm.errors import DataError
from rosu_llm.evaluation.tofu.results import Result, read_result
from rosu_llm.presentation.blocks import Figure, Missing, Report, Section, Table
from rosu_llm.presentation.qualitative import Choice
from rosu_llm.presentation.report.metrics import TOFU
from rosu_llm.presentation.report.page import build
from rosu_llm.presentation.report.reading import read_runs
from tests.conftest import ROOT
from tests.evaluation.saves import FIGURES, INITIAL, RETAIN, make_run, write_eval
from tests.presentation.invented import write_example
from tests.presentation.test_wmdp_table import result as wmdp_result

SECTIONS = (
    "summary metrics answers curves weights diagnosis audits muse gone sequence sweep configuration environment".split()
)


def section(report: Report, key: str) -> Section:
    return next(s for s in report.sections if s.key == key)


def said(report: Report, *keys: str) -> str:
    """Every note of these sections (of all when none is named)."""
    return "\n".join(
        b.text for s in report.sections if s.key in (keys or SECTIONS) for b in s.blocks if isinstance(b, Missing)
    )


def tables(report: Report, key: str) -> list[Table]:
    return section(report, key).tables


def figures(report: Report) -> list[Figure]:
    return [figure for s in report.sections for figure in s.figures]


def references(saves: Path) -> dict[str, Result]:
    folder = saves / "eval"
    retain = write_eval(folder / "tofu_Llama-3.2-1B-Instruct_retain90", RETAIN)
    target = write_eval(folder / "tofu_Llama-3.2-1B-Instruct_full" / "evals_forget10", INITIAL)
    return {"retain": read_result(retain), "target": read_result(target)}


def with_log(folder: Path, log: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": log}))
    if folder.name.startswith("checkpoint-"):
        (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")  # a whole one has a model
    return folder


# -- numbers ------------------------------------------------------------------------------------


def test_scores_stand_beside_the_papers(tmp_path: Path) -> None:
    run = make_run(tmp_path, 0.4, {**FIGURES, "exact_memorization": 0.5})
    report = build(read_runs([run]), **references(tmp_path))
    table = tables(report, "metrics")[0]
    rows = {row[0]: row[1:] for row in table.lines()[:3]}
    # Mem = 4/(2+2+2+4); s = (1, .5, 1, .5): Priv = 2/3; Util = HM(.6,.3)/HM(.75,.5) = .4/.6; Agg = 3/5.5
    assert rows["ROSU_rho0.4"] == ("0.55", "0.50", "0.40", "0.67", "0.67")
    assert rows["Initial"][4] == "1.00" and rows["Retain"][3] == "1.00"
    assert table.groups == {0: "this report", 3: "paper, Llama-3.2-1B, forget10"}
    assert ("ROSU", "0.58", "0.52", "0.38", "0.74", "0.82") in table.lines()[3:]
    assert report.main[run].lines() == table.lines()[:3]
    details = {row[0]: row[1:] for row in tables(report, "metrics")[1].lines()}
    assert details["extraction_strength"] == ("1", "0.5 (-0.500)", "0.5 (-0.500)")


def test_the_papers_rows_are_those_printed() -> None:
    source = ROOT.parent / "shared" / "paper" / "rosu.tex"
    if not source.is_file():
        pytest.skip("the paper's source is not here")
    text = source.read_text(encoding="utf-8").split(r"\label{tab:llm}")[1].split("WMDP")[0]
    plain = re.sub(r"\\(?:textbf|textit)\{([^}]*)\}", r"\1", text).replace("\\ ", " ")
    printed = {}
    for line in plain.splitlines():
        name, *cells = (cell.strip(" \\") for cell in line.split("&"))
        if len(cells) == 4 and all(re.fullmatch(r"\d\.\d\d", cell) for cell in cells):
            printed[name] = tuple(map(float, cells))
    assert printed == {name: (agg, mem, priv, util) for name, (agg, _, mem, priv, util) in TOFU.items()}
    assert len(printed) == 13


def test_the_frontier_has_the_papers_points_only_on_the_papers_scale(tmp_path: Path) -> None:
    run = make_run(tmp_path, 0.4, FIGURES)
    given = references(tmp_path)
    for options, paper in ((given, 13), ({"retain": given["retain"]}, 0)):
        (figure,) = [f for f in figures(build(read_runs([run]), **options)) if f.key == "frontier_0"]
        assert sum(row[3] == "paper" for row in figure.data.lines()) == paper
        assert ("ROSU_rho0.4", "0.3333", "0.6667" if paper else "0.4", "run") in figure.data.lines()


def test_a_method_is_named_with_its_forget_loss(tmp_path: Path) -> None:
    for name, loss in (("a", "nll"), ("b", "npo")):
        folder = with_log(tmp_path / name, [{"step": 1, "loss": 1.0}])
        record = {"schema": "rosu/run/1", "settings": {"method": "graddiff", "forget_loss": loss}}
        (folder / "rosu_run.json").write_text(json.dumps(record))
    report = build(read_runs([tmp_path / "a", tmp_path / "b"]))
    assert [row[2] for row in tables(report, "summary")[0].lines()] == ["graddiff", "graddiff, npo"]


def test_settings_that_differ_are_marked_and_changed_ones_come_first(tmp_path: Path) -> None:
    for name, rho in (("a", 0.4), ("b", 0.2)):
        folder = with_log(tmp_path / name, [{"step": 1, "loss": 1.0}])
        settings = {"method": "rosu", "rho": rho, "kappa": 0.5, "learning_rate": 3e-5}
        (folder / "rosu_run.json").write_text(json.dumps({"schema": "rosu/run/1", "settings": settings}))
    changed, plain = tables(build(read_runs([tmp_path / "a", tmp_path / "b"])), "configuration")
    assert changed.headings == ("setting", "a", "b")
    assert changed.lines() == (("≠ rho", "0.4", "0.2"), ("learning_rate", "3e-05", "3e-05"))
    assert changed.marked == {(0, 1), (0, 2)}
    assert [row[0] for row in plain.lines()] == ["method", "kappa"] and plain.folded


def test_an_openunlearning_run_brings_its_configuration(tmp_path: Path) -> None:
    report = build(read_runs([make_run(tmp_path, 0.4, FIGURES)]))
    rows = dict(tables(report, "configuration")[0].lines())
    assert rows["method"] == "ROSU" and rows["rho"] == "0.4" and rows["forget_split"] == "forget10"
    assert tables(report, "summary")[0].lines()[0][1] == "OpenUnlearning"


# -- what is missing ----------------------------------------------------------------------------


def test_a_run_without_anything_but_a_card_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "README.md").write_text("# something\n")
    report = build(read_runs([folder]))
    assert [s.key for s in report.sections] == SECTIONS
    notes = said(report)
    for text in (
        "No settings are recorded",
        "There is no log",
        "No evaluation of bare was found",
        "No run has generated answers",
        "bare holds no weights",
        "No diagnosis.json",
        "No audit_safeguards.json",
        "No sweep",
        "Versions used by bare are not recorded",
    ):
        assert text in notes
    assert figures(report) == []


def test_damaged_files_are_named_and_left_out(tmp_path: Path) -> None:
    folder = with_log(tmp_path / "run", [{"step": 1, "loss": math.nan}, {"step": 2, "loss/retain": 0.5}])
    for name in ("rosu_run.json", "diagnosis.json", "audit_safeguards.json", "trials.json", "evals/TOFU_EVAL.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text('{"schema": ')
    (folder / "audit_orthogonality.json").write_text('{"schema": "rosu/audit-orthogonality/1"}')
    (folder / "audit_sensitivity.json").write_text('{"schema": "else"}')
    folder.joinpath("trials.json").unlink()  # a folder with it is taken for the sweep itself
    report = build(read_runs([folder]))
    notes = said(report)
    for name in ("rosu_run.json", "diagnosis.json", "audit_safeguards.json"):
        assert f"{name} is not whole JSON" in notes
    assert "TOFU_EVAL.json is not whole JSON" in notes
    assert "audit_orthogonality.json of run is not as it should be (KeyError('cells'))" in notes
    assert "audit_sensitivity.json has schema 'else'" in notes
    assert "loss was NaN or infinite in log entries of run (1)" in notes
    assert [f.key for f in figures(report)] == ["curve_loss_retain"]


def test_an_unfinished_run_shows_its_newest_checkpoint(tmp_path: Path) -> None:
    with_log(tmp_path / "run" / "checkpoint-5", [{"step": 5, "loss": 1.0}])
    with_log(tmp_path / "run" / "checkpoint-10", [{"step": 10, "loss": 2.0}])
    report = build(read_runs([tmp_path / "run"]))
    assert "The log is that of checkpoint-10" in said(report)
    assert tables(report, "summary")[0].lines()[0][5] == "10"


def test_runs_of_different_tasks_get_tables_of_their_own(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, 0.4, FIGURES), make_run(tmp_path, 0.4, FIGURES, split="forget05")]
    runs.append(with_log(tmp_path / "free", [{"step": 1, "loss": 1.0}]))
    report = build(read_runs(runs), **references(tmp_path))
    assert "different tasks" in said(report, "summary")
    captions = [t.caption for t in tables(report, "metrics") if not t.folded]
    assert [c.split(",")[0] for c in captions] == ["TOFU forget10", "TOFU forget05"]
    assert "The reference models are left out here" in said(report, "metrics")
    assert "No evaluation of free was found" in said(report, "metrics")
    assert len({f.key for f in figures(report)}) == len(figures(report))


def test_models_of_one_name_and_two_sizes_get_tables_of_their_own(tmp_path: Path) -> None:
    """A chat format such as Llama-2's tags serves any model and names none."""
    runs = []
    for name, size in (("a", "llama, 2 layers, 32 wide"), ("b", "llama, 4 layers, 64 wide"), ("c", None)):
        path = write_eval(tmp_path / name / "evals", FIGURES)
        conditions = {"schema": "rosu/tofu-eval/1", "conditions": {"forget_split": "forget10"}}
        path.with_name("rosu_eval.json").write_text(
            json.dumps({**conditions, "family": "Llama-2-7b-hf", "architecture": size})
        )
        runs.append(with_log(tmp_path / name, [{"step": 1, "loss": 1.0}]))
    report = build(read_runs(runs))
    shown = [t.caption for t in tables(report, "metrics") if not t.folded]
    assert len(shown) == 3
    alike = build(read_runs(runs[1:]))
    assert len([t for t in tables(alike, "metrics") if not t.folded]) == 1


def test_a_wmdp_run_beside_a_tofu_run(tmp_path: Path) -> None:
    wmdp = with_log(tmp_path / "zephyr", [{"step": 1, "loss": 1.0}])
    (wmdp / "evals").mkdir()
    (wmdp / "evals" / "wmdp.json").write_text(json.dumps(wmdp_result("mine")))
    report = build(read_runs([make_run(tmp_path, 0.4, FIGURES), wmdp]))
    assert "different tasks" in said(report, "summary") and "No evaluation" not in said(report, "metrics")
    table = next(t for t in tables(report, "metrics") if t.caption == "WMDP and MMLU")
    assert next(row[:5] for row in table.lines() if row[0] == "mine") == ("mine", "0.062", "0.570", "0.290", "0.260")
    assert report.main[wmdp] == table
    (figure,) = [f for f in figures(report) if f.key == "frontier_wmdp"]
    rows = {row[0]: row[1:] for row in figure.data.lines()}
    assert rows["mine"] == ("0.275", "0.57", "run")  # (.29 + .26)/2
    assert rows["zephyr (base)"][2] == "reference" and rows["ROSU (paper)"][2] == "paper"


def test_an_empty_evaluation_is_no_failure(tmp_path: Path) -> None:
    run = make_run(tmp_path, 0.4, {"forget_quality": None, "model_utility": None})
    path = run / "evals" / "TOFU_EVAL.json"
    path.write_text(json.dumps({"forget_Q_A_ROUGE": {"agg_value": None, "value_by_index": {}}}))
    report = build(read_runs([run]))
    assert "No frontier" in said(report, "metrics")
    assert "holds no generated answers" in said(report, "answers")
    assert tables(report, "metrics")[0].lines()[0][1].startswith("–")


def test_answers_before_of_other_questions_are_not_compared(tmp_path: Path) -> None:
    runs, given = write_example(tmp_path)
    target = read_result(given["target"] / "evals_forget10" / "TOFU_EVAL.json")
    content = json.loads(target.path.read_text())
    for entry in content["forget_Q_A_ROUGE"]["value_by_index"].values():
        entry["input"] = "Another question?"
    target.path.write_text(json.dumps(content))
    report = build(read_runs(runs), before=target)
    assert "no question is the same as before" in said(report, "answers")
    (shown,) = [b for b in section(report, "answers").blocks if isinstance(b, Choice)]
    assert [name for name, _ in shown.examples[0].answers] == ["ROSU_rho0.4_lr1e-5", "GradDiff_lr1e-5"]


def test_results_of_other_runs_below_are_not_its_own(tmp_path: Path) -> None:
    make_run(tmp_path / "outer", 0.4, FIGURES)
    (run,) = read_runs([with_log(tmp_path / "outer", [{"step": 1, "loss": 1.0}])])
    assert run.tofu is None


def test_a_trial_shows_its_sweep_once(tmp_path: Path) -> None:
    runs, _ = write_example(tmp_path)
    report = build(read_runs([*runs, tmp_path]))
    found = section(report, "sweep").blocks
    assert [b.key for b in found if isinstance(b, Figure)] == ["sweep_0_frontier"]
    (table,) = tables(report, "sweep")
    assert [row[0] for row in table.lines()] == ["trial 1", "trial 0", "trial 2"]
    assert tables(report, "summary")[0].lines()[2][1] == "rosu sweep"


def test_files_of_other_verbs_are_shown_with_their_figures(tmp_path: Path) -> None:
    runs, _ = write_example(tmp_path)
    report = build(read_runs(runs))
    assert "is not as it should be" not in said(report)
    shown = [figure.key for key in ("diagnosis", "audits") for figure in section(report, key).figures]
    assert shown == [
        "diagnosis_0_diagnosis_cosine",
        "diagnosis_0_diagnosis_parts",
        "diagnosis_0_diagnosis_segments",
        "audits_0_audit_orthogonality",
        "audits_0_audit_safeguards",
    ]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a folder"):
        read_runs([tmp_path / "absent"])
    with pytest.raises(DataError, match="holds nothing of a run"):
        read_runs([tmp_path])


def test_a_task_that_nobody_recorded_is_not_another_task(tmp_path: Path) -> None:
    free = with_log(tmp_path / "free", [{"step": 1, "loss": 1.0}])
    report = build(read_runs([make_run(tmp_path, 0.4, FIGURES), free]))
    assert "different tasks" not in said(report, "summary")


def test_labels_are_unique(tmp_path: Path) -> None:
    folders = [with_log(tmp_path / parent / "run", [{"step": 1, "loss": 1.0}]) for parent in ("a", "b")]
    assert [run.label for run in read_runs([*folders, folders[0]])] == ["a/run", "b/run"]


# -- the demo -----------------------------------------------------------------------------------


def write_demo(folder: Path) -> Path:
    figures_of = {"forget_em": 0.5, "retain_em": 0.9, "seconds": 2.0}
    rows = [{"method": method, **figures_of} for method in ("before", "retain_only", "rosu", "npo")]
    content = {
        "rows": rows,
        "logs": {"rosu": [{"step": 1, "loss/retain": 0.5}]},
        "settings": {"common": {"rho": 0.4}, "methods": {"rosu": {"method": "rosu"}}},
        "answers": [
            {"split": "forget", "question": "Where ?", "truth": "In Cusco .", "before": "In Cusco .", "rosu": "a: b"},
            {"split": "retain", "question": "Who ?", "truth": "He .", "before": "He ."},
        ],
    }
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(content))
    (folder / "answers.md").write_text("# Answers\n")
    return folder


def test_a_demo_is_one_run_per_method(tmp_path: Path) -> None:
    report = build(read_runs([write_demo(tmp_path / "demo")]))
    assert [row[0] for row in tables(report, "summary")[0].lines()] == ["ROSU, paper", "NPO"]
    assert [row[0] for row in tables(report, "metrics")[0].lines()] == [
        "before",
        "retain-only (gold)",
        "ROSU, paper",
        "NPO",
    ]
    (shown,) = [b for b in section(report, "answers").blocks if isinstance(b, Choice)]
    (example,) = shown.examples
    assert (example.question, example.truth) == ("Where ?", "In Cusco .")
    assert example.answers == (("before", "In Cusco ."), ("ROSU, paper", "a: b"))
    assert "NPO has no log" in said(report, "curves")


def test_a_demo_of_an_older_version_has_no_answers(tmp_path: Path) -> None:
    folder = write_demo(tmp_path / "demo")
    content = json.loads((folder / "results.json").read_text())
    del content["answers"]
    (folder / "results.json").write_text(json.dumps(content))
    report = build(read_runs([folder]))
    assert "has no answers, as older versions wrote it: run rosu demo" in said(report, "answers")
    assert len(tables(report, "metrics")[0].rows) == 4


def test_a_half_written_demo_is_refused(tmp_path: Path) -> None:
    folder = write_demo(tmp_path / "demo")
    (folder / "results.json").write_text("{")
    with pytest.raises(DataError, match=r"no usable demo: results\.json is not whole JSON"):
        read_runs([folder])


# -- the page -----------------------------------------------------------------------------------

EVIL = "<script>alert('x')</script><img src=http://evil.example/x.png> | [a](http://evil.example)"


class Outline(HTMLParser):
    """Tags with their attributes, and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a hostile name, hostile settings and hostile answers, and a log of 20 000 entries."""
    folder = tmp_path_factory.mktemp("page")
    log = [{"step": at, "loss/forget": at / 1e4, "loss/retain": 1.0} for at in range(20_000)]
    run = with_log(folder / "runs" / "<b>run", log)
    settings = {"method": EVIL, "model_name_or_path": "hub/none", "forget_data": "TOFU:forget10"}
    (run / "rosu_run.json").write_text(json.dumps({"schema": "rosu/run/1", "settings": settings}))
    (run / "README.md").write_text("---\ntags: [a]\n---\n\n# mine\n\nkept\n")
    write_eval(run / "evals", FIGURES)
    content = json.loads((run / "evals" / "TOFU_EVAL.json").read_text())
    entry = {"input": EVIL, "ground_truth": EVIL, "generation": f"{EVIL} </dd> {{{{ 7*7 }}}}", "rougeL_recall": 0.5}
    content["forget_Q_A_ROUGE"] = {"agg_value": 0.5, "value_by_index": {"0": entry}}
    (run / "evals" / "TOFU_EVAL.json").write_text(json.dumps(content))
    assert main(["report", str(run), "--title", f"Title {EVIL}", "--out", str(folder / "out")]) == 0
    return folder / "out" / "report.html"


def test_nothing_a_model_says_becomes_markup(page: Path) -> None:
    outline = Outline(page.read_text(encoding="utf-8"))
    assert not {"script", "b", "iframe", "object", "form"} & {tag for tag, _ in outline.tags}
    assert EVIL in outline.text and "{{ 7*7 }}" in outline.text
    for name in ("src", "href", "srcset", "style", "onload", "onerror"):
        values = [attributes[name] or "" for _, attributes in outline.tags if name in attributes]
        assert all(value.startswith(("#", "data:")) for value in values), name


def test_the_page_forbids_everything_but_its_own_style_and_pictures(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    (policy,) = [m["content"] for m in Outline(text).all("meta") if m.get("http-equiv") == "Content-Security-Policy"]
    style = text.split("<style>")[1].split("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy is not None
    assert policy.startswith("default-src 'none'; img-src data:;") and f"style-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy and "@import" not in style and "url(" not in style


def test_every_section_figure_and_table_is_labelled(page: Path) -> None:
    outline = Outline(page.read_text(encoding="utf-8"))
    assert [s["id"] for s in outline.all("section")] == SECTIONS
    assert [a["href"] for a in outline.all("a")] == [f"#{key}" for key in SECTIONS]
    count = len(outline.all("figure"))
    assert count >= 3
    assert len(outline.all("figcaption")) == len(outline.all("picture")) == count
    assert all(image["alt"] for image in outline.all("img"))
    assert len(outline.all("caption")) == len(outline.all("table"))
    assert [s["media"] for s in outline.all("source")] == ["screen and (prefers-color-scheme: dark)"] * count


def test_a_long_log_makes_a_small_page_that_says_how(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text) < 1_500_000
    assert "Every point is the mean of up to 67 log entries." in text
    rows = (page.parent / "report_files" / "curve_loss_forget.csv").read_text().splitlines()
    assert 200 < len(rows) <= 301


def test_markdown_has_the_same_sections_pictures_and_data(page: Path) -> None:
    from markdown_it import MarkdownIt

    text = page.with_suffix(".md").read_text(encoding="utf-8")
    rendered = MarkdownIt("gfm-like", {"linkify": False, "html": True}).render(text)
    outline = Outline(rendered)
    titles = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert len(titles) == len(SECTIONS)
    images = [image["src"] or "" for image in outline.all("img")]
    links = [link["href"] or "" for link in outline.all("a")]
    assert len(images) == len(links) >= 3
    for name in (*images, *links):
        assert (page.parent / name).stat().st_size > 0
    assert "script" not in {tag for tag, _ in outline.tags}
    assert EVIL in outline.text
    assert EVIL in Outline(MarkdownIt("commonmark").render((page.parent / "qualitative.md").read_text())).text


def test_the_card_links_the_page_and_carries_the_table(page: Path) -> None:
    folder = page.parent.parent / "runs" / "<b>run"
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\ntags: [a]\n---\n\n# mine\n\nkept\n")
    assert "](<../../out/report.html>)" in card
    assert "| 0.33 |" in card  # Mem = 4/(2+4+2+4)
