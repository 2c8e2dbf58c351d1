#!/usr/bin/env bash
# Watch a small Llama forget ten fictitious people: sets up .venv when needed, then runs 'rosu demo'.
# Arguments are passed on: ./scripts/demo.sh --out DIR --seeds 0 1 2
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/setup.sh
exec .venv/bin/rosu demo "$@"
