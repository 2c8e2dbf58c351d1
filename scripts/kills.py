"""Kill runs at random moments, let the same command go on, and compare the result with a run that nobody killed.

Toy runs of ``rosu train`` with an adapter, dropout, workers and calibration, in one process and under DDP with two.
Half of the kills are SIGTERM (a scheduler's: checkpoint and exit), half SIGKILL. Every run is repeated with the same
command line, which has ``--resume-from-checkpoint auto``, until it is finished.

    python scripts/kills.py                        # 30 kills, about a quarter of an hour on two cores
    python scripts/kills.py --kills 2 --smoke      # one process only
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rosu_llm.files import weight_digests
from rosu_llm.toys import save_model, toy_world, write_rows

#: Every case has its own way of being resumed wrongly.
CASES: dict[str, dict[str, object]] = {
    "adapter, dropout": {"lora_r": 2, "lora_dropout": 0.3},
    "workers": {"dataloader_num_workers": 1, "dataloader_persistent_workers": True},
    "calibration, npo": {"calibrate": "holdout", "forget_loss": "npo"},
}
COMMON = {
    "method": "rosu", "max_steps": 60, "save_steps": 5, "save_total_limit": 2, "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2, "learning_rate": 1e-3, "use_cpu": "true", "report_to": "none",
    "disable_tqdm": "true", "resume_from_checkpoint": "auto",
}  # fmt: skip


def command(world: int, settings: dict[str, object]) -> list[str]:
    """The one command line of a run."""
    start = [sys.executable]
    if world > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world)]
        settings = {**settings, "gradient_accumulation_steps": 1, "ddp_backend": "gloo"}
    flags = [word for key, value in settings.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    return [*start, "-m", "rosu_llm", "train", *flags]


def begin(call: list[str]) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    quiet = subprocess.DEVNULL
    return subprocess.Popen(call, env=environment, stdout=quiet, stderr=quiet, start_new_session=True)


def killed(call: list[str], out: Path, number: signal.Signals, draw: random.Random) -> int | None:
    """Start, kill at a random moment after the first checkpoint; the exit code, None if it was finished already."""
    process = begin(call)
    deadline = time.monotonic() + 300
    while not any(out.glob("checkpoint-*")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(draw.random() * 1.5)
    if process.poll() is not None:
        return None
    if number is signal.SIGKILL:
        os.killpg(process.pid, signal.SIGKILL)  # its own session: the launcher and its workers
    else:
        process.terminate()
    return process.wait(timeout=300)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="one process only")
    options = parser.parse_args()
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        world = toy_world()
        data = {"model_name_or_path": save_model(folder / "model", world)}
        for part in ("forget", "retain", "holdout"):
            rows = ({"question": item.question, "answer": item.answer} for item in world.corpus.items[part])
            write_rows(folder / f"{part}.jsonl", rows)
            data[f"{part}_data"] = str(folder / f"{part}.jsonl")
        whole: dict[tuple[int, str], dict[str, str]] = {}
        equal = done = 0
        while done < options.kills:
            processes = 1 if options.smoke or done % 3 < 2 else 2
            name = list(CASES)[done // 3 % len(CASES)] if not options.smoke else list(CASES)[done % len(CASES)]
            settings = {**COMMON, **data, **CASES[name]}
            if (processes, name) not in whole:
                out = folder / "whole"
                assert begin(command(processes, {**settings, "output_dir": out})).wait(timeout=600) == 0, name
                whole[processes, name] = weight_digests(out)
                shutil.rmtree(out)
            out = folder / "out"
            call = command(processes, {**settings, "output_dir": out})
            number = (signal.SIGTERM, signal.SIGKILL)[done % 2]
            code = killed(call, out, number, draw)
            if not code:  # it ended before the signal came
                assert weight_digests(out) == whole[processes, name], f"{number.name} ended early with exit code 0"
            else:
                left = sorted(path.name for path in out.glob("checkpoint-*"))
                assert begin(call).wait(timeout=600) == 0, "the same command did not finish the run"
                same = weight_digests(out) == whole[processes, name]
                done, equal = done + 1, equal + same
                print(
                    f"{done:3d} {number.name}, {processes} process(es), {name}: left {', '.join(left)}, exit {code}: "
                    + ("equal bit for bit" if same else "DIFFERENT"),
                    flush=True,
                )
            shutil.rmtree(out)
        print(f"{equal} of {done} equal bit for bit")
        raise SystemExit(equal != done)


if __name__ == "__main__":
    main()
