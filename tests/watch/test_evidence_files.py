"""`study diagnose` reads Flight Recorder dumps, made here by PyTorch, and nothing in them is ever run."""

import os
import pickle
from pathlib import Path

import pytest
from conftest import ranks_of

from study.core.errors import Stop
from study.watch.hangs import dumps, hangs

# Rank 1 comes late.
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
os._exit(0)
"""


def sentences(path: Path) -> str:
    return " | ".join(finding.sentence for finding in hangs(dumps(path)))


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    assert ranks_of(RANKS, folder, str(folder)).code == 0
    return folder


@pytest.mark.parametrize("form", ["pickled", "exported"])
def test_flight_recorders_name_the_late_rank(made, form):
    assert "Rank 1 has not begun all_gather 2, where rank 0 is" in sentences(made / form)
    place = dumps(made / form)[0].place
    assert place == ("rank.py:11 in <module>" if form == "pickled" else None)  # PyTorch's JSON has no stacks


def test_a_dump_without_its_peers_says_so(made):
    assert "Rank 1 left no log" in sentences(made / "pickled/nccl_trace_rank_0")


class Hostile:
    """Unpickling it would write a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_names_a_function_is_refused(tmp_path, protocol):
    (tmp_path / "a.pickle").write_bytes(pickle.dumps({"entries": [Hostile(tmp_path / "ran")]}, protocol))
    with pytest.raises(Stop, match="it is not plain: it names"):
        dumps(tmp_path / "a.pickle")
    assert not (tmp_path / "ran").exists()
