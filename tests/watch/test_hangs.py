"""It hangs: real gloo ranks that wait for each other are named, while they run and after they were killed."""

import contextlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch._C import _distributed_c10d

from study.cli import diagnosis as command
from study.core.errors import Stop
from study.core.text import lasting
from study.known.findings import causes_of_hangs
from study.measure.heartbeat import CollectiveLog
from study.records import collectives, store
from study.records.collectives import LoggedCall, RankLog
from study.training.launch import ranks_that_died
from study.watch.hangs import causes, dumps, hangs, state
from tests.cases import for_each
from tests.conftest import ROOT, ranks_of, table

# PyTorch is imported once; the ranks are forked.
RANKS = """
import os, sys, time
from datetime import timedelta
from pathlib import Path
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from study.measure.heartbeat import CollectiveLog

folder, what = Path(sys.argv[1]), sys.argv[2]

def train(rank):
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / "store"), 3), rank=rank, world_size=3, timeout=timedelta(seconds=60)
    )
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    with CollectiveLog(folder, rank, every_s=0.05, still_s=0.3):
        model(torch.ones(2, 4)).sum().backward()  # an all_reduce that Python does not see
        if (what, rank) == ("sleeps", 1):
            time.sleep(60)
        if (what, rank) == ("raises", 2):
            raise ValueError("a bad row")
        dist.all_gather([torch.ones(2) for _ in range(3)], torch.ones(2))

for rank in range(3):
    if os.fork() == 0:
        train(rank)
        os._exit(0)
time.sleep(60)
"""


def sentences(logs: list[RankLog]) -> list[str]:
    return [finding.sentence for finding in hangs(logs)]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("sleeps", "Rank 1 has not begun all_gather .*, where ranks 0, 2 are: it is at <string>:"),
        ("raises", "Rank 2 has not begun all_gather .*: it ended with ValueError"),
    ],
)
def test_a_rank_that_is_missed_is_named_also_after_all_were_killed(tmp_path, what, said):
    command = [sys.executable, "-c", RANKS, tmp_path, what]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=env, start_new_session=True, stderr=subprocess.DEVNULL)
    end_s = time.monotonic() + 60
    logs = []
    try:
        while not (len(logs) == 3 and all(log.recent for log in logs) and re.search(said, " | ".join(sentences(logs)))):
            assert time.monotonic() < end_s, logs
            time.sleep(0.1)
            logs = collectives.load(tmp_path)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert collectives.load(tmp_path) == logs
    assert "all_reduce" in [entry.kind for entry in logs[0].recent], "that of DDP's reducer"
    assert "3 of 3 ranks have a log" in state(logs)


# --- the sentences, on logs made by hand ---------------------------------------------------------------------------


def test_the_ring_of_nccl_is_read(tmp_path, monkeypatch):
    """A ring with the keys of FlightRecorderDetail.hpp: no GPU is needed to read it."""
    ended = {"process_group": ["0", "default_pg"], "is_p2p": False, "input_sizes": [[4, 4]], "collective_seq_id": 1}
    ended |= {"profiling_name": "nccl:all_reduce", "state": "completed", "retired": True}
    waits = ended | {"collective_seq_id": 2, "profiling_name": "nccl:all_gather", "state": "started", "retired": False}
    ring = {"pg_status": {"0": {"last_enqueued_collective": "2"}}, "entries": [ended, waits]}
    dump = json.dumps(ring).encode()
    monkeypatch.setattr(_distributed_c10d, "_dump_nccl_trace_json", lambda *_: dump, raising=False)
    with contextlib.suppress(ValueError), CollectiveLog(tmp_path, rank=0):
        raise ValueError
    [log] = collectives.load(tmp_path)
    seen = [(entry.kind, entry.elements, entry.ended) for entry in log.recent]
    assert seen == [("all_reduce", 16, True), ("all_gather", 16, False)]


