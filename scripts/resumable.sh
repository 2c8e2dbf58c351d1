# Sourced by scripts of many commands, after $out is set: each command runs once, so that a stopped script goes on.
PYTHON=${PYTHON:-python}
export HF_HUB_DISABLE_PROGRESS_BARS=1 TOKENIZERS_PARALLELISM=false

run() { # run NAME COMMAND…: once, with its output in a log
  local name=$1
  shift
  [ -f "$out/logs/$name.done" ] && return
  mkdir -p "$out/logs"
  echo "$(date +%H:%M:%S) $name"
  if ! "$@" > "$out/logs/$name.log" 2>&1; then
    echo "$(basename "$0"): $name failed; the end of $out/logs/$name.log:" >&2
    tail -n 5 "$out/logs/$name.log" >&2
    exit 1
  fi
  touch "$out/logs/$name.done"
}
