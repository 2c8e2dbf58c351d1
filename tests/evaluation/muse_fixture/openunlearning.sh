#!/usr/bin/env bash
# Evaluate the models of ../tofu_fixture on the data of this folder with OpenUnlearning itself, offline and on a CPU.
#
#   CHECKOUT=… PYTHON=… openunlearning.sh WORK [BATCH_SIZE]
#
# CHECKOUT: an unmodified checkout. PYTHON: an interpreter with its requirements.
# Writes WORK/{chat,tags}_{retain,full}/MUSE_{EVAL,SUMMARY}.json.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
models=$here/../tofu_fixture
mkdir -p "$1"
work=$(cd "$1" && pwd)
batch=${2:-4}
cd "$work"
mkdir -p muse-bench
[ -e muse-bench/MUSE-News ] || cp -r "$here/muse" muse-bench/MUSE-News
export HF_HUB_OFFLINE=1 HF_HOME="$work/hf" HF_DATASETS_CACHE="$work/cache" CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=1
export TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=1
more=exact_memorization,mia_loss,mia_zlib,mia_min_k,mia_min_k_plus_plus

evaluate() { # CASE MODEL_CONFIG TOKENIZER MODEL [override …]
  local case=$1 config=$2 tokenizer=$3 model=$4
  shift 4
  "$PYTHON" "$CHECKOUT/src/eval.py" experiment=eval/muse/default "model=$config" "task_name=${case}_$model" \
    "model.model_args.pretrained_model_name_or_path=$models/$model" \
    "model.tokenizer_args.pretrained_model_name_or_path=$models/$tokenizer" \
    ++model.model_args.attn_implementation=sdpa ++model.model_args.torch_dtype=float32 model.model_args.device_map=cpu \
    "+eval/muse_metrics=[$more]" "++eval.muse.batch_size=$batch" \
    "paths.output_dir=$work/${case}_$model" "$@" > "$work/${case}_$model.log" 2>&1
}

for case in chat tags; do
  if [ "$case" = chat ]; then settings=("Llama-3.2-1B-Instruct" full); else settings=(phi-1_5 padded); fi
  evaluate "$case" "${settings[@]}" retain
  evaluate "$case" "${settings[@]}" full "retain_logs_path=$work/${case}_retain/MUSE_EVAL.json"
done
