"""Collectives: counted exactly, and in agreement with what the kernel says the processes wrote."""

import json

import pytest
import torch

from study.measure.traffic import KINDS, MOVES_NOTHING, CollectiveCounter, refuse_uncounted
from study.records.sections import Collective
from tests.conftest import ROOT, ranks_of
from tests.wire import gloo_wire_bytes

MIB = 2**20


def test_gloos_reduce_writes_what_the_words_say():
    """Two ranks together 1.5 times its tensor, in the only kept run that has it, and not each of them."""
    (path,) = ROOT.glob("reports/*/runs/*/adamw-zero2_reduce*/record.json")
    traffic = json.loads(path.read_text())["traffic"]
    sent = {name: moved["bytes"] for name, moved in traffic["per_rank"][0].items()}
    left = [written - sent["all_gather"] / 2 for written in traffic["kernel_bytes_written"]]
    assert sum(left) / sent["reduce"] == pytest.approx(1.5, rel=1e-3)
    assert "of its reduce two ranks together write 1.5 to 2.4 times the tensor" in (ROOT / "WORDS.md").read_text()


# A process imports torch once, and forks the ranks of a gloo group. Each runs each collective once unwatched, then once
# counted, between two looks at the kernel.
GROUP = """
import json, os, sys, warnings
from pathlib import Path

import torch
import torch.distributed as dist
from study.measure.memory import io_bytes
from study.measure.traffic import CollectiveCounter

warnings.simplefilter("ignore")  # torch 2.13 is about to rename two of these
folder, rank, ranks = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
whole, part = torch.ones(2**21), torch.ones(2**21 // ranks)  # 8 MiB, and this rank's share
half = torch.ones(2**22, dtype=torch.bfloat16)  # 8 MiB as well
RUNS = {
    "all_reduce": lambda: dist.all_reduce(whole),
    "all_reduce_bf16": lambda: dist.all_reduce(half),
    "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, part),
    "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(part, whole),
    "broadcast": lambda: dist.broadcast(whole, 0),
    "all_to_all_single": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
    "thrice": lambda: [dist.all_reduce(whole), dist.all_reduce(half), dist.broadcast(part, 0)],
}
seen = {}
for name, run in RUNS.items():
    run()
    dist.barrier()
    before = io_bytes()["wchar"]
    with CollectiveCounter() as counter:
        run()
    dist.barrier()  # the other rank may still be sending
    after = io_bytes()["wchar"]
    counts = {kind: count.model_dump() for kind, count in counter.counts.items()}
    seen[name] = {"counts": counts, "kernel": after - before}
    whole.fill_(1), half.fill_(1)
(folder / f"{rank}.json").write_text(json.dumps(seen))
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # gloo's threads sometimes abort an ordinary exit
"""


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def ranks_saw(request, tmp_path_factory) -> list[dict]:
    """What each rank of a real gloo group counted, and what the kernel counted of it."""
    folder = tmp_path_factory.mktemp("gloo")
    done = ranks_of(GROUP, folder, str(folder), ranks=request.param)
    assert done.code == 0, done.output
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(request.param)]


def entry(size: int = 8 * MIB, dtype: str = "float32") -> dict:
    return {"calls": 1, "bytes": size, "bytes_by_dtype": {dtype: size}, "bytes_by_group": {}}


KIND_OF = {
    "all_reduce": "all_reduce",
    "all_reduce_bf16": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "broadcast": "broadcast",
    "all_to_all_single": "all_to_all",
}


def kernel_agrees(ranks: list[dict], name: str) -> bool:
    """Two independent ways to the same number: what was counted, and what went through the processes' write calls."""
    kernel = sum(rank[name]["kernel"] for rank in ranks)
    counts = [{kind: Collective(**count) for kind, count in rank[name]["counts"].items()} for rank in ranks]
    wire = sum(gloo_wire_bytes(each, len(ranks)) for each in counts)
    return wire > 4 * MIB and kernel == pytest.approx(wire, rel=0.01)


@pytest.mark.parametrize("name", KIND_OF)
def test_a_collective_is_counted_exactly_and_the_kernel_agrees(ranks_saw, name):
    """The full tensor, once, in its dtype, whether it is what goes in or what comes out; and nothing else."""
    counts = {KIND_OF[name]: entry(dtype="bfloat16" if name == "all_reduce_bf16" else "float32")}
    assert [rank[name]["counts"] for rank in ranks_saw] == [counts] * len(ranks_saw)
    assert kernel_agrees(ranks_saw, name)


def test_counts_add_up(ranks_saw):
    """Calls of one kind are summed, their dtypes kept apart."""
    dtypes = {"float32": 8 * MIB, "bfloat16": 8 * MIB}
    sums = {"calls": 2, "bytes": 16 * MIB, "bytes_by_dtype": dtypes, "bytes_by_group": {}}
    counts = {"all_reduce": sums, "broadcast": entry(8 * MIB // len(ranks_saw))}
    assert [rank["thrice"]["counts"] for rank in ranks_saw] == [counts] * len(ranks_saw)
    assert kernel_agrees(ranks_saw, "thrice")


def test_an_unknown_collective_is_not_passed_over():
    """The bytes of a collective that PyTorch adds one day are not lost without a word."""
    counter = CollectiveCounter()
    refuse_uncounted(counter)
    counter._count("all_reduce_twice_", ([torch.ones(1)], None), ())
    with pytest.raises(NotImplementedError, match="all_reduce_twice_: not in NAMES"):
        refuse_uncounted(counter)
    schemas = [schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("c10d::")]
    names = {name.removeprefix("c10d::") for name in schemas}
    assert {"allreduce_", "_allgather_base_", "broadcast_"} <= names, "they were read"
    assert names - KINDS.keys() <= {"recv_any_source_", "monitored_barrier_", "check_for_nan"}, "add it to NAMES"


def test_each_collective_of_pytorch_has_a_kind():
    """One without stops a watch: `clip_grad_norm_` under FSDP2 wraps its norm, which moves nothing."""
    import torch.distributed._functional_collectives

    spaces = ("c10d::", "_c10d_functional::")
    names = {
        name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith(spaces)
    }
    batches = {"batch_p2p_ops"}  # sends and receives at once: not told apart, so they are refused
    assert names - KINDS.keys() - MOVES_NOTHING == batches
