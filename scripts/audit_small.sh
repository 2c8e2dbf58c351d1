#!/usr/bin/env bash
# The three audits of four unlearned models on a CPU: a small model learns a few TOFU authors, unlearns one of them with ROSU,
# gradient difference, NPO and bounded ROSU, and each result is attacked beside the retain and the initial model.
# Every method unlearns at the one of RATES that lands closest to the retain model on a seed that is not reported (10).
#
#   scripts/audit_small.sh --model FOLDER [--data locuslab/TOFU] [--out outputs/audit-small] [--limit 20] [--seeds "0 1 2"] [--smoke]
#
# --model: a pretrained model, e.g. stories15M. --limit: questions to forget; an author has 20.
# --smoke: a toy model in place of FOLDER, two questions, one seed, one method; its figures mean nothing.
# Stop it whenever you like: what is finished is not repeated. The output of each command is in OUT/logs, the table in OUT/table.md.
# Settings from the environment: METHODS, EPOCHS and RATES (of unlearning), SEARCH_SEED, LEARN_EPOCHS, LEARN_RATE, SAMPLES.
set -euo pipefail

limit=20 out=outputs/audit-small data=locuslab/TOFU model= smoke=0 seeds="0 1 2"
while [ $# -gt 0 ]; do
  case $1 in
    --limit) limit=$2 && shift 2 ;;
    --out) out=$2 && shift 2 ;;
    --data) data=$2 && shift 2 ;;
    --model) model=$2 && shift 2 ;;
    --seeds) seeds=$2 && shift 2 ;;
    --smoke) smoke=1 && shift ;;
    *)
      echo "audit_small.sh: '$1' is not understood; flags are --model, --data, --out, --limit, --seeds and --smoke." >&2
      exit 2
      ;;
  esac
done
scripts=$(cd "$(dirname "$0")" && pwd)
source "$scripts/resumable.sh"
METHODS=${METHODS:-rosu graddiff npo rosu_bounded}
EPOCHS=${EPOCHS:-10} RATES=${RATES:-2e-5 5e-5 1e-4 2e-4 5e-4} SEARCH_SEED=${SEARCH_SEED:-10} LEARN_EPOCHS=${LEARN_EPOCHS:-30} LEARN_RATE=${LEARN_RATE:-1e-3} SAMPLES=${SAMPLES:-16}
measured=() ways=()
new=60 tries="--share 0.25 1 --steps 16 --learning-rate 1e-4 --batch-size 8"
if [ "$smoke" = 1 ]; then
  limit=2 seeds=0 METHODS=${METHODS%% *} EPOCHS=1 RATES=1e-4 SEARCH_SEED=0 LEARN_EPOCHS=1 SAMPLES=2 new=3 tries="--share 1 --steps 1 --batch-size 2"
  measured=(--metrics forget_Q_A_Prob exact_memorization retain_Q_A_Prob) ways=(--ways greedy prefix50 compliance sample)
elif [ -z "$model" ]; then
  echo "audit_small.sh: --model FOLDER says which pretrained model learns the authors (or --smoke for a toy)." >&2
  exit 2
fi
case " $seeds " in
  *" $SEARCH_SEED "*)
    if [ "$smoke" = 0 ]; then
      echo "audit_small.sh: seed $SEARCH_SEED chooses the rates and would be reported: give others with --seeds, or SEARCH_SEED." >&2
      exit 2
    fi
    ;;
esac

settings() { # the settings of a method
  case $1 in
    rosu) echo --method rosu --rho 0.05 ;;
    rosu_bounded) echo --method rosu --rho 0.05 --amplify matched --kappa 0.25 --forget-until holdout --forget-level token \
      --forget-margin 0.5 --forget-draw false --holdout-data "$out/data:level" ;;
    graddiff) echo --method graddiff ;;
    npo) echo --method graddiff --forget-loss npo ;;
    *)
      echo "audit_small.sh: METHODS has '$1'; known are rosu, rosu_bounded, graddiff and npo." >&2
      return 1
      ;;
  esac
}
for method in $METHODS; do settings "$method" > /dev/null || exit 2; done
if [ "$smoke" = 1 ]; then
  model=$out/base
  run base "$PYTHON" "$scripts/small_model.py" "$model" --toy
