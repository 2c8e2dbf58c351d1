"""Documents cannot rot: the commands and the Python of README and docs run, every shipped configuration is parsed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rosu_llm.cli.main import VERBS, main
from rosu_llm.recipes.settings import build, parts_needed, read_config
from tests.conftest import ROOT
from tests.models import tiny_llama
from tests.preloaded import beside, interpreter

README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))}
RECIPES = sorted((ROOT / "configs" / "recipes").rglob("*.yaml"))


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def commands() -> list[list[str]]:
    lines = [line for text in (README, *DOCS.values()) for block in blocks("bash", text) for line in block.splitlines()]
    found = [shlex.split(line, comments=True) for line in lines if line.startswith("rosu ")]
    return [list(words) for words in dict.fromkeys(map(tuple, found))]


def test_the_readme_is_short_and_every_verb_has_a_command_and_a_line() -> None:
    assert len(README.splitlines()) <= 150
    assert len(commands()) >= 4
    assert {words[1] for words in commands()} == set(VERBS)
    for page in (README, DOCS["index.md"]):
        assert {*re.findall(r"^\| `(?:rosu )?([a-z]+)` \|", page, re.MULTILINE)} == set(VERBS)


def test_every_script_that_a_page_names_is_run_by_a_test() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    for name in {*re.findall(r"scripts/(\w+\.\w+)", "".join((README, *DOCS.values())))}:
        assert name in tests, name


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_documented_rosu_command_runs(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At smoke size, with the command's own flags, from the project's root."""
    monkeypatch.chdir(ROOT)
    arguments = [w for w in words[1:] if w != "--smoke"]
    if "--accelerate-config" in arguments:  # needs GPUs; a launch on CPUs is tested in tests/distributed
        from rosu_llm.cli.common import command

        at = arguments.index("--accelerate-config")
        call = command(arguments[at + 1], 2, arguments[1:])
        arguments = call[call.index("rosu_llm") + 1 :]
    if "--list-settings" not in arguments:
        arguments.append("--smoke")
        for flag in ("--output-dir", "--out", "--output", "--frontier"):
            if flag in arguments:
                arguments[arguments.index(flag) + 1] = str(tmp_path / "out")
        if arguments[0] == "train" and "--output-dir" not in arguments:
            arguments += ["--output-dir", str(tmp_path / "out")]
    assert main(arguments) == 0


def test_the_two_scripts_and_ci_are_there_and_run_what_they_say() -> None:
    for name, call in (("scripts/demo.sh", "rosu demo"), ("scripts/test.sh", "pytest"), (".ci/run", "scripts/test.sh")):
        path = ROOT / name
        assert path.stat().st_mode & 0o111, f"{name} has no run bit"
        assert call in path.read_text()
        subprocess.run(["bash", "-n", str(path)], check=True)


