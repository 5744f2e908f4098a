#!/usr/bin/env bash
# An hour on a machine with 2, 4 or 8 GPUs: what nobody could decide without them, in the order of what it decides, and a
# page of your rows beside predictions and everybody's. With one GPU it asks what one GPU can. No argument is needed:
#   bash examples/eight.sh
# The same command continues, also on another machine, if this names where the archive of records goes after each cell:
#   STUDY_UPLOAD=hf://datasets/YOU/NAME/FOLDER, s3://BUCKET/FOLDER, or a folder.      STUDY_NAME=you stands in the form.
# Words are for `study hour`: --minutes 55. STUDY_GPU_TESTS=12 runs the GPU tests before, so many at once.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
if [ -e gpu-pack/pack.json ]; then  # a machine without a network: `make gpu` made the pack elsewhere
  site=$PWD/.gpu/site
  export HF_HUB_OFFLINE=1 PYTHONPATH="$PWD:$site${PYTHONPATH:+:$PYTHONPATH}"
  export PIP_NO_INDEX=1 PIP_FIND_LINKS="$PWD/gpu-pack/releases"
  export TORCH_EXTENSIONS_DIR="$PWD/.gpu/compiled/extensions" TRITON_CACHE_DIR="$PWD/.gpu/compiled/triton"
  if ! cmp -s gpu-pack/pack.json "$site/pack.json"; then
    rm -rf "$site"
    "$python" -m pip install --quiet --no-deps --target "$site" gpu-pack/wheels/*.whl
    mkdir -p "$site" && cp gpu-pack/pack.json "$site"
  fi
  mkdir -p .gpu/compiled
  if [ -e gpu-pack/compiled.tar.gz ]; then tar xzf gpu-pack/compiled.tar.gz -C .gpu/compiled; fi
  set -- --pack gpu-pack "$@"
else
  if ! { command -v make && command -v g++ && "$python" -c 'import ensurepip'; } >/dev/null 2>&1; then  # a bare container
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
      make g++ git python3-dev python3-venv >/dev/null
  fi
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: PYTHON=python3.12 names one")'
  pinned=$("$python" -c 'import sys; print("--constraint constraints.txt" if sys.version_info[:2] == (3, 11) else "")')
  make setup PYTHON="$python" CONSTRAIN="$pinned" || true  # an operator that does not compile costs its cells alone
  python=.venv/bin/python
fi
if [ -n "${STUDY_GPU_TESTS:-}" ]; then
  "$python" -m pytest tests/training/test_gpu.py -m gpu -q -p no:cacheprovider -p no:benchmark -n "$STUDY_GPU_TESTS" || true
fi
"$python" -m study.cli hour "$@" & hour=$!
trap 'kill -TERM "$hour"' TERM INT HUP  # a machine that is taken away says so: the cell that runs gets its record
code=0
wait "$hour" || code=$?
if [ "$code" -gt 128 ]; then code=0; wait "$hour" || code=$?; fi  # the first wait ends with the signal
if [ -d .gpu/compiled ]; then tar czf gpu-pack/compiled.tar.gz -C .gpu/compiled .; fi  # the next window compiles nothing
exit "$code"
