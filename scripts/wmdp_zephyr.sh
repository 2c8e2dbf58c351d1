#!/usr/bin/env bash
# Representation-level unlearning of Zephyr-7B-β on WMDP: train, then evaluate with lm-eval, one table.
#
#   scripts/wmdp_zephyr.sh                           ROSU, RMU and UAM on one GPU
#   METHODS=rosu scripts/wmdp_zephyr.sh              one of them
#   NUM_PROCESSES=4 scripts/wmdp_zephyr.sh           data-parallel on four GPUs (accelerate launch, ddp)
#   SMOKE=1 scripts/wmdp_zephyr.sh                   toy models and data: only shows that it runs
#
# data/bio-forget-corpus.jsonl must be there (gated: ask at https://huggingface.co/datasets/cais/wmdp-corpora). A model
# that is there already is not trained again. OUT is the folder for models and results; further arguments go to every
# 'rosu train', e.g. --rho 0.2 --learning-rate 1e-5.
set -euo pipefail
configs=$(dirname "$0")/../configs/recipes
out=${OUT:-outputs}
rosu=(rosu)
command -v rosu > /dev/null || rosu=(python3 -m rosu_llm)
launch=()
[ -z "${NUM_PROCESSES:-}" ] || launch=(--accelerate-config ddp --num-processes "$NUM_PROCESSES")
[ -z "${SMOKE:-}" ] || launch=(--smoke)

models=()
for method in ${METHODS:-rosu rmu uam}; do
  recipe=$configs/wmdp_zephyr-7b$([ "$method" = rosu ] || echo "_$method").yaml
  folder=$out/zephyr-7b_$method
  models+=("$folder")
  if [ -f "$folder/config.json" ]; then
    echo "$method: $folder holds a model already"
    continue
  fi
  resume=()
  [ -z "$(compgen -G "$folder/checkpoint-*/trainer_state.json")" ] || resume=(--resume-from-checkpoint true)
  "${rosu[@]}" train --config "$recipe" --output-dir "$folder" "${launch[@]}" "${resume[@]}" "$@"
done

if [ -n "${SMOKE:-}" ]; then
  "${rosu[@]}" eval wmdp toy --base toy --out "$out/eval" --smoke
else
  OUT=$out/eval "$(dirname "$0")/wmdp_eval.sh" "${models[@]}"
fi
