#!/usr/bin/env bash
# Search (rho, eta) for ROSU on TOFU inside an OpenUnlearning checkout, and select by Agg_MU only.
#
#   scripts/tofu_openunlearning.sh [CHECKOUT]            (or OPEN_UNLEARNING_DIR=CHECKOUT)
#   scripts/tofu_openunlearning.sh --smoke [CHECKOUT]    minutes on a CPU, without a network
#
# Needs a Python (PYTHON=python) with OpenUnlearning's requirements and rosu-llm in it; the full search also needs a GPU and
# the hub's models. --smoke needs the JSON-lines files of TOFU in $TOFU_DIR (default $ROSU_DATA/tofu, ../shared/data/tofu)
# and writes everything to $WORK (default ./tofu-openunlearning-smoke); its figures mean nothing.
#
# Stop it whenever you like: what is finished is not repeated. One line per run; their output is in $WORK/saves/logs.
# Settings, all from the environment: MODEL, FORGET (forget01|05|10), TRAINER, RHOS, LRS, LAUNCHER (such as "accelerate
# launch --config_file configs/accelerate/default_config.yaml"), TRAIN_ARGS and EVAL_ARGS (more Hydra overrides),
# AUC_TRANSFORM, KEEP_MODELS=0 (delete a run's weights once it is evaluated: 21 runs of a 1B model are 50 GB).
set -euo pipefail

here=$(cd "$(dirname "$0")/.." && pwd)
smoke=0
if [ "${1:-}" = "--smoke" ]; then
  smoke=1
  shift
fi
checkout=${1:-${OPEN_UNLEARNING_DIR:-}}
if [ -z "$checkout" ] || [ ! -f "$checkout/src/train.py" ] || [ ! -f "$checkout/configs/unlearn.yaml" ]; then
  echo "tofu_openunlearning.sh: '${checkout}' is no OpenUnlearning checkout (src/train.py is not there):" \
    "give its folder as the argument or in OPEN_UNLEARNING_DIR." >&2
  exit 2
fi
checkout=$(cd "$checkout" && pwd)

PYTHON=${PYTHON:-python}
MODEL=${MODEL:-Llama-3.2-1B-Instruct}
FORGET=${FORGET:-forget10}
TRAINER=${TRAINER:-ROSU}
AUC_TRANSFORM=${AUC_TRANSFORM:-range}
KEEP_MODELS=${KEEP_MODELS:-1}
read -r -a train_args <<< "${TRAIN_ARGS:-}"
read -r -a eval_args <<< "${EVAL_ARGS:-}"

if [ "$smoke" = 1 ]; then
  WORK=${WORK:-tofu-openunlearning-smoke}
  RHOS=${RHOS:-0.2 0.4}
  LRS=${LRS:-1e-3}
  cpu=(model.model_args.attn_implementation=sdpa model.model_args.torch_dtype=float32)
  train_args=("${cpu[@]}" trainer.args.warmup_epochs=0 trainer.args.optim=adamw_torch trainer.args.bf16=false
    trainer.args.bf16_full_eval=false trainer.args.num_train_epochs=2 trainer.args.per_device_train_batch_size=4
    trainer.args.gradient_accumulation_steps=1 +trainer.args.use_cpu=true "${train_args[@]}")
  eval_args=("${cpu[@]}" model.model_args.device_map=cpu eval.tofu.fluency_device=cpu "${eval_args[@]}")
else
  WORK=${WORK:-$checkout}
  # "Sensitivity to rho on TOFU" has these radii. The paper says that eta is searched but not where: these are
  # OpenUnlearning's default and its neighbours.
  RHOS=${RHOS:-0.20 0.25 0.30 0.35 0.40 0.45 0.50}
  LRS=${LRS:-1e-5 2e-5 5e-5}
fi
case $FORGET in
  forget01 | forget05 | forget10) ;;
  *)
    echo "tofu_openunlearning.sh: FORGET=$FORGET is not forget01, forget05 or forget10." >&2
    exit 2
    ;;
