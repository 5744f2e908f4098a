"""A pasted text gets one answer, and nothing is taken for something else."""

import io
import resource
import time

import pytest

from study.configs.pasted import condense, tracebacks, watchdogs
from study.configs.pasted.answer import answer
from study.configs.pasted.read import deepspeed_config, read
from study.known.faults import table

WORK = (
    "[rank{rank}]:[E321 02:07:08.408 ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={index}, OpType={kind}, NumelIn={elements}, NumelOut={elements}, Timeout(ms)=600000) ran for 600060 "
    "milliseconds before timing out.\n"
)


@pytest.mark.parametrize("id", tracebacks.messages())
def test_each_example_is_explained_by_its_row(id):
    message = tracebacks.messages()[id]
    assert [each.id for each in tracebacks.errors(message.example)] == [id]
    assert len(message.sentence) <= 150, "the first two lines of the answer"
    assert message.sure in ("sure", "likely", "possible")
    assert {*message.hides} <= {*tracebacks.messages()}
    assert not message.fault or message.fault in {fault.id for fault in table().fault}


def test_a_rank_that_is_behind_is_named():
    same = [WORK.format(rank=rank, index=1580, kind="ALLREDUCE", elements=466119168) for rank in (0, 1, 2)]
    (seen,) = watchdogs.hangs("".join([*same, "world_size: 4"]))
    assert seen.id == "rank-missing"
    assert "Rank 3 did not join ALLREDUCE 1580 of 466,119,168 elements" in seen.sentence
    behind = WORK.format(rank=3, index=1575, kind="_ALLGATHER_BASE", elements=1000000)
    (seen,) = watchdogs.hangs("".join([*same, behind]))
    assert seen.id == "rank-behind"
    assert seen.sentence.startswith("Rank 3 behind")
    other = WORK.format(rank=3, index=1580, kind="BROADCAST", elements=1)
    (seen,) = watchdogs.hangs("".join([*same, other]))
    assert seen.id == "different-calls"


def test_out_of_memory_comes_before_who_waited_for_that_rank():
    text = "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.1 GiB\n"
    waits = "".join(WORK.format(rank=rank, index=300, kind="ALLREDUCE", elements=5) for rank in (0, 2, 3))
    assert answer(waits + text).id == "memory"


@pytest.mark.parametrize("text", ["", "hello", "\x00\xff", "{", "error", "a" * 10**6, "[[[[" * 10**4, "\n" * 10**5])
def test_unknown_text_is_told_as_such(text):
    assert answer(text).sure == "nothing"


def test_a_config_is_read_whatever_its_form():
    for text in (
        'x {"zero_optimization": {"stage": 2, "overlap_comm": true}, "bf16": {"enabled": true},} y',
        "ds_config = {'train_batch_size': 8,  # rows\n 'zero_optimization': {'stage': 2}}",
    ):
        config = deepspeed_config(text)
        assert config["zero_optimization"]["stage"] == 2
        assert read(text).said["stage"] == 2


def test_a_large_text_takes_seconds(tmp_path):
    line = b"{'loss': 1.2345, 'grad_norm': 2.0, 'learning_rate': 1e-05, 'epoch': 0.1}\n"
    path = tmp_path / "train.log"
    with path.open("wb") as file:
        file.write(b"deepspeed==0.18.2\n")
        for _ in range(200):
            file.write(line * (2**20 // len(line)))
        file.write(b"RuntimeError: 'weight' must be 2-D\n")
    began = time.process_time()
    found = answer(condense.content(path))
    assert found.id == "weight-not-2d"
    assert time.process_time() - began < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 500 * 1024 + 400 * 1024  # with pytest's own


def test_errors_in_the_middle_of_a_large_text_are_kept():
    filler = b"step 1 of 2, all is well and nothing is said\n" * 100_000
    text = condense.condensed(iter([filler, b"\nRuntimeError: 'weight' must be 2-D\nTraceback (most recent", filler, filler]))
    assert "must be 2-D" in text
    assert len(text) < 2 * 10**6
    utf16 = "AttributeError: 'Parameter' object has no attribute 'ds_id'".encode("utf-16")
    assert answer(condense.condensed([utf16])).id == "no-ds-id"
    assert io.StringIO(condense.condensed([b""])).read() == ""
