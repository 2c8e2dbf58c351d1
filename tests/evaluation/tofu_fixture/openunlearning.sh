#!/usr/bin/env bash
# Evaluate the models of this folder with OpenUnlearning itself, offline and on a CPU.
#
#   CHECKOUT=… PYTHON=… [SITE=…] openunlearning.sh WORK [BATCH_SIZE]
#
# CHECKOUT: an unmodified checkout. PYTHON: an interpreter with its requirements. SITE: a folder with rosu-llm unpacked
# (pip install --no-deps --target), for the prob_mean truth ratio; left out without it. Writes WORK/{chat,tags}_{retain,full}/TOFU_{EVAL,SUMMARY}.json.
# RETAIN_LOGS=FOLDER takes FOLDER/{chat,tags}_retain/TOFU_EVAL.json instead of evaluating the retain model.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1"
work=$(cd "$1" && pwd)
batch=${2:-4}
cd "$work"
mkdir -p locuslab madhurjindal
[ -e locuslab/TOFU ] || cp -r "$here/tofu" locuslab/TOFU
[ -e madhurjindal/autonlp-Gibberish-Detector-492513457 ] ||
  cp -r "$here/classifier" madhurjindal/autonlp-Gibberish-Detector-492513457
export HF_HUB_OFFLINE=1 HF_HOME="$work/hf" HF_DATASETS_CACHE="$work/cache" CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1
export TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="${SITE:-}"
more=exact_memorization,mia_loss,mia_zlib,mia_min_k,mia_min_k_plus_plus,forget_Q_A_gibberish${SITE:+,forget_Truth_Ratio_prob_mean}

evaluate() { # CASE MODEL_CONFIG TOKENIZER MODEL [override …]
  local case=$1 config=$2 tokenizer=$3 model=$4
  shift 4
  "$PYTHON" "$CHECKOUT/src/eval.py" experiment=eval/tofu/default "model=$config" "task_name=${case}_$model" \
    "model.model_args.pretrained_model_name_or_path=$here/$model" \
    "model.tokenizer_args.pretrained_model_name_or_path=$here/$tokenizer" \
    ++model.model_args.attn_implementation=sdpa ++model.model_args.torch_dtype=float32 model.model_args.device_map=cpu \
    "+eval/tofu_metrics=[$more]" \
    eval.tofu.metrics.forget_Q_A_gibberish.device=cpu "eval.tofu.batch_size=$batch" \
    "paths.output_dir=$work/${case}_$model" "$@" > "$work/${case}_$model.log" 2>&1
}

for case in chat tags; do
  if [ "$case" = chat ]; then settings=("Llama-3.2-1B-Instruct" full); else settings=(phi-1_5 padded); fi
  if [ -z "${RETAIN_LOGS:-}" ]; then
    evaluate "$case" "${settings[@]}" retain
  fi
  evaluate "$case" "${settings[@]}" full "retain_logs_path=${RETAIN_LOGS:-$work}/${case}_retain/TOFU_EVAL.json"
done