def test_the_workflow_and_the_hooks_run_what_ci_runs() -> None:
    ci = (ROOT / ".ci" / "run").read_text()
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    steps = " ".join(step.get("run", "") for step in workflow["jobs"]["test"]["steps"])
    for command in ("scripts/test.sh", "ruff check .", "ruff format --check .", "bin/mypy", "mkdocs build --strict"):
        assert command in ci and command in steps
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [hook["id"] for hook in local["hooks"]] == ["ruff", "ruff-format", "mypy"]
    forms = [yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")]
    assert sum("body" in form for form in forms) == 2


def test_the_python_of_the_first_pages_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """README and quickstart show the same two blocks; with a toy model and toy pairs under the names they use."""
    import torch

    from rosu_llm.experiments.demo.world import build_world, small_llama
    from rosu_llm.losses import COUNT, LOSSES, logits_of, token_nll

    monkeypatch.chdir(tmp_path)
    trainer_block, loop_block = blocks("python")
    assert blocks("python", DOCS["index.md"]) == [trainer_block, loop_block]
    (loss_block,) = blocks("python", DOCS["methods.md"])
    world = build_world(0, people={"forget": 1, "retain": 1, "calibration": 1, "holdout": 1})
    small_llama(len(world.tokenizer), 0, hidden=32, layers=1).save_pretrained("model")
    world.tokenizer.save_pretrained("model")
    pairs = [("Where was it ?", "In Cusco .")] * 3
    scope: dict[str, Any] = {"name": "model", "forget_pairs": pairs, "retain_pairs": pairs[::-1]}
    exec(trainer_block, scope)
    assert scope["trainer"].state.global_step > 0

    model = tiny_llama()
    batch = {"input_ids": torch.randint(4, 60, (2, 8))}
    batch["labels"] = batch["input_ids"]
    scope = {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
        "batches": [(batch, batch)],
        "loss": lambda m, b: token_nll(logits_of(m, b), b["labels"]).sum() / COUNT["token"](b),
    }
    exec(loop_block, scope)
    assert scope["logs"]["step/fallback"] == 1.0  # forget and retain are the same batch here

    exec(loss_block, {})
    assert LOSSES.pop("my_loss").unit == "token"


def test_the_python_of_the_wmdp_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a toy checkpoint of enough layers in place of Zephyr, and three steps."""
    from rosu_llm.experiments.demo.world import build_world, small_llama

    monkeypatch.chdir(tmp_path)
    (block,) = blocks("python", DOCS["wmdp.md"])
    world = build_world(0, people={"forget": 1, "retain": 1, "calibration": 1, "holdout": 1})
    small_llama(len(world.tokenizer), 0, hidden=32, layers=9).save_pretrained("toy")
    code = block.replace("HuggingFaceH4/zephyr-7b-beta", "toy").replace("max_steps=150", "max_steps=3, use_cpu=True")
    texts = [item.answer for item in world.corpus.items["forget"]]
    scope: dict[str, Any] = {"tokenizer": world.tokenizer, "hazardous_texts": texts, "general_texts": texts[::-1]}
    exec(code, scope)
    assert scope["trainer"].state.global_step == 3
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_the_python_of_the_tofu_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a toy model and toy questions; the results of a first call serve as the retain model's of the second."""
    from rosu_llm.experiments.demo.world import build_world, small_llama
    from rosu_llm.toys import write_toy_data

    monkeypatch.chdir(tmp_path)
    (block,) = blocks("python", DOCS["tofu.md"])
    world = build_world(0, people={"forget": 2, "retain": 3, "calibration": 1, "holdout": 1})
    write_toy_data(tmp_path, "forget10", world.corpus.items)
    small = f'data={str(tmp_path)!r}, max_new_tokens=3, fluency_model=None, chat_format="Llama-2-7b-hf", limit=2'
    code = block.replace('chat_format="Llama-3.2-1B-Instruct", limit=40', small)
    scope: dict[str, Any] = {"model": small_llama(len(world.tokenizer), 0, hidden=32, layers=1)}
    scope["tokenizer"] = world.tokenizer
    exec(code.replace('Path("evals"), retain=Path("retain/TOFU_EVAL.json")', 'Path("retain")'), scope)
    assert "forget_quality" not in scope["summary"]
    exec(code, scope)
    assert scope["summary"]["forget_quality"] == 1.0  # the same model


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.name)
def test_every_recipe_is_parsed_by_the_real_classes(path: Path) -> None:
    run, config = build({**read_config(path), "use_cpu": True, "bf16": False})
    run.check_run(parts_needed(config))
    assert config.rule()


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.name)
def test_every_recipe_runs_at_smoke_size(path: Path, tmp_path: Path) -> None:
    assert main(["train", "--config", str(path), "--smoke", "--output-dir", str(tmp_path / "out")]) == 0
    assert [*(tmp_path / "out" / "smoke").glob("*.safetensors")]


