"""Our wheel beside a real OpenUnlearning checkout.

Runs where ``OPEN_UNLEARNING_DIR`` names a checkout and ``OPEN_UNLEARNING_PYTHON`` the interpreter of its environment
(where neither torch nor anything else is touched: our wheel is unpacked beside it).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rosu_llm.openunlearning.baselines import TABLE
from rosu_llm.openunlearning.offline import write_offline
from rosu_llm.openunlearning.tofu import CPU_EVAL, CPU_TRAIN, SMOKE_EVAL
from tests.conftest import ROOT
from tests.openunlearning.checkout_run import (
    CPU_MODEL,
    CPU_TRAINER,
    MODEL,
    NO_EVALUATION,
    SMALL,
    TWO_PROCESSES,
    Checkout,
    make_workspace,
)
from tests.openunlearning.documented import SHORT, documented, run_documented

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("processes"),
    pytest.mark.skipif(
        "OPEN_UNLEARNING_DIR" not in os.environ or "OPEN_UNLEARNING_PYTHON" not in os.environ,
        reason="OPEN_UNLEARNING_DIR and OPEN_UNLEARNING_PYTHON name no checkout of OpenUnlearning and its interpreter",
    ),
]
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing is left in the source tree."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("rosu_llm", "hydra_plugins", "configs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        str(source),
    ]
    subprocess.run(build, check=True, capture_output=True, timeout=300)
    (file,) = out.glob("*.whl")
    return file


@pytest.fixture(scope="module")
def checkout(wheel: Path, shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    workspace, site = tmp_path_factory.mktemp("workspace"), tmp_path_factory.mktemp("site")
    python = os.environ["OPEN_UNLEARNING_PYTHON"]
    install = [python, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True, capture_output=True, timeout=300)
    root = Path(os.environ["OPEN_UNLEARNING_DIR"]).resolve()
    make_workspace(workspace, shared_data, rows=8)
    (workspace / "configs").symlink_to(root / "configs")  # its launcher's file names another relative to it
    return Checkout(root, python, workspace, site)


def test_training_on_one_process_then_evaluation(checkout: Checkout) -> None:
    text = checkout.train("one", "trainer=ROSU", *NO_EVALUATION)
    assert "layout local, 1 processes" in text
    assert "'perturb/realized': 1.0" in text or "'perturb/realized': 0.99" in text
    done = checkout.start(
        [
            *(checkout.python, str(checkout.root / "src" / "eval.py"), "experiment=eval/tofu/default", "task_name=one"),
            *("forget_split=forget01", "holdout_split=holdout01", *CPU_MODEL, "model.model_args.device_map=cpu"),
            f"model.model_args.pretrained_model_name_or_path={checkout.saved('one')}",
            f"paths.output_dir={checkout.saved('one')}/evals",
        ]
    )
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((checkout.saved("one") / "evals" / "TOFU_SUMMARY.json").read_text())
    assert {"forget_Q_A_Prob", "model_utility", "extraction_strength"} <= set(summary)


def test_training_on_two_processes_evaluates_on_the_way(checkout: Checkout) -> None:
    text = checkout.train(
        *("two", "trainer=ROSU", *TWO_PROCESSES, "holdout_split=holdout01"),
        *("trainer.args.eval_on_start=true", "trainer.args.eval_strategy=no"),
        world=2,
    )
    assert "layout ddp, 2 processes" in text
    for step in (0, 3):
        summary = json.loads((checkout.saved("two") / f"checkpoint-{step}" / "evals" / "TOFU_SUMMARY.json").read_text())
        assert "forget_Q_A_Prob" in summary


def test_every_loss_it_has_is_ours_in_value_and_gradient(checkout: Checkout) -> None:
    """The whole objective γ·forget + α·retain of its trainers on one batch of a real Llama, in float32.

    UNDIAL on a batch that is all answer: theirs averages over prompt and padding too, and then the two differ.
    """
    model = checkout.workspace / "open-unlearning" / f"tofu_{MODEL}_full"
    done = checkout.start([checkout.python, str(HERE / "losses_worker.py"), str(checkout.root), str(model)])
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    apart = found.pop("undial with a prompt")
    assert set(found) == {"graddiff", "npo", "simnpo", "idk_dpo", "altpo", "undial", "wga", "satimp"}
    for name, (theirs, ours, difference) in found.items():
        assert ours == pytest.approx(theirs, rel=1e-5), name
        assert difference < 1e-5, name
    assert apart[2] > 1e-2


def test_weights_equal_those_of_the_stand_alone_trainer(checkout: Checkout) -> None:
    """The same model, data, collator and seed; to the bit. The pull is matched, so that it shows in the weights."""
    overrides = ("trainer=ROSU_matched", *NO_EVALUATION)
    checkout.train("inside", *overrides)
    start = [checkout.python, str(HERE / "standalone_worker.py"), str(checkout.root), str(checkout.saved("alone"))]
    done = checkout.start([*start, "experiment=unlearn/tofu/default", *CPU_MODEL, *CPU_TRAINER, *SMALL, *overrides])
    assert done.returncode == 0, done.stderr[-3000:]
    assert torch.equal(checkout.weights("inside"), checkout.weights("alone"))
    checkout.train("other", *overrides, "trainer.method_args.rho=0.2")
    assert not torch.equal(checkout.weights("inside"), checkout.weights("other"))


def test_other_trainers_do_not_change(checkout: Checkout) -> None:
    """With our package installed and without it, to the bit. GradDiff and NPO as one multirun, which is quicker."""
    for installed in (True, False):
        out = f"trainer.args.output_dir={checkout.saved(str(installed))}/${{trainer.handler}}"
        sweep = ("-m", "trainer=GradDiff,NPO", out, *NO_EVALUATION)
        checkout.train("sweep", *sweep, installed=installed)
        layer = r"trainer.method_args.module_regex=model\.layers\.1"
        checkout.train("rmu", "trainer=RMU", layer, out, *NO_EVALUATION, installed=installed)
    for name in ("GradDiff", "NPO", "RMU"):
        assert torch.equal(checkout.weights(f"True/{name}"), checkout.weights(f"False/{name}")), name


def test_its_forget_losses_by_name(checkout: Checkout) -> None:
    """One multirun over all of them, on data with alternate answers."""
    names = ("IdkDPO", "NPO", "SimNPO", "WGA", "SatImp", "CEU", "UNDIAL")
    text = checkout.train(
        *("losses", "-m", "experiment=unlearn/tofu/idk", "model=Llama-3.2-1B-Instruct", "trainer=ROSU"),
        *(f"trainer.method_args.forget_loss={','.join(names)}", "+holdout_split=holdout01", *NO_EVALUATION),
        f"trainer.args.output_dir={checkout.saved('losses')}/${{trainer.method_args.forget_loss}}",
    )
    for name in names:
        assert f"forget_loss={'dpo' if name == 'IdkDPO' else name.lower()}" in text
    weights = [checkout.weights(f"losses/{name}") for name in names]
    assert all(not torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i])


def test_recommended_experiment(checkout: Checkout) -> None:
    text = checkout.train(
        "recommended", "experiment=unlearn/tofu/rosu_recommended", "holdout_split=holdout01", *NO_EVALUATION
    )
    assert "'depth/target'" in text and "'depth/reached'" in text


def test_bf16_weights_are_upcast_with_a_warning(checkout: Checkout) -> None:
    wide = ("model.model_args.torch_dtype=bfloat16", "trainer.args.bf16=true")
    text = checkout.train("bf16", "trainer=ROSU", *wide, *NO_EVALUATION)
    assert "Trainable weights were bfloat16 and are now float32" in text
    assert "'perturb/realized'" in text


def test_accelerate_launch(checkout: Checkout) -> None:
    launch = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines", "1")
    assert "layout local" in checkout.train("launched", "trainer=ROSU", *NO_EVALUATION, launch=launch)


def test_zero3_with_its_own_configuration(checkout: Checkout, tmp_path: Path) -> None:
    """Its launcher's DeepSpeed file, bf16 weights, two processes; gloo in place of NCCL."""
    state = tmp_path / "state.json"
    state.write_text('{"use_configured_state": true}')
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(HERE / "gloo_worker.py"))
    text = checkout.train(
        *("zero3", "trainer=ROSU", "model.model_args.torch_dtype=bfloat16", "trainer.args.bf16=true"),
        f"+trainer.args.accelerator_config={state}",
        launch=launch,
        ACCELERATE_USE_DEEPSPEED="true",
        ACCELERATE_DEEPSPEED_CONFIG_FILE="configs/accelerate/zero_stage3_offload_config.json",
        ACCELERATE_DEEPSPEED_ZERO3_INIT="true",
        LOCAL_SIZE="2",  # or DeepSpeed asks numactl how many CPUs there are
        TORCH_EXTENSIONS_DIR=str(Path(checkout.python).parent.parent / "torch_extensions"),
        PATH=f"{Path(checkout.python).parent}:{os.environ['PATH']}",  # ninja
    )
    assert "layout zero, 2 processes" in text
    assert "No evaluation during training: the weights are split over 2 processes" in text
    assert (checkout.saved("zero3") / "model.safetensors").is_file()


