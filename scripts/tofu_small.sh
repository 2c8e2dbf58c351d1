#!/usr/bin/env bash
# The whole TOFU experiment on a CPU with a real 135M instruct model: learn a few authors, unlearn one of them with five
# methods, evaluate everything. About an hour on two idle cores at the default --limit.
#
#   scripts/tofu_small.sh [--limit 20] [--out outputs/tofu-small] [--data locuslab/TOFU] [--model FOLDER] [--smoke]
#
# --limit: questions to forget and to ask per set; an author has 20. --data: the hub's, or a folder of TOFU's files.
# --model: another instruct model. --smoke: a toy model, minutes; its figures mean nothing.
# Stop it whenever you like: what is finished is not repeated. The output of each command is in OUT/logs.
# Settings from the environment: METHODS, EPOCHS and RATE (of unlearning, the same for all methods), LEARN_EPOCHS, LEARN_RATE.
set -euo pipefail

limit=20 out=outputs/tofu-small data=locuslab/TOFU model= smoke=0
while [ $# -gt 0 ]; do
  case $1 in
    --limit) limit=$2 && shift 2 ;;
    --out) out=$2 && shift 2 ;;
    --data) data=$2 && shift 2 ;;
    --model) model=$2 && shift 2 ;;
    --smoke) smoke=1 && shift ;;
    *)
      echo "tofu_small.sh: '$1' is not understood; flags are --limit, --out, --data, --model and --smoke." >&2
      exit 2
      ;;
  esac
done
scripts=$(cd "$(dirname "$0")" && pwd)
source "$scripts/resumable.sh"
METHODS=${METHODS:-rosu uam graddiff npo simnpo}
EPOCHS=${EPOCHS:-10} RATE=${RATE:-1e-5} LEARN_EPOCHS=${LEARN_EPOCHS:-5} LEARN_RATE=${LEARN_RATE:-2e-4}

settings() { # the settings of a method
  case $1 in
    rosu) echo --method rosu ;;
    rosu_calibrated) echo --method rosu --calibrate holdout --holdout-data "$out/data:level" ;;
    uam | graddiff) echo --method "$1" ;;
    npo | simnpo) echo --method graddiff --forget-loss "$1" ;;
    *)
      echo "tofu_small.sh: METHODS has '$1'; known are rosu, rosu_calibrated, uam, graddiff, npo and simnpo." >&2
      return 1
      ;;
  esac
}
for method in $METHODS; do settings "$method" > /dev/null || exit 2; done

if [ -z "$model" ]; then
  model=$out/base
  maker=("$PYTHON" "$scripts/small_model.py" "$model")
  [ "$smoke" = 0 ] || maker+=(--toy)
  run base "${maker[@]}"
fi
run data "$PYTHON" "$scripts/tofu_subset.py" "$data" "$out/data" --limit "$limit"

common=(--chat-format tokenizer --use-cpu true --per-device-train-batch-size 8 --save-strategy no --logging-steps 1
  --report-to none --weight-decay 0.01 --max-grad-norm 1.0 --overwrite true --seed 0)
learn() { # learn NAME SET
  run "learn-$1" rosu train --method finetune --model-name-or-path "$model" --retain-data "$out/data:$2" "${common[@]}" \
    --num-train-epochs "$LEARN_EPOCHS" --learning-rate "$LEARN_RATE" --lr-scheduler-type linear --output-dir "$out/$1"
}
evaluate() { # evaluate NAME
  run "eval-$1" rosu eval tofu "$out/$1" --data "$out/data" --forget-split forget01 --chat-format tokenizer \
    --fluency-model none --out "$out/$1/evals"
}
learn target full
learn retain retain99
evaluate target
evaluate retain
for method in $METHODS; do
  # shellcheck disable=SC2046  # settings are words
  run "unlearn-$method" rosu train $(settings "$method") --model-name-or-path "$out/target" \
    --forget-data "$out/data:forget01" --retain-data "$out/data:retain99" "${common[@]}" \
    --num-train-epochs "$EPOCHS" --learning-rate "$RATE" --lr-scheduler-type constant --output-dir "$out/$method"
  evaluate "$method"
done
results=()
for method in $METHODS; do results+=("$out/$method/evals"); done
rosu table "${results[@]}" --target "$out/target/evals" --retain "$out/retain/evals" --out "$out/table.md"
