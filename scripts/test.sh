#!/usr/bin/env bash
# Run the whole test suite: sets up .venv when needed. Arguments are passed on to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
# One thread per process: at the size of the tests more threads only wait for each other.
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
# Tests that start processes of their own run one after another (loadgroup), beside the others.
exec .venv/bin/python -m pytest -n 2 --dist loadgroup "$@"
