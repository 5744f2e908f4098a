# One window on a GPU without a network, in two calls: OUT=FOLDER bash examples/gpu_window.sh memory|times SCALE LIMIT_S, in a
# checkout with gpu-pack/. What is to be kept is in FOLDER. Put the compiled.tar.gz of the first call into gpu-pack/ before
# the second: it may be another machine.
what=$1 scale=$2 limit=$3
cd "$(dirname "$0")/.."
root=$PWD
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
left() { echo $((limit - SECONDS)); }
keep() { tar czf $OUT/runs.tmp -C $root/.gpu runs logs 2>/dev/null; mv $OUT/runs.tmp $OUT/runs.tgz; }
mkdir -p .gpu/runs .gpu/logs
nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader 2>/dev/null; python3 -V; nproc
[ -e .gpu/site/pack.json ] || python3 -c "
import sys; sys.path.insert(0, 'examples')
import gpu_windows, pathlib; gpu_windows.install(pathlib.Path('gpu-pack'))" &
wait
echo "installed after $SECONDS s"
export PYTHONPATH=$root:$root/.gpu/site
export TRITON_CACHE_DIR=$root/.gpu/compiled/triton TORCH_EXTENSIONS_DIR=$root/.gpu/compiled/extensions
[ -e gpu-pack/compiled.tar.gz ] && [ ! -e .gpu/compiled ] && mkdir -p .gpu/compiled && tar xzf gpu-pack/compiled.tar.gz -C .gpu/compiled
python3 -m study.cli doctor --fix >.gpu/logs/doctor.log 2>&1 & compiling=$!
( while sleep 15; do keep; done ) & keeper=$!
# sweep NAME_OF_LOG RUNS PROTOCOL [--only ...]: what is left of the window
sweep() {
  local log=$1 runs=$2 protocol=$3; shift 3
  [ -n "${STUDY_DEVICE_LOCK:-}" ] || runs=$runs-$log  # two sweeps of one folder would wait for each other
  local minutes=$(python3 -c "print(max(0.05, ($(left) - 15) / 60))")
  timeout -s INT $(( $(left) > 10 ? $(left) - 5 : 5 )) python3 examples/gpu_windows.py lane $protocol --scale $scale \
    --runs .gpu/runs/$runs --nvme-dir .gpu/nvme-$log --minutes $minutes "$@" >>.gpu/logs/$log.log 2>&1
}
if [ $what = memory ]; then
  # What takes much one after the other, and what takes little beside it, all the time. Their times do not count.
  total_mib=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null || echo 200000)
  big() {
    sweep big predictions predictions --only part=eight 'model=[qm]*' 'arm=zero*'
    sweep big windows windows --only part=llama-7b-eight-rows accumulation=1
  }
  small() {
    sweep small windows windows --only 'part=vit*'
    sweep small windows windows --only part=deberta
    sweep small predictions predictions --only part=eight 'model=[qm]*' arm=fsdp2
  }
  small & p1=$!
  # 80 GB hold one large training, and not the tests beside it.
  [ $total_mib -gt 100000 ] && { big & p2=$!; }
  wait $compiling
  echo "compiled after $SECONDS s"
  timeout $(( $(left) > 10 ? $(left) - 5 : 5 )) python3 -m pytest tests/training/test_gpu.py -m gpu -v -p no:cacheprovider -p no:benchmark -n ${WORKERS:-12} --dist load >.gpu/logs/tests.log 2>&1
  grep -aE "FAILED|ERROR|passed|failed|^E  " .gpu/logs/tests.log | tail -25; echo "tests done after $SECONDS s"; keep
  [ $total_mib -gt 100000 ] || { big & p2=$!; }
  wait $p1 $p2
else
  wait $compiling  # here times count
  [ -e .gpu/runs/machine.json ] || python3 -m study.cli calibrate --out .gpu/runs/machine.json --disk .gpu >.gpu/logs/calibrate.log 2>&1
  tail -9 .gpu/logs/calibrate.log; echo "calibrated after $SECONDS s"; export ZERO_STUDY_MACHINE=$root/.gpu/runs/machine.json
  export STUDY_DEVICE_LOCK=$root/.gpu/device
  for n in 1 2 3; do (
    sweep t$n offload offload --only part=host-against-disk model=gpt2-large --lane $n 3
    sweep t$n windows windows --only part=gpt2-xl-on-24 --lane $n 3
    sweep t$n predictions predictions --only part=arms --repeat 2 --lane $n 3
    sweep t$n guelph guelph --only part=loss micro_batch=8 'arm=[sz]*[e23]' --lane $n 3
    sweep t$n offload offload --only part=host-against-disk model=gpt2-xl --lane $n 3
    sweep t$n guelph guelph --only part=loss micro_batch=8 'arm=zero3*' --lane $n 3
    sweep t$n predictions predictions --only 'part=[!ae]*' --lane $n 3
    sweep t$n predictions predictions --only part=encoders --lane $n 3
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
