"""DeepSpeed on CPUs: claim accelerate's state with gloo, then run SCRIPT as ``python SCRIPT …`` would.

On GPUs ``accelerate launch --config_file configs/accelerate/default_config.yaml SCRIPT …`` does this with NCCL.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from accelerate import PartialState

PartialState(backend="gloo")
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
