"""`study diagnose` reads what other tools leave behind, and nothing in it is ever run.

The Flight Recorder dumps and the CPU's trace are made here by PyTorch. The rest follows the published forms: no machine
with a GPU, with NCCL or with Slurm made it.
"""

import json
import os
import pickle
import time
from pathlib import Path

import pytest
from conftest import ranks_of

from study.cli.commands import start
from study.errors import Stop
from study.io.pickles import from_pickle
from study.watcher import evidence

# Rank 1 comes late, and rank 0 records a trace of a few steps.
RANKS = """
import os, sys, time
import torch, torch.distributed as dist
from torch._C import _distributed_c10d as native

os.chdir(sys.argv[1])
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(3))
if rank == 0:
    work = dist.all_gather([torch.ones(2) for _ in range(2)], torch.ones(2), async_op=True)
time.sleep(0.5)  # a thread marks what has ended
for name, dump in [("pickled", native._dump_fr_trace()), ("exported", native._dump_fr_trace_json())]:
    os.makedirs(name, exist_ok=True)
    with open(f"{name}/nccl_trace_rank_{rank}", "wb") as file:
        file.write(dump if isinstance(dump, bytes) else dump.encode())
if rank == 0:
    layer = torch.nn.Linear(64, 64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(3):
            layer(torch.randn(32, 64)).sum().backward()
            time.sleep(0.05)
    profile.export_chrome_trace("trace.json")
else:
    while not os.path.exists("trace.json"):
        time.sleep(0.02)
os._exit(0)
"""
INSTALLED = {"filename": "/usr/lib/python3/site-packages/torch/nn/linear.py", "line": 5, "name": "forward"}
GIB = 2**30


def sentences(path: Path) -> str:
    return " | ".join(finding.sentence for finding in evidence.look(path).findings)


def ids(path: Path) -> list[str | None]:
    return [finding.id for finding in evidence.look(path).findings]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    assert ranks_of(RANKS, folder, str(folder)).code == 0
    return folder


@pytest.mark.parametrize("form", ["pickled", "exported"])
def test_flight_recorders_name_the_late_rank(made, form):
    read = evidence.look(made / form)
    assert "Rank 1 has not begun all_gather 2, where rank 0 is" in read.findings[0].sentence
    waits = "; rank 0 waits at rank.py:11 in <module>" if form == "pickled" else ""  # PyTorch's JSON has no stacks
    assert read.state == f"2 of 2 ranks left a dump{waits}"


def test_a_dump_without_its_peers_says_so(made):
    assert "rank 1 left no log" in sentences(made / "pickled/nccl_trace_rank_0")


def test_a_trace_of_pytorch_is_read(made, capsys):
    assert ids(made / "trace.json") == ["idle", "longest_kernels"]  # it sleeps between the steps
    start(["diagnose", str(made / "trace.json")])
    assert "The CPU is idle for" in capsys.readouterr().out


def event(name: str, begin_us: float, us: float, category: str = "kernel", stream: int = 7) -> dict:
    return {"ph": "X", "cat": category, "name": name, "ts": begin_us, "dur": us, "pid": 0, "tid": stream}


