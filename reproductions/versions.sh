#!/usr/bin/env bash
# Trains five arms, and runs their tests, with other versions than those of constraints.txt:
#     reproductions/versions.sh torch==2.11.0 transformers==5.17.0
# pyproject.toml allows nothing older or newer than what was run. To try a newer version, raise its bound first.
# It takes a quarter of an hour on two cores, and 6 GB, most of them for CUDA's libraries.
set -euo pipefail
cd "$(dirname "$0")/.."
# Each set of versions has its own folder, because a sweep does not repeat what is done.
folder=$PWD/runs/versions/$(echo "$*" | tr -s ' =' '_-')

"${PYTHON:-python3}" -m venv "$folder"
export PATH=$folder/bin:$PATH
pip install --quiet --no-compile "$@" --editable '.[train,test]'
pip list | grep -E '^(torch|transformers|accelerate|deepspeed) '

study doctor --fix single ddp zero2 zero3 fsdp2
for arm in single ddp zero2 zero3 fsdp2; do
  study sweep smoke --only "arm=$arm" --runs "$folder/runs"
done
study runs "$folder/runs"
pytest tests/test_arms.py tests/test_patches.py tests/test_tracing.py
pytest tests/test_train.py -k "[single] or [ddp] or [zero2] or [zero3] or [fsdp2]"
