#!/usr/bin/env bash
# Make .venv in the project, with the tested versions, unless it is there already and up to date.
# Usage: source it after cd to the project's root; $PYTHON chooses another interpreter.
set -euo pipefail

stamp=.venv/.installed
wanted=$(cat constraints.txt pyproject.toml | cksum)
if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$wanted" ]; then
  echo "Setting up .venv (a few minutes, about 2 GB)…"
  [ -x .venv/bin/python ] || "${PYTHON:-python3}" -m venv .venv
  # torch first and alone: a looser requirement would resolve to a larger build of it.
  .venv/bin/pip install --quiet --disable-pip-version-check "$(grep '^torch==' constraints.txt)"
  .venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
  echo "$wanted" > "$stamp"
fi