def test_a_gpus_trace_shows_gaps_and_what_no_computation_hides(tmp_path):
    kernels = [event("gemm", 0, 400), event("ncclDevKernel_AllReduce", 300, 400, stream=20), event("adam", 900, 100)]
    loads = [event("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 700, 200, "user_annotation", 1)]
    (tmp_path / "a.pt.trace.json").write_text(json.dumps({"schemaVersion": 1, "traceEvents": kernels + loads}))
    said = sentences(tmp_path / "a.pt.trace.json")
    assert "The GPU is idle for 20% of the 0.001 s" in said
    assert "Communication takes 0.0004 s, and 75% of it overlaps with no computation" in said
    assert "20% of the time waits for data (0.0002 s in 1 calls" in said
    assert "Most time goes to gemm (44%, 0.0004 s)" in said


def snapshot(frames: str = "frames") -> dict:
    stack = [INSTALLED, {"filename": "/home/a/train.py", "line": 30, "name": "step"}]
    kept = {"size": 2**20, "requested_size": 2**20, "state": "active_allocated", "address": 0, "frames": [INSTALLED]}
    large = {"size": 2 * GIB, "state": "active_allocated", "address": 0} | (
        {"frames": stack} if frames == "frames" else {"history": [{"addr": 0, "real_size": 1, "frames": stack}]}
    )
    gap = {"size": GIB // 2, "state": "inactive", "address": 0}
    segment = {"device": 0, "total_size": 4 * GIB, "blocks": [large, gap, *[kept] * 300, gap]}
    out = {"action": "oom", "size": 3 * GIB, "device_free": GIB, "frames": stack, "stream": 0, "addr": 0}
    return {"segments": [segment], "device_traces": [[{"action": "alloc", "size": 1, "addr": 0}, out]]}


@pytest.mark.parametrize("frames", ["frames", "history"])
@pytest.mark.parametrize("write", [pickle.dumps, lambda value: json.dumps(value).encode()])
def test_memory_snapshots_name_the_owners(tmp_path, frames, write):
    (tmp_path / "memory.pickle").write_bytes(write(snapshot(frames)))
    said = sentences(tmp_path / "memory.pickle")
    assert "An allocation of 3.22 GB failed, with 1.07 GB free" in said
    assert "1.07 GB of it (25%) hold no tensor, in 2 pieces of at most 537 MB" in said
    assert "2.15 GB (87% of all tensors) are 1 tensors made at train.py:30 in step" in said
    assert "300 tensors of 1.05 MB each, made at linear.py:5 in forward" in said


def test_a_snapshot_of_many_sizes_takes_seconds(tmp_path):
    """Counting each size among all of a line would take minutes."""
    blocks = [{"size": size, "state": "active_allocated", "frames": []} for size in range(1, 40_000)]
    segment = {"total_size": GIB, "blocks": blocks}
    (tmp_path / "memory.json").write_text(json.dumps({"segments": [segment]}))
    begin_s = time.process_time()
    assert ids(tmp_path / "memory.json") == ["largest_owner"]
    assert time.process_time() - begin_s < 5


class Hostile:
    """Unpickling it would write a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_never_loaded(tmp_path, protocol):
    (tmp_path / "a.pickle").write_bytes(pickle.dumps({"segments": [Hostile(tmp_path / "ran")]}, protocol))
    with pytest.raises(Stop, match="it is not plain: it has the instruction"):
        evidence.look(tmp_path / "a.pickle")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_come_out_of_every_protocol(protocol):
    value = {
        "a": [1, -2, 2**40, 2**90, 1.5, None, True, False],
        "b": ("x" * 300, (), (1,), (1, 2, 3, 4)),
        "ü": {},
        3: [],
    }
    assert from_pickle(pickle.dumps(value, protocol)) == value


def test_nested_pickles_do_not_overflow_the_stack(tmp_path):
    deep = b"\x85" * 300_000  # tuples in tuples, as a key, as a value, and where a name is shown
    frame = b"}(\x8c\x08filenameX\x01\x00\x00\x00a\x8c\x04lineK\x01\x8c\x04nameK\x01" + deep + b"u"
    block = b"}(\x8c\x04sizeK\x01\x8c\x05stateX\x01\x00\x00\x00a\x8c\x06frames]" + frame + b"au"
    segment = b"}(\x8c\x0atotal_sizeK\x01\x8c\x06blocks]" + block + b"au"
    for content in (b"}K\x01" + deep + b"K\x01s.", b"K\x01" + deep + b".", b"}\x8c\x08segments]" + segment + b"as."):
        (tmp_path / "deep").write_bytes(b"\x80\x04" + content)
        with pytest.raises(Stop):
            evidence.look(tmp_path / "deep")


@pytest.mark.parametrize("length", [1, 2, 9, 40, -1])
def test_damaged_files_are_refused_in_a_sentence(tmp_path, length):
    for content in (pickle.dumps(snapshot()), json.dumps(snapshot()).encode(), b"\x1f\x8b12", b"\x80", b"{}", b"[[1]]"):
        (tmp_path / "odd").write_bytes(content[:length])
        with pytest.raises(Stop) as stop:
            evidence.look(tmp_path / "odd")
        assert len(stop.value.sentence) < 600


@pytest.mark.parametrize(
    "odd", [{"segments": 3}, {"segments": [{}]}, {"entries": [{}]}, {"traceEvents": [{"ph": "X"}]}]
)
def test_other_forms_are_refused_in_a_sentence(tmp_path, odd):
    for content in (pickle.dumps(odd), json.dumps(odd).encode()):
        (tmp_path / "odd_0").write_bytes(content)
        with pytest.raises(Stop, match="has not the form that its tool writes"):
            evidence.look(tmp_path / "odd_0")


def test_nccl_inspector_names_a_slow_rank(tmp_path):
    lines = []
    for rank, us in enumerate([100.0, 100.0, 100.0, 150.0]):
        times = {"coll_sn": 5, "coll_exec_time_us": us, "coll_algobw_gbs": 300.0, "coll_busbw_gbs": 525.0}
        performed = {"coll": "AllReduce", "coll_msg_size_bytes": 2**26, **times}
        header = {"id": "0x1", "rank": rank, "n_ranks": 4, "nnodes": 1}
        lines.append(json.dumps({"header": header, "metadata": {"hostname": "a"}, "coll_perf": performed}))
        (tmp_path / f"node_pid{rank}.log").write_text(lines[-1])  # a file for each process
    said = sentences(tmp_path)
    assert "Rank 3 takes 50% longer in AllReduce of 67.1 MB than the median of 4 ranks" in said
    assert "AllReduce of 67.1 MB reaches 525 GB/s of bus bandwidth (median of 4)" in said


WATCHDOG = (
    "[rank{0}]:[E ProcessGroupNCCL.cpp:616] [Rank {0}] Watchdog caught collective operation timeout: WorkNCCL("
    "SeqNum={1}, OpType={2}, NumelIn=100, NumelOut=100, Timeout(ms)=600000) ran for 600029 milliseconds."
)
ROOT_CAUSE = """Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_10:00:00
  host      : node1
  rank      : 5 (local_rank: 1)
  exitcode  : 1 (pid: 77)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 77
"""
LOGS = {
    "slurmstepd: error: Detected 1 oom_kill event in StepId=9.0. Some of the step tasks have been OOM Killed.": (
        "The kernel, a container or Slurm ended a process for its memory: slurmstepd"
    ),
    "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-01-01T10:00:00 DUE TO TIME LIMIT ***": "at its time limit",
    "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-01-01T10:00:00 DUE TO PREEMPTION ***": "took the node away",
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.": "A rank ran out of memory",
    ROOT_CAUSE: "The first process to fail was rank 5 with exit code 1: Signal 9 (SIGKILL) received by PID 77",
    WATCHDOG.format(3, 7, "ALLREDUCE"): "Rank 3 waited 600 s in allreduce 7, until NCCL's watchdog ended it",
    WATCHDOG.format(0, 7, "ALLREDUCE") + "\n" + WATCHDOG.format(1, 7, "BROADCAST"): "Ranks took different branches",
}


@pytest.mark.parametrize("text", LOGS)
def test_logs_say_how_a_job_ended(tmp_path, text):
    (tmp_path / "slurm-12.out").write_text("step 1\n" + text + "\n")
    assert LOGS[text] in sentences(tmp_path / "slurm-12.out")


def test_a_log_without_an_end_is_one_sentence(tmp_path):
    (tmp_path / "a.log").write_text("JOB 1 " * 100_000)
    with pytest.raises(Stop, match="says nothing about the end of a job"):
        evidence.look(tmp_path / "a.log")
