"""Run cases on the simulated accelerator.

    python -m tests.accelerator.launch FOLDER PLAN.json

The plan is a list of launches, see `cases.py`; what becomes of them is in FOLDER.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.accelerator import device
from tests.distributed.forks import run_launches


def main() -> None:
    folder, plan = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    device.install(devices=2)
    from tests.accelerator.runs import run  # now that there is a device for transformers to find

    run_launches(plan, folder, run)


if __name__ == "__main__":
    main()