fi
run data "$PYTHON" "$scripts/tofu_subset.py" "$data" "$out/data" --limit "$limit"

format=Llama-2-7b-hf # 'Question: … Answer: …', which needs no chat template
common=(--chat-format "$format" --use-cpu true --per-device-train-batch-size 8 --save-strategy no --logging-steps 1
  --report-to none --weight-decay 0.01 --max-grad-norm 1.0 --overwrite true)
where=(--data "$out/data" --forget-split forget01 --chat-format "$format" --max-new-tokens "$new" --dtype float32)

learn() { # learn NAME SET SEED
  run "learn-$1-$3" rosu train --method finetune --model-name-or-path "$model" --retain-data "$out/data:$2" "${common[@]}" \
    --seed "$3" --num-train-epochs "$LEARN_EPOCHS" --learning-rate "$LEARN_RATE" --lr-scheduler-type linear \
    --output-dir "$out/models/$1-$3"
}
unlearn() { # unlearn METHOD RATE SEED NAME
  # shellcheck disable=SC2046  # settings are words
  run "unlearn-$4" rosu train $(settings "$1") --model-name-or-path "$out/models/target-$3" --forget-data "$out/data:forget01" \
    --retain-data "$out/data:retain99" "${common[@]}" --seed "$3" --num-train-epochs "$EPOCHS" --learning-rate "$2" \
    --lr-scheduler-type constant --output-dir "$out/models/$4"
}
look() { # look NAME: the figures by which a rate is chosen
  run "eval-$1" rosu eval tofu "$out/models/$1" "${where[@]}" --fluency-model none --out "$out/evals/$1" \
    --metrics exact_memorization retain_Q_A_Prob
}

learn target full "$SEARCH_SEED"
learn retain retain99 "$SEARCH_SEED"
look "retain-$SEARCH_SEED"
for method in $METHODS; do
  for rate in $RATES; do
    name=$method-$rate-$SEARCH_SEED
    (unlearn "$method" "$rate" "$SEARCH_SEED" "$name" && look "$name") || echo "audit_small.sh: $name is left out of the search." >&2
  done
done
# shellcheck disable=SC2086  # names are words
"$PYTHON" "$scripts/audit_small.py" choose "$out" --methods $METHODS --rates $RATES --seed "$SEARCH_SEED"

for seed in $seeds; do
  learn target full "$seed"
  learn retain retain99 "$seed"
  for method in $METHODS; do
    rate=$(cat "$out/rates/$method") used=$out/rates/$method-$seed
    if [ -f "$used" ] && [ "$(cat "$used")" != "$rate" ]; then
      echo "audit_small.sh: $out/models/$method-$seed was unlearned at $(cat "$used"), and now $rate is chosen: give another --out." >&2
      exit 2
    fi
    echo "$rate" > "$used"
    unlearn "$method" "$rate" "$seed" "$method-$seed"
    models=("$out/models/$method-$seed" --retain "$out/models/retain-$seed" --target "$out/models/target-$seed"
      --out "$out/audits/$method-$seed" --controls "$out/audits/controls-$seed")
    # shellcheck disable=SC2086  # settings are words
    run "relearn-$method-$seed" rosu audit relearn "${models[@]}" "${where[@]}" --seeds "$seed" $tries "${measured[@]}"
    run "quantize-$method-$seed" rosu audit quantize "${models[@]}" "${where[@]}" --precisions rtn4 "${measured[@]}"
    run "extract-$method-$seed" rosu audit extract "${models[@]}" "${where[@]}" --seeds "$seed" --samples "$SAMPLES" "${ways[@]}"
  done
done
# shellcheck disable=SC2086  # names are words
"$PYTHON" "$scripts/audit_small.py" table "$out" --methods $METHODS --seeds $seeds
