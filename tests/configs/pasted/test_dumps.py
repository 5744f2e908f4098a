"""A dump of stacks says where each process waits, and names the one that is elsewhere."""

import subprocess
import sys

import pytest

from study.configs.oom.reading import BETWEEN_TEXTS
from study.configs.pasted.answer import answer
from study.configs.pasted.dumps import COLLECTIVES, waits

# As py-spy 0.4.3 wrote it of two ranks of stage 3, of which one evaluates; shortened.
SPY = """Process {pid}: /venv/bin/python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread {pid} (idle): "MainThread"
{frames}
    main (train.py:{line})
    <module> (train.py:18)
Thread 77 (idle): "Thread-1"
    wait (threading.py:327)
    barrier (torch/distributed/distributed_c10d.py:1)
    _bootstrap (threading.py:1002)
"""
GATHERS = """    TorchBackend.all_gather_into_tensor (deepspeed/comm/torch.py:226)
    PartitionedParameterCoordinator.__all_gather_params_ (deepspeed/runtime/zero/partitioned_param_coordinator.py:513)
    PartitionedParameterCoordinator.fetch_sub_module (deepspeed/runtime/zero/partitioned_param_coordinator.py:401)
    DeepSpeedEngine.forward (deepspeed/runtime/engine.py:3007)"""
FSDP = """    foreach_all_gather (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py:1)
    FSDPParamGroup.unshard (torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py:1)"""
REDUCES = """    all_reduce (torch/distributed/distributed_c10d.py:3000)
    DeepSpeedZeroOptimizer.average_tensor (deepspeed/runtime/zero/stage_1_and_2.py:1300)"""
BARRIER = """    barrier (torch/distributed/distributed_c10d.py:5356)
    _exception_logger.<locals>.wrapper (torch/distributed/c10d_logger.py:83)"""
SAVES = f"{BARRIER}\n    DeepSpeedEngine.save_checkpoint (deepspeed/runtime/engine.py:4200)"
ALL_REDUCE = "    all_reduce (torch/distributed/distributed_c10d.py:3000)"
BACKWARD = "    _engine_run_backward (torch/autograd/graph.py:829)"
LOADS = "    _DataLoader._try_get_data (torch/utils/data/dataloader.py:1251)"
WORKER = "    _worker_loop (torch/utils/data/_utils/worker.py:252)"
PRINTS = "    item (/home/me/project/report.py:9)"


def spy(**stacks: str) -> str:
    return "\n".join(SPY.format(pid=name[1:], frames=frames, line=name[1:]) for name, frames in stacks.items())


KINDS = {
    "a gather of stage 3's weights": GATHERS,
    "a gather of FSDP's weights": FSDP,
    "a reduction of gradients": REDUCES,
    "a barrier": BARRIER,
    "all_reduce": ALL_REDUCE,
    "its backward pass": BACKWARD,
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_collective_is_named_at_the_line_of_the_script(kind):
    assert len(KINDS) == len(COLLECTIVES)
    assert waits(spy(p7=KINDS[kind])).sentence.endswith(f"process 7 at train.py:7 (in {kind})")


# The stacks of the processes, what is told, and a part of the sentence.
DUMPS = {
    "apart": ({"p88": BARRIER, "p71": GATHERS}, "dumps-apart", "train.py:71 (in a gather of stage 3's weights)"),
    "saves": ({"p88": SAVES, "p71": BACKWARD}, "dumps-apart", "train.py:88 (saves, in a barrier)"),
    "loads": (
        {"p5": LOADS, "p71": BACKWARD},
        "dumps-late",
        "process 5 at train.py:5 (waits for its data loader); proc",
    ),
    "prints": (
        {"p71": BACKWARD, "p5": PRINTS},
        "dumps-late",
        ": process 5 at /home/me/project/report.py:9 (in no coll",
    ),
    "alike": ({"p7": GATHERS}, "dumps-alike", "process 7 at train.py:7"),
    "workers": ({"p7": GATHERS, "p9": WORKER}, "dumps-alike", "process 7 at train.py:7"),
    "none": ({"p7": PRINTS, "p8": PRINTS}, "", ""),
}


@pytest.mark.parametrize("name", DUMPS)
def test_processes_that_wait_apart_are_told_so(name):
    stacks, id, said = DUMPS[name]
    told = answer(spy(**stacks))
    assert told.id == id
    assert said in (told.found[0].sentence if told.found else "")
    assert not any("Which releases" in each for each in told.questions if id)


def test_ranks_that_stand_at_one_line_are_counted():
    text = "\n".join(SPY.format(pid=pid, frames=BACKWARD, line=71) for pid in range(2, 9))
    text += SPY.format(pid=1, frames=BARRIER, line=88)
    assert "7 processes (process 2, process 3, process 4, process 5) at train.py:71" in waits(text).sentence


FAULT = """{rank}Timeout (0:01:00)!
{rank}Thread 0x00007f31{thread} (most recent call first):
{rank}  File "/usr/lib/python3.11/threading.py", line 327 in wait
{rank}  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap
{rank}
{rank}Thread 0x00007f3a{thread} (most recent call first):
{rank}  File "/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 5356 in {function}
{rank}  File "/job/train.py", line {line} in main
{rank}  File "/job/train.py", line 18 in <module>
"""


def faults(between: str, ranks: tuple[str, str] = ("", "")) -> str:
    first = FAULT.format(rank=ranks[0], thread="13dc5b80", function="broadcast", line=16)
    return first + between + FAULT.format(rank=ranks[1], thread="1da7cb80", function="barrier", line=17)


@pytest.mark.parametrize("between", ["", BETWEEN_TEXTS])
def test_the_dumps_of_faulthandler_are_read(between):
    told = waits(faults(between))
    assert (told.id, told.sentence.count("train.py:16 (in broadcast)")) == ("dumps-apart", 1)
    assert "rank 1 at /job/train.py:17 (in a barrier)" in waits(faults(between, ("[rank0]:", "[rank1]:"))).sentence


def test_of_several_dumps_of_a_process_the_last_counts():
    first = FAULT.format(rank="", thread="13dc5b80", function="broadcast", line=16)
    again = FAULT.format(rank="", thread="13dc5b80", function="barrier", line=17)
    assert waits(first + again).id == "dumps-alike"
    assert waits(first + again).sentence.endswith("/job/train.py:17 (in a barrier)")


def test_python_writes_it_so():
    code = "import faulthandler, threading\ndef barrier():\n    faulthandler.dump_traceback()\nbarrier()\n"
    dump = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
    text = dump.replace('File "<string>", line 3', 'File "/x/site-packages/torch/distributed_c10d.py", line 3')
    assert waits(text.replace("<string>", "/job/train.py")).sentence.endswith("/job/train.py:4 (in a barrier)")


def test_a_process_that_failed_does_not_wait():
    assert waits(f"Fatal Python error: Segmentation fault\n\n{faults('')}") is None
    assert waits(f"Fatal Python error: Aborted\n\n{faults('')}") is not None


def test_a_dump_that_is_cut_above_its_last_frame_is_read():
    cut = spy(p88=SAVES, p71=BACKWARD).replace("    <module> (train.py:18)\n", "")
    assert waits(cut).sentence == waits(spy(p88=SAVES, p71=BACKWARD)).sentence
