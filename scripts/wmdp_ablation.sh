#!/usr/bin/env bash
# The paper's component ablation on WMDP in one command: ROSU, zero-order, βδ only, ηv only; train, evaluate, one table.
#
#   scripts/wmdp_ablation.sh                          one GPU
#   NUM_PROCESSES=4 scripts/wmdp_ablation.sh          four
#   SMOKE=1 scripts/wmdp_ablation.sh                  toy models and data: only shows that it runs
#
# ROWS chooses among "ROSU zero-order delta-only v-only". A row whose model and result are there already is not computed
# again. OUT, BASE, LIMIT and DATA as for wmdp_eval.sh; further arguments go to every 'rosu train'.
set -euo pipefail
recipe=${RECIPE:-$(dirname "$0")/../configs/recipes/wmdp_zephyr-7b.yaml}
out=${OUT:-outputs/wmdp_ablation}
rosu=(rosu)
command -v rosu > /dev/null || rosu=(python3 -m rosu_llm)
train=() evaluate=(--base "${BASE:-HuggingFaceH4/zephyr-7b-beta}")
if [ -n "${SMOKE:-}" ]; then
  train=(--smoke) evaluate+=(--smoke)
elif [ -n "${NUM_PROCESSES:-}" ]; then
  train=(--accelerate-config ddp --num-processes "$NUM_PROCESSES") evaluate+=(--num-processes "$NUM_PROCESSES")
fi
[ -z "${LIMIT:-}" ] || evaluate+=(--limit "$LIMIT")
[ -z "${DATA:-}" ] || evaluate+=(--data-dir "$DATA")

results=()
row() { # name, settings…
  local name=$1 folder=$out/$1 made
  [[ " ${ROWS:-$1} " = *" $1 "* ]] || return 0
  shift
  [ -f "$folder/config.json" ] || "${rosu[@]}" train --config "$recipe" --output-dir "$folder" "$@" "${train[@]}" "${extra[@]}"
  made=$out/eval/$name/wmdp_$name.json
  [ -z "${SMOKE:-}" ] || made=$out/eval/$name/smoke/wmdp_toy.json
  [ -f "$made" ] || "${rosu[@]}" eval wmdp "$folder" --name "$name" --out "$out/eval/$name" "${evaluate[@]}"
  results+=("$made")
}
extra=("$@")
row ROSU --components full
row zero-order --jacobian none
row delta-only --components delta_only
row v-only --components v_only
"${rosu[@]}" eval wmdp --join "${results[@]}" --paper ablation | tee "$out/table.md.partial"
mv "$out/table.md.partial" "$out/table.md"
