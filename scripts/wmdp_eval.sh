#!/usr/bin/env bash
# WMDP-Bio, WMDP-Cyber, MMLU (0-shot, lm-eval) and ΔScore of one or several unlearned models, then one table of all of them.
#
#   scripts/wmdp_eval.sh out/zephyr-rosu                               one GPU (or the CPU)
#   NUM_PROCESSES=8 scripts/wmdp_eval.sh out/zephyr-rosu out/zephyr-rmu  the questions shared among 8 GPUs
#   LIMIT=20 scripts/wmdp_eval.sh out/zephyr-rosu                      a trial run: 20 questions per task and subject
#   DATA=questions scripts/wmdp_eval.sh out/zephyr-rosu                without the hub: wmdp_bio.jsonl, wmdp_cyber.jsonl, mmlu/
#
# BASE is the model before unlearning, evaluated once and cached; OUT receives a JSON and a markdown file per model and
# table.md with all of them. ROSU_ARGS is passed on, for example "--batch-size 32 --dtype bfloat16".
set -euo pipefail
if [ $# -eq 0 ]; then
  sed -n '2,10s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi

base=${BASE:-HuggingFaceH4/zephyr-7b-beta}
out=${OUT:-rosu-eval}
rosu=(rosu)
command -v rosu > /dev/null || rosu=(python3 -m rosu_llm)
options=(--base "$base" --out "$out")
[ -z "${NUM_PROCESSES:-}" ] || options+=(--num-processes "$NUM_PROCESSES")
[ -z "${LIMIT:-}" ] || options+=(--limit "$LIMIT")
[ -z "${DATA:-}" ] || options+=(--data-dir "$DATA")
# shellcheck disable=SC2206  # ROSU_ARGS is a list of words
options+=(${ROSU_ARGS:-})

results=()
for model in "$@"; do
  name=$(basename "$model")
  "${rosu[@]}" eval wmdp "$model" --name "$name" "${options[@]}"  # rosu eval wmdp MODEL --base BASE …
  results+=("$out/wmdp_${name//[^[:alnum:]._-]/-}.json")
done
"${rosu[@]}" eval wmdp --join "${results[@]}" | tee "$out/table.md.partial"
mv "$out/table.md.partial" "$out/table.md"
