#!/usr/bin/env bash
# The full-retain orthogonality audit at full size: 500 mini-batch pairs for every retain batch size from 4 to 2048, over all
# of TOFU's forget10 and retain90, on stories260K (a real Llama of 260,032 parameters, whose 4000 per-sample gradients fit in
# memory: 5 GB). Interrupt it and the same command goes on.
#
#   scripts/audit_full.sh                     about 5 minutes of one core; the figure and table of docs/audits.md
#   DATA=folder OUT=audit scripts/audit_full.sh
set -euo pipefail
cd "$(dirname "$0")/.."

data=${DATA:-${ROSU_DATA:-data}} # holds stories260K and tofu
out=${OUT:-outputs/audit_full}
rosu=(rosu)
command -v rosu > /dev/null || rosu=(python3 -m rosu_llm)
"${rosu[@]}" audit orthogonality \
  --model-name-or-path "$data/stories260K" \
  --forget-data "$data/tofu/forget10.json" --retain-data "$data/tofu/retain90.json" --max-length 192 \
  --pairs 500 --batch-sizes 4 8 16 32 64 128 256 512 1024 2048 --forget-batch-size 32 --seed 0 \
  --per-sample yes --use-cpu true --out "$out" "$@"