def log(text: str, ranks: int = 2, groups: dict | None = None) -> RankLog:
    """The log of a rank as tests/watch/hang_cases.toml writes it."""
    text, place, functions = (text + " |  | ").split(" | ")[:3]
    rank, _, calls = text.partition(":")
    recent = []
    for call in re.findall(r"(\w+) (\d+)(\??)@?(\w*)=?(\w*) ?(\w*)", calls):
        kind, index, waits, group, elements, dtype = call
        entry = {"kind": kind, "index": index, "ended": not waits, "group": group or "0", "dtype": dtype}
        recent.append(LoggedCall(elements=elements or None, **entry))
    fields = {"written_unix_s": 100.0, "still_s": 5.0, "recorded": True, "place": place or None, "recent": recent}
    fields["calls"] = functions.split(" < ") if functions else []
    return RankLog(rank=int(rank), ranks=ranks, groups=groups or {}, **fields)


@for_each("case", table("watch/hang_cases.toml")["case"])
def test_what_is_said_of_ranks(case):
    ranks = case.get("ranks", len(case["logs"]))
    groups = case.get("groups", {"0": [*range(ranks)], "pair": [0, 1]})
    logs = [log(text, ranks, groups) for text in case["logs"]]
    assert " | ".join(sentences(logs)).startswith(case["said"])
    assert bool(sentences(logs)) == bool(case["said"])
    found = [finding.id for finding in hangs(logs)]
    assert found == case.get("found", found)
    assert [cause.id for cause in causes(logs)] == case.get("causes", [])


def test_a_run_whose_collectives_were_not_recorded_is_told():
    unseen = log("0:").model_copy(update={"recorded": False})
    assert state([unseen]).startswith("PyTorch recorded no collectives: TORCH_FR_BUFFER_SIZE is 0")
    assert state([unseen]).endswith("[nothing_recorded]")


def test_study_diagnose_tells_of_a_run_that_goes_on(tmp_path):
    store.write(tmp_path, store.new("mine", []))
    for each in (log("0: all_gather 412, all_reduce 413?"), log("1: all_gather 412?")):
        (tmp_path / f"collectives-rank{each.rank}.json").write_text(each.model_dump_json())
    (answer,) = command.diagnose((tmp_path,))
    assert "unfinished" in answer["how"]
    assert "Rank 1 has not begun all_reduce 413" in answer["findings"][0]["sentence"]


# --- ranks that hung, from kept trainings --------------------------------------------------------------------------


def test_each_way_to_hang_is_named():
    """Real ranks that hung: `study diagnose` names the cause."""
    rows = list(map(json.loads, (ROOT / "reports/cpu-2core/hangs.jsonl").read_text().splitlines()))
    hung = [row for row in rows if row["outcome"] == "hangs"]
    assert (len(rows), len({row["way"] for row in hung})) == (48, 9)
    for row in hung:
        (cause,) = causes([RankLog.model_validate(each) for each in row["logs"]])
        assert row["way"] in causes_of_hangs()[cause.id]["ways"]


# --- Flight Recorder dumps, made here by PyTorch -------------------------------------------------------------------

DUMPS = """
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
dump = native._dump_fr_trace() if rank else native._dump_fr_trace_json()
with open(f"nccl_trace_rank_{rank}", "wb") as file:
    file.write(dump if isinstance(dump, bytes) else dump.encode())
os._exit(0)
"""


def test_dumps_name_the_late_rank_and_the_rank_without_a_dump(tmp_path, monkeypatch):
    """Rank 0 writes JSON, and rank 1 a pickle, which the guide's command converts."""
    assert ranks_of(DUMPS, tmp_path, str(tmp_path)).code == 0
    with pytest.raises(Stop, match="PyTorch writes pickles"):
        dumps(tmp_path)
    (convert,) = re.findall("for path in Path.*", (ROOT / "GUIDE.md").read_text())
    monkeypatch.chdir(tmp_path)
    exec(convert.replace("*_rank_*", "*_rank_1"), {"Path": Path, "json": json, "pickle": pickle})
    (answer,) = command.diagnose((tmp_path,))
    assert answer["ranks"].startswith("2 of an unknown number of ranks")
    assert "Rank 1 has not begun all_gather 2, where rank 0 is" in answer["findings"][0]["sentence"]
    (tmp_path / "nccl_trace_rank_0").rename(tmp_path / "nccl_trace_rank_2")
    assert "Rank 0 left no log" in sentences(dumps(tmp_path))[0]
    (tmp_path / "nccl_trace_rank_1.json").write_text(json.dumps(table("cli/valid.toml")["dump"]))
    assert "Ranks 0, 3 left no log" in sentences(dumps(tmp_path))[0], "of a dump that lists them"


