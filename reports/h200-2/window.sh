# How these records were made: OUT=FOLDER bash reports/h200-2/window.sh memory|times SCALE LIMIT_S, in a checkout with gpu-pack/.
# What is to be kept is in FOLDER. gpu-pack/also has the wheels of deepspeed 0.19.2 and transformers 5.23.0 besides.
what=$1 scale=$2 limit=$3
cd "$(dirname "$0")/../.."
root=$PWD
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
left() { echo $((limit - SECONDS)); }
keep() { tar czf $OUT/runs.tmp -C $root/.gpu runs logs 2>/dev/null; mv $OUT/runs.tmp $OUT/runs.tgz; }
mkdir -p .gpu/runs .gpu/logs
nvidia-smi -L 2>/dev/null; python3 -V
[ -e .gpu/site/pack.json ] || python3 -c "
import sys; sys.path.insert(0, 'examples')
import gpu_windows, pathlib; gpu_windows.install(pathlib.Path('gpu-pack'))"
for other in deepspeed-0.19.2 transformers-5.23.0; do
  [ -e .gpu/$other ] || python3 -m pip install -q --no-index --no-deps --target .gpu/$other gpu-pack/also/$other-*.whl &
done
wait
echo "installed after $SECONDS s"
export PYTHONPATH=$root:$root/.gpu/site
export TRITON_CACHE_DIR=$root/.gpu/compiled/triton TORCH_EXTENSIONS_DIR=$root/.gpu/compiled/extensions
[ -e gpu-pack/compiled.tar.gz ] && [ ! -e .gpu/compiled ] && mkdir -p .gpu/compiled && tar xzf gpu-pack/compiled.tar.gz -C .gpu/compiled
( while sleep 15; do keep; done ) & keeper=$!
# sweep NAME_OF_LOG RUNS PROTOCOL [--only ...]: what is left of the window
sweep() {
  local log=$1 runs=$2 protocol=$3; shift 3
  [ -n "${STUDY_DEVICE_LOCK:-}" ] || runs=$runs-$log  # two sweeps of one folder would wait for each other
  local minutes=$(python3 -c "print(max(0.05, ($(left) - 20) / 60))")
  timeout -s INT $(( $(left) > 10 ? $(left) - 5 : 5 )) python3 -m study.cli sweep $protocol --scale $scale --runs .gpu/runs/$runs \
    --pack gpu-pack --nvme-dir .gpu/nvme-$log --minutes $minutes "$@" >>.gpu/logs/$log.log 2>&1
}
if [ $what = memory ]; then
  # --- while operators compile: adapters, four at a time; times of these do not count
  python3 -m study.cli doctor --fix >.gpu/logs/doctor.log 2>&1 & compiling=$!
  sweep a1 windows windows --only part=adapters model=${A:-llama3-8b} reentrant=True & p1=$!
  sweep a2 windows windows --only part=adapters model=${A:-llama3-8b} reentrant=False & p2=$!
  ( PYTHONPATH=$root:$root/.gpu/deepspeed-0.19.2:$root/.gpu/site sweep a3 windows-0.19.2 windows --only 'part=adapters*' model=${A:-llama3-8b} ) & p3=$!
  ( PYTHONPATH=$root:$root/.gpu/transformers-5.23.0:$root/.gpu/site sweep a4 windows-5.23 windows --only part=adapters model=${A:-llama3-8b} ) & p4=$!
  wait $compiling $p1 $p2 $p3 $p4
  echo "adapters done after $SECONDS s"; keep
  # --- does this commit run on CUDA
  timeout $(( $(left) > 10 ? $(left) : 10 )) python3 -m pytest tests/training/test_gpu.py -m gpu -v -p no:cacheprovider -p no:benchmark -n ${WORKERS:-13} --dist load >.gpu/logs/tests.log 2>&1
  tail -5 .gpu/logs/tests.log; echo "tests done after $SECONDS s"; keep
  # --- what takes much one after the other, and what takes little beside it; times of these do not count
  ( for only in part=llama-7b-zero3 part=llama-7b-zero2 'part=llama-7b-four-rows arm=zero2' 'part=llama-7b-eight-rows accumulation=2'; do
      sweep big windows windows --only $only; done ) & big=$!
  ( for only in part=llama-7b-on-the-host 'part=llama-7b-four-rows arm=zero3_cpu' part=adapters-kept 'part=adapters model=llama3.2-1b' 'part=llama-7b-eight-rows accumulation=1'; do
      sweep small windows windows --only $only; done
    sweep small predictions predictions --only part=eight model=llama3-8b 'arm=zero3'
    sweep small predictions predictions --only part=eight model=llama3-8b 'arm=fsdp2' ) & small=$!
  wait $big
  sweep big predictions predictions --only part=eight model=llama3-8b arm=zero2
  PYTORCH_ALLOC_CONF=expandable_segments:True sweep big predictions-expandable predictions --only part=eight model=llama3-8b arm=zero2
  wait $small
else
  export STUDY_DEVICE_LOCK=$root/.gpu/device
  for n in 1 2 3; do (
    sweep t$n guelph guelph --only part=loss micro_batch=8 'arm=*[!v][!m][e23]' --lane $n 3
    sweep t$n guelph guelph --only part=seeds 'arm=*[!v][!m][e2]' 'seed=4[34]' --lane $n 3
    sweep t$n predictions predictions --only part=arms --lane $n 3
    sweep t$n windows windows --only part=bert-on-the-disk --lane $n 3
    sweep t$n guelph guelph --only part=loss micro_batch=8 arm=zero3_cpu --lane $n 3
    sweep t$n offload offload --only part=host-against-disk model=gpt2-large --lane $n 3
    sweep t$n predictions predictions --only part=optimizers --lane $n 3
    sweep t$n predictions predictions --only part=families --lane $n 3
    sweep t$n predictions predictions --only part=encoders --lane $n 3
    sweep t$n predictions predictions --only part=batches --lane $n 3
    sweep t$n predictions predictions --only part=sequences --lane $n 3
  ) & pids="$pids $!"; done
  wait $pids
fi
kill $keeper
[ -e .gpu/compiled ] && tar czf $OUT/compiled.tar.gz -C .gpu/compiled .
keep
echo "ended after $SECONDS s"
python3 - <<'P'
import json, glob, os
for path in sorted(glob.glob(".gpu/runs/*/*/record.json")):
    r = json.load(open(path)); m = (r.get("memory") or {}).get("per_rank") or [{}]
    e = (r.get("error") or {}).get("message") or ""
    s = sorted((r.get("time") or {}).get("step_s") or [0])
    print(path.split("/")[2][:14], os.path.basename(os.path.dirname(path))[:44], r["status"], round((m[0].get("peak_allocated_bytes") or 0) / 1e9, 2), round((m[0].get("peak_reserved_bytes") or 0) / 1e9, 2), round(s[len(s) // 2], 3), e[:90])
P