@pytest.fixture(scope="module")
def offline(checkout: Checkout, shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the documented commands can be typed: the checkout's folders and what the hub would give."""
    folder = tmp_path_factory.mktemp("offline")
    write_offline(shared_data / "tofu", folder)
    for name in ("src", "configs"):
        (folder / name).symlink_to(checkout.root / name)
    return folder


def run_here(commands: str, checkout: Checkout, folder: Path) -> str:
    python = f"env PYTHONPATH={checkout.site} PYTHONDONTWRITEBYTECODE=1 {checkout.python}"
    words = {"train": [*CPU_TRAIN, *SHORT], "evaluate": [*CPU_EVAL, *SMOKE_EVAL]}
    done = run_documented(commands, folder, folder / "bin", python, timeout=1800, **words)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def table_rows(text: str) -> list[str]:
    return [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]


def test_the_documented_sequence_ends_in_a_table(checkout: Checkout, offline: Path) -> None:
    printed = run_here(documented("openunlearning.md", "From training to the paper's table"), checkout, offline)
    assert table_rows(printed) == ["method", "*Initial*", "*Retain*", "ROSU"]
    assert "–" not in printed.split("TOFU forget10")[0]


def test_every_baseline_of_the_papers_table_trains_as_documented(checkout: Checkout, offline: Path) -> None:
    """The page's commands one by one, each with another result."""
    text = documented("openunlearning_table3.md").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.startswith("python src/train.py")]
    assert len(lines) == len(TABLE)
    off = " ".join(f"trainer.args.{word}" for word in ("eval_strategy=no", "eval_on_start=false", "do_eval=false"))
    run_here("\n".join(f"{line} {off}" for line in lines), checkout, offline)
    saved = [load_file(offline / "saves" / "unlearn" / name / "model.safetensors") for name in TABLE]
    weights = [torch.cat([tensors[key].reshape(-1).double() for key in sorted(tensors)]) for tensors in saved]
    assert all(not torch.equal(a, b) for at, a in enumerate(weights) for b in weights[:at])