def test_recipes_ship_with_the_package() -> None:
    from importlib.resources import files

    shipped = files("rosu_llm.configs.recipes")
    for path in RECIPES:
        assert shipped.joinpath(*path.relative_to(ROOT / "configs" / "recipes").parts).is_file(), path.name


def test_citation_and_version_agree() -> None:
    import rosu_llm

    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == rosu_llm.__version__
    assert f"## {rosu_llm.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_importing_the_package_is_light() -> None:
    code = "import sys, rosu_llm; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    assert output.strip() == "[]"


def test_every_export_exists() -> None:
    import rosu_llm

    for name in rosu_llm.__all__:
        assert getattr(rosu_llm, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        rosu_llm.nonsense  # noqa: B018


def test_the_evaluation_benchmark_runs_at_smoke_size(shared_data: Path) -> None:
    command = [interpreter(), str(ROOT / "scripts" / "bench_eval.py"), "--smoke"]
    subprocess.run(
        command, env={**os.environ, "ROSU_DATA": str(shared_data)}, check=True, capture_output=True, cwd=ROOT
    )


@pytest.mark.parametrize(
    "script",
    [
        "bench_methods.py",
        "bench_per_sample.py",
        "bench_step.py",
        "bench_windows.py",
        "bench_wmdp.py",
        "memory_neutrality.py",
    ],
)
def test_benchmarks_run_at_smoke_size(script: str) -> None:
    command = [interpreter(), str(ROOT / "scripts" / script), "--smoke"]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)