esac
portion=${FORGET#forget}
retain=retain$((100 - 10#$portion))
read -r -a launcher <<< "${LAUNCHER:-$PYTHON}"

if ! "$PYTHON" -c "import hydra, rosu_llm.openunlearning" 2> /dev/null; then
  echo "tofu_openunlearning.sh: $PYTHON lacks OpenUnlearning's requirements or rosu-llm: install both there, or set PYTHON." >&2
  exit 2
fi

mkdir -p "$WORK"
cd "$WORK"
if [ "$smoke" = 1 ]; then
  tofu=${TOFU_DIR:-${ROSU_DATA:-$here/../shared/data}/tofu}
  export HF_HUB_OFFLINE=1 HF_DATASETS_CACHE="$PWD/.cache" CUDA_VISIBLE_DEVICES=""
  mkdir -p saves/logs
  "$PYTHON" "$here/scripts/openunlearning_offline.py" "$tofu" . > saves/logs/offline.log 2>&1 || {
    tail -n 1 saves/logs/offline.log >&2
    exit 1
  }
fi
mkdir -p saves/logs

# evaluate NAME MODEL_PATH FOLDER [override …]: OpenUnlearning's evaluation with the paper's summary, unless it is there.
evaluate() {
  local name=$1 path=$2 folder=$3
  shift 3
  [ -f "$folder/.evaluated" ] && return 0
  # OpenUnlearning continues from what is in its file; one that was cut off while being written would stop it for good.
  if ! "$PYTHON" -m json.tool "$folder/TOFU_EVAL.json" > /dev/null 2>&1; then
    rm -f "$folder/TOFU_EVAL.json"
  fi
  "$PYTHON" "$checkout/src/eval.py" experiment=eval/tofu/default "model=$MODEL" "forget_split=$FORGET" \
    "holdout_split=holdout$portion" "task_name=$name" "model.model_args.pretrained_model_name_or_path=$path" \
    "paths.output_dir=$folder" "+eval/tofu_metrics=[rosu_summary]" "eval.tofu.auc_transform=$AUC_TRANSFORM" \
    "${eval_args[@]}" "$@" >> "saves/logs/$name.log" 2>&1 || return 1
  touch "$folder/.evaluated"
}

# record FOLDER: how and on what the run was made, for 'rosu table --contribution'.
record() {
  "$PYTHON" - "$1" "${LAUNCHER:-python}" << 'PY'
import json, pathlib, sys

import torch

if torch.cuda.is_available():
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
else:
    lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines() if pathlib.Path("/proc/cpuinfo").exists() else []
    devices = ["CPU " + next((line.split(": ")[1] for line in lines if line.startswith("model name")), "")]
path = pathlib.Path(sys.argv[1]) / "rosu_run.json"
path.write_text(json.dumps({"launcher": sys.argv[2], "devices": [d.strip() for d in devices]}, indent=1) + "\n")
PY
}

# scores FOLDER: those that may be looked at while searching.
scores() {
  "$PYTHON" -c 'import json, sys
found = json.load(open(sys.argv[1] + "/TOFU_SUMMARY.json"))
print(" ".join(f"{k} {found[k]:.3f}" if k in found else f"{k} missing" for k in ("Agg_MU", "Mem", "Util")))' "$1"
}

reference() {
  local name=$1
  local folder=saves/eval/$name/evals_$FORGET
  shift
  if ! evaluate "$name" "open-unlearning/$name" "$folder" "$@"; then
    echo "reference $name: evaluation FAILED, see $WORK/saves/logs/$name.log" >&2
    exit 1
  fi
  echo "reference $name: evaluated"
}
target_name=tofu_${MODEL}_full
retain_name=tofu_${MODEL}_$retain
reference "$retain_name"
retain_logs=saves/eval/$retain_name/evals_$FORGET/TOFU_EVAL.json
reference "$target_name" "retain_logs_path=$retain_logs"
target_logs=saves/eval/$target_name/evals_$FORGET/TOFU_EVAL.json

read -r -a rhos <<< "$RHOS"
read -r -a lrs <<< "$LRS"
total=$((${#rhos[@]} * ${#lrs[@]}))
count=0
runs=()
failed=()
for lr in "${lrs[@]}"; do
  for rho in "${rhos[@]}"; do
    count=$((count + 1))
    name=tofu_${MODEL}_${FORGET}_${TRAINER}_rho${rho}_lr${lr}
    run=saves/unlearn/$name
    line="[$count/$total] $TRAINER rho=$rho lr=$lr:"
    began=$SECONDS
    if [ -f "$run/evals/.evaluated" ]; then
      echo "$line finished before, $(scores "$run/evals")"
      runs+=("$run")
      continue
    fi
    if [ ! -f "$run/.trained" ]; then
      if ! "${launcher[@]}" "$checkout/src/train.py" --config-name=unlearn.yaml experiment=unlearn/tofu/default \
        "trainer=$TRAINER" "task_name=$name" "model=$MODEL" "forget_split=$FORGET" "retain_split=$retain" \
        "holdout_split=holdout$portion" "model.model_args.pretrained_model_name_or_path=open-unlearning/$target_name" \
        "retain_logs_path=$retain_logs" trainer.args.eval_strategy=no trainer.args.eval_on_start=false \
        trainer.args.do_eval=false "trainer.args.learning_rate=$lr" "trainer.method_args.rho=$rho" \
        "${train_args[@]}" > "saves/logs/$name.log" 2>&1; then
        echo "$line training FAILED, see $WORK/saves/logs/$name.log"
        failed+=("$name")
        continue
      fi
      record "$run"
      touch "$run/.trained"
    fi
    if ! evaluate "$name" "$run" "$run/evals" "retain_logs_path=$retain_logs" "eval.tofu.target_logs_path=$target_logs"; then
      echo "$line evaluation FAILED, see $WORK/saves/logs/$name.log"
      failed+=("$name")
      continue
    fi
    [ "$KEEP_MODELS" = 1 ] || rm -f "$run"/*.safetensors
    echo "$line done in $((SECONDS - began)) s, $(scores "$run/evals")"
    runs+=("$run")
  done
done

if [ ${#runs[@]} -gt 0 ]; then
  table=saves/tofu_${MODEL}_${FORGET}_${TRAINER}
  references=(--retain "$retain_logs" --target "$target_logs" --auc-transform "$AUC_TRANSFORM")
  echo
  "$PYTHON" -m rosu_llm table "${runs[@]}" "${references[@]}" --out "$table.md"
  echo
  "$PYTHON" -m rosu_llm table "${runs[@]}" "${references[@]}" --best --out "${table}_selected.md"
fi
if [ ${#failed[@]} -gt 0 ]; then
  echo "${#failed[@]} of $total runs failed: ${failed[*]}" >&2
  exit 1
fi