def test_the_summarys_components_are_openunlearnings_own(checkout: Checkout) -> None:
    """What ``rosu_summary`` adds by reference equals the metrics' own files; composing it takes no longer."""
    names = ["exact_memorization", "forget_Q_A_PARA_Prob", "mia_loss", "mia_zlib", "mia_min_k", "mia_min_k_plus_plus"]
    code = (
        "import json, sys, time\nfrom hydra import compose, initialize_config_dir\n"
        "from omegaconf import OmegaConf\n"
        f"with initialize_config_dir(config_dir={str(checkout.root / 'configs')!r}, version_base=None):\n"
        "    found = []\n"
        "    for metrics in (sys.argv[1], 'rosu_summary'):\n"
        "        words = ['task_name=x', 'experiment=eval/tofu/default', f'+eval/tofu_metrics=[{metrics}]']\n"
        "        began = time.process_time()\n"
        "        config = compose('eval.yaml', overrides=words)\n"
        "        took = time.process_time() - began\n"
        "        tree = OmegaConf.to_container(config.eval.tofu.metrics, resolve=True)\n"
        "        found.append({'seconds': took, **{n: tree[n] for n in (*sys.argv[1].split(','), 'privleak')}})\n"
        "print(json.dumps(found))\n"
    )
    done = checkout.start([checkout.python, "-c", code, ",".join([*names, "forget_Q_A_gibberish"])])
    assert done.returncode == 0, done.stderr[-3000:]
    theirs, ours = json.loads(done.stdout.splitlines()[-1].replace("train[0:]", "train"))
    assert ours.pop("seconds") < 2 * theirs.pop("seconds")
    assert ours == theirs


def test_unknown_method_args(checkout: Checkout) -> None:
    with pytest.raises(AssertionError, match=r"Unknown method_args of trainer=ROSU 'rhoo'.*Did you mean 'rho'"):
        checkout.train("bad", "trainer=ROSU", "+trainer.method_args.rhoo=1", *NO_EVALUATION)


def test_every_configuration_composes(checkout: Checkout) -> None:
    ours = ROOT / "configs" / "openunlearning"
    trainers = sorted(f"trainer={f.stem}" for f in ours.glob("trainer/*.yaml"))
    folder = ours / "experiment"
    experiments = sorted(
        f"experiment={f.relative_to(folder).with_suffix('')}" for f in folder.glob("unlearn/**/*.yaml")
    )
    code = (
        "import sys\nfrom hydra import compose, initialize_config_dir\n"
        f"with initialize_config_dir(config_dir={str(checkout.root / 'configs')!r}, version_base=None):\n"
        "    for override in sys.argv[1:]:\n"
        "        config = compose('unlearn.yaml', overrides=['task_name=x', override], return_hydra_config=True)\n"
        "        assert 'rosu_llm' in config.hydra.callbacks, override\n"
        "        print(override, config.trainer.handler)\n"
    )
    done = checkout.start([checkout.python, "-c", code, *trainers, *experiments])
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == len(trainers) + len(experiments)


def test_our_wheel_upgrades_nothing(checkout: Checkout, wheel: Path, tmp_path: Path) -> None:
    listed = checkout.start([checkout.python, "-m", "pip", "list", "--format=json"], installed=False)
    present = {_canonical(entry["name"]) for entry in json.loads(listed.stdout)}
    report = tmp_path / "report.json"
    command = [
        checkout.python,
        "-m",
        "pip",
        "install",
        "-q",
        "--dry-run",
        "--report",
        str(report),
        f"{wheel}[openunlearning]",
    ]
    done = checkout.start(command, installed=False)
    if done.returncode != 0 and not report.exists():
        pytest.skip(f"pip found no package index: {done.stderr[-200:]}")
    new = {_canonical(entry["metadata"]["name"]) for entry in json.loads(report.read_text())["install"]}
    assert "rosu-llm" in new
    assert not (new - {"rosu-llm"}) & present


def _canonical(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")