def test_two_dumps_of_one_rank_are_refused(tmp_path):
    """They are of two hangs, or of two moments: which one counts is not known."""
    for name in ("a_rank_0", "b_rank_0"):
        (tmp_path / name).write_text(json.dumps(table("cli/valid.toml")["dump"]))
    with pytest.raises(Stop, match="'a_rank_0' and 'b_rank_0' are both dumps of rank 0"):
        dumps(tmp_path)


def test_sends_and_receives_that_wait_are_named(tmp_path):
    for rank, dump in enumerate(table("watch/hang_cases.toml")["sends"]):
        (tmp_path / f"rank_{rank}").write_text(json.dumps(dump))
    [sentence] = sentences(dumps(tmp_path))
    assert sentence.endswith("not compared here: rank 0 in send 0->1, rank 1 in coalesced")


# --- the study's own trainer ---------------------------------------------------------------------------------------

HEARTBEATS = """
import faulthandler, os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from study.watch.hangs import hangs
from study.measure.heartbeat import ASK, Heartbeat
from study.records import collectives

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
faulthandler.register(ASK)
dist.init_process_group("gloo")
heart = Heartbeat(folder, rank)
dist.all_reduce(torch.ones(1))
heart.beat("steps 1 to 10 of 10")
quiet = heart.file.stat().st_mtime_ns
if rank == 0:
    dist.all_reduce(torch.ones(1))  # waits in C++, where Python runs nothing
time.sleep(1.5)
assert heart.file.stat().st_mtime_ns == quiet, "nothing is written while steps are timed"
(first,) = [log.pid for log in collectives.load(folder) if log.rank == 0]
for pid in (first, os.getpid()):
    os.kill(pid, ASK)
until = time.monotonic() + 20
while not all(log.recent for log in collectives.load(folder)) and time.monotonic() < until:
    time.sleep(0.1)
print([finding.sentence for finding in hangs(collectives.load(folder))], flush=True)
os.kill(first, signal.SIGKILL)
heart.close()
os._exit(0)
"""


def test_a_rank_that_is_asked_says_in_which_collective_it_waits_and_writes_nothing_before(tmp_path):
    output = ranks_of(HEARTBEATS, tmp_path, str(tmp_path)).output
    assert "Rank 1 has not begun all_reduce 2, where rank 0 is: it is at " in output
    assert output.count('File "') > 2, "the stacks"
    left = collectives.load(tmp_path)
    assert [log.rank for log in left] == [0], "what ends by itself takes its heartbeat away"
    assert [*ranks_that_died(tmp_path)] == [0]


WAITS = """
import datetime, sys, time
import torch, torch.distributed as dist
from accelerate import PartialState
from study.training import ending, setup

handed_on = setup.InitProcessGroupKwargs(backend="gloo", timeout=setup.WAIT).to_kwargs()
assert handed_on["timeout"] == setup.WAIT, handed_on
state = PartialState(cpu=True, backend="gloo", timeout=datetime.timedelta(seconds=2))
if state.process_index == 1:
    time.sleep(6)
    sys.exit()
try:
    dist.all_reduce(torch.ones(1))
except RuntimeError as error:
    print(ending.reason(error).sentence)
"""


def test_a_rank_that_waits_too_long_says_so_and_not_after_half_an_hour(tmp_path):
    output = ranks_of(WAITS, tmp_path).output
    assert "a collective waited too long for another rank: [" in output, output
    assert "report this" not in output


@pytest.mark.parametrize(
    ("age_s", "said"), [(40, "40 s"), (119, "119 s"), (720, "12 minutes"), (96458, "27 hours"), (300000, "3 days")]
)
def test_an_age_is_said_as_people_say_it(age_s, said):
    assert lasting(age_s) == said