def run_script(name: str, folder: Path, *flags: str, **variables: str) -> str:
    """What a script prints, run in a folder with the ``rosu`` of this environment."""
    done = subprocess.run(
        [str(ROOT / "scripts" / name), *flags],
        env=beside({**os.environ, "OMP_NUM_THREADS": "1", **variables}),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_full_audit_script_runs_at_smoke_size(shared_data: Path, tmp_path: Path) -> None:
    run_script("audit_full.sh", tmp_path, "--smoke", DATA=str(shared_data), OUT=str(tmp_path / "audit"))
    assert list((tmp_path / "audit").rglob("*.png"))


def test_the_coupling_script_runs_at_smoke_size(shared_data: Path, tmp_path: Path) -> None:
    command = [interpreter(), str(ROOT / "scripts" / "coupling_settings.py"), "--smoke", "--out", str(tmp_path)]
    done = subprocess.run(
        command, env={**os.environ, "ROSU_DATA": str(shared_data)}, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert sum(line.startswith("| ") for line in done.stdout.splitlines()) >= 4


@pytest.mark.parametrize(("script", "rows"), [("wmdp_zephyr.sh", 1), ("wmdp_ablation.sh", 1)])
def test_wmdp_scripts_run_at_smoke_size(script: str, rows: int, tmp_path: Path) -> None:
    """Train, evaluate, join; the paper's rows stand beside as many of ours."""
    names = {"SMOKE": "1", "METHODS": "rosu", "ROWS": "delta-only", "OUT": str(tmp_path)}
    printed = run_script(script, tmp_path, **names)
    assert sum(line.startswith("| toy") for line in printed.split("(base)")[-1].splitlines()) == rows


def test_the_picture_can_be_drawn_again(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "draw_geometry.py"
    subprocess.run([interpreter(), str(script), str(tmp_path / "geometry.png")], check=True, cwd=ROOT)
    assert (tmp_path / "geometry.png").stat().st_size > 10_000


def test_the_small_tofu_script_runs_with_a_toy_model(shared_data: Path, tmp_path: Path) -> None:
    """Learn, unlearn, evaluate, join; and note what is finished."""
    flags = ["--smoke", "--limit", "2", "--out", str(tmp_path / "out"), "--data", str(shared_data / "tofu")]
    printed = run_script("tofu_small.sh", tmp_path, *flags, METHODS="rosu", EPOCHS="1", LEARN_EPOCHS="1")
    table = (tmp_path / "out" / "table.md").read_text(encoding="utf-8")
    assert [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("| ")][1:] == [
        "*Initial*",
        "*Retain*",
        "rosu",
    ]
    assert "learn-target" in printed
    done = {path.name for path in (tmp_path / "out" / "logs").glob("*.done")}
    assert {"learn-target.done", "unlearn-rosu.done", "eval-rosu.done"} <= done  # by which a second call knows


@pytest.mark.slow
def test_the_small_audit_script_runs_with_a_toy_model(shared_data: Path, tmp_path: Path) -> None:
    """Learn, unlearn, all three audits, and the table that audit_small.py makes of them."""
    flags = ["--smoke", "--out", str(tmp_path / "out"), "--data", str(shared_data / "tofu")]
    printed = run_script("audit_small.sh", tmp_path, *flags)
    rows = [line.split("|")[1].strip() for line in printed.splitlines() if line.startswith("| ")]
    each = ["before unlearning", "retain model", "rosu"]
    assert rows == ["method", *each[1:], "relearned and rounded", *each, "extracted, ROUGE-L recall", *each]
    assert len(list((tmp_path / "out" / "audits" / "rosu-0").glob("audit_*.json"))) == 3
    assert not list(
        (tmp_path / "out" / "audits" / "rosu-0").rglob("retain-*.json")
    )  # the controls have their own place
    again = run_script("audit_small.sh", tmp_path, *flags)
    assert again.splitlines() == [
        line for line in printed.splitlines() if "|" in line or not line
    ]  # nothing is repeated


@pytest.mark.parametrize(("task", "more"), [("people", []), ("instruct", ["--bf16"])])
def test_the_comparison_runs_at_smoke_size(task: str, more: list[str], shared_data: Path, tmp_path: Path) -> None:
    """Make models where the task needs them, search, select, run on fresh seeds, write the tables."""
    flags = ["--smoke", "--out", str(tmp_path), "--data", str(shared_data / "tofu"), *more]
    printed = run_script("benchmark_quality.sh", tmp_path, task, *flags)
    assert "is closest, by" in printed.replace("\n", " ")
    page = (tmp_path / task / "comparison.md").read_text(encoding="utf-8")
    assert [line for line in page.splitlines() if line.startswith("| ROSU, recommended*")]
    assert {f"{name}.tex" for name in ("figures", "scores", "search")} <= {p.name for p in (tmp_path / task).iterdir()}


def test_the_small_model_names_the_package_that_reads_it(tmp_path: Path) -> None:
    """Before the download."""
    without = "import importlib.util as u, runpy, sys; find = u.find_spec; sys.argv = sys.argv[1:]; "
    without += "u.find_spec = lambda name, *at: None if name == 'gguf' else find(name, *at); "
    without += "runpy.run_path(sys.argv[0], run_name='__main__')"
    call = [sys.executable, "-c", without, str(ROOT / "scripts" / "small_model.py"), str(tmp_path / "model")]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "pip install gguf" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_subset_needs_something_to_forget(tmp_path: Path) -> None:
    call = [sys.executable, str(ROOT / "scripts" / "tofu_subset.py"), "unread", str(tmp_path / "out"), "--limit", "0"]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--limit 0 leaves nothing to forget" in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_comparison_refuses_what_it_does_not_know() -> None:
    for flags, words in ((["peoples"], "'peoples' is not"), ([], "which task"), (["authors"], "needs --model")):
        call = [str(ROOT / "scripts" / "benchmark_quality.sh"), *flags]
        done = subprocess.run(call, capture_output=True, text=True, check=False)
        assert done.returncode == 2 and words in done.stderr


def test_the_small_tofu_script_refuses_what_it_does_not_know() -> None:
    for flags, env in ((["--limits", "3"], {}), ([], {"METHODS": "rosu nonsense"})):
        call = [str(ROOT / "scripts" / "tofu_small.sh"), *flags]
        done = subprocess.run(call, env={**os.environ, **env}, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "nonsense" in done.stderr or "--limits" in done.stderr
