#!/usr/bin/env bash
# The comparison of methods of docs/benchmarks.md: every method searched with the same number of trials, selected by
# Agg_MU, reported on fresh seeds, on three tasks. Days on two cores; stop it whenever you like, the same command goes on.
#
#   scripts/benchmark_quality.sh people            the embedded people: nothing is downloaded
#   scripts/benchmark_quality.sh authors --model Xenova/llama2.c-stories15M [--data locuslab/TOFU]
#   scripts/benchmark_quality.sh instruct [--data locuslab/TOFU]     SmolLM2-135M-Instruct
#
# Flags: --out outputs/benchmark, --model and --data as above, --bf16 (mixed precision, where the processor has it), --smoke
# (a toy model; its figures mean nothing). From the environment: METHODS, TRIALS, SEEDS (default: all, and what
# scripts/benchmark_quality.py says of the task), QUESTIONS to forget (default: 40 and 20, two authors and one).
set -euo pipefail

out=outputs/benchmark data=locuslab/TOFU model= task= smoke=0 bf16=()
while [ $# -gt 0 ]; do
  case $1 in
    people | authors | instruct) task=$1 && shift ;;
    --out) out=$2 && shift 2 ;;
    --data) data=$2 && shift 2 ;;
    --model) model=$2 && shift 2 ;;
    --bf16) bf16=(--bf16) && shift ;;
    --smoke) smoke=1 && shift ;;
    *)
      echo "benchmark_quality.sh: '$1' is not understood; give people, authors or instruct, and --out, --data, --model, --bf16, --smoke." >&2
      exit 2
      ;;
  esac
done
if [ -z "$task" ]; then
  echo "benchmark_quality.sh: which task? Give people, authors or instruct." >&2
  exit 2
fi
if [ "$task" = authors ] && [ -z "$model" ] && [ "$smoke" = 0 ]; then
  echo "benchmark_quality.sh: authors needs --model, a small pretrained model such as Xenova/llama2.c-stories15M." >&2
  exit 2
fi
scripts=$(cd "$(dirname "$0")" && pwd)
PYTHON=${PYTHON:-python}
export HF_HUB_DISABLE_PROGRESS_BARS=1 TOKENIZERS_PARALLELISM=false
here=$out/$task flags=()
mkdir -p "$here"

if [ "$task" != people ]; then
  limit=40 epochs=15 rate=5e-4 batch=8 format=()
  [ "$task" = instruct ] && limit=20 epochs=5 rate=2e-4 format=(--chat-format tokenizer)
  limit=${QUESTIONS:-$limit}
  [ "$smoke" = 1 ] && limit=3 epochs=1
  if [ -z "$model" ]; then
    model=$here/base
    maker=("$PYTHON" "$scripts/small_model.py" "$model")
    [ "$smoke" = 0 ] || maker+=(--toy)
    "${maker[@]}"
  fi
  "$PYTHON" "$scripts/tofu_subset.py" "$data" "$here/data" --limit "$limit"
  for part in target:full retain:retain99; do
    folder=$here/${part%%:*}
    [ -f "$folder/model.safetensors" ] && continue
    rosu train --method finetune --model-name-or-path "$model" --retain-data "$here/data:${part##*:}" --use-cpu true \
      "${format[@]}" ${bf16:+--bf16 true} --per-device-train-batch-size "$batch" --num-train-epochs "$epochs" --learning-rate "$rate" \
      --lr-scheduler-type linear --max-grad-norm 1.0 --save-strategy no --report-to none --seed 0 --overwrite true \
      --output-dir "$folder"
  done
  flags+=(--model "$here/target" --retain-model "$here/retain" --data "$here/data" --use-cpu "${bf16[@]}")
fi
[ "$smoke" = 0 ] || flags+=(--smoke)
# shellcheck disable=SC2206  # words
flags+=(${METHODS:+--methods $METHODS} ${TRIALS:+--trials $TRIALS} ${SEEDS:+--seeds $SEEDS})
exec "$PYTHON" "$scripts/benchmark_quality.py" --task "$task" --out "$here" "${flags[@]}"
