"""The hang laboratory: ways in which real trainings hang, each under several arms, on two real ranks with gloo.

python tools/hangs.py reports/cpu-2core/hangs.jsonl [WAY ...]

Each line is one way under one arm: whether it hangs, what the libraries say once their timeout is over, and the logs of
the ranks while they wait, from which `study diagnose` names the cause. The libraries are called without Accelerate. A
rank that has left the loop keeps its connections, as a script does that goes on to something else.
"""

import contextlib
import datetime
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

# No thread may exist when a process is forked.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from study.measure import hardware
from study.measure import heartbeat as instrument
from study.records import collectives
from study.records.collectives import RankLog
from study.watch.hangs import hangs

ARMS = ("ddp", "zero2", "zero3", "fsdp2")
TIMEOUT_S = 10  # of the process group
STILL_S = 1.5  # then a rank writes where it is
MOST_S = 25  # then the ranks are killed
KEPT = 12  # collectives of a rank that a line keeps
LONGEST = 240  # characters of a message
STEPS = 4
CRASHED = "it crashed"
WHERE = re.compile(r"\[(?:enforce fail at )?/__w/\S+\] ")  # lines of PyTorch's own build


class Model(torch.nn.Module):
    """An embedding, two layers, and two experts: a row goes to the second one if it begins with a high token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(32, 16)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))
        self.experts = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))
        self.head = torch.nn.Linear(16, 32)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden).relu()
        high = ids[:, 0] >= 16
        parts = [(expert, rows) for expert, rows in zip(self.experts, (~high, high), strict=True) if rows.any()]
        routed = torch.cat([expert(hidden[rows]) for expert, rows in parts])
        return self.head(routed)


@dataclass
class Training:
    """A prepared training of one rank."""

    arm: str
    rank: int
    folder: Path
    model: Any
    optimizer: Any

    def rows(self, steps: int = STEPS) -> Iterator[torch.Tensor]:
        """Yield batches in which both experts get rows."""
        for _ in range(steps):
            yield torch.cat([torch.randint(0, 16, (2, 8)), torch.randint(16, 32, (2, 8))])

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        logits = self.model(ids)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())

    def step(self, loss: torch.Tensor) -> None:
        if self.arm.startswith("zero"):
            self.model.backward(loss)
            self.model.step()
        else:
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def train(self, steps: int = STEPS) -> None:
        for ids in self.rows(steps):
            self.step(self.loss(ids))


def prepare(arm: str, rank: int, folder: Path) -> Training:
    torch.manual_seed(0)
    model: Any = Model()
    if arm == "ddp":
        model = DistributedDataParallel(model)
    elif arm == "fsdp2":
        for part in (*model.layers, *model.experts):
            fully_shard(part)
        fully_shard(model)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if arm.startswith("zero"):
        zero = {"stage": int(arm[-1]), "reduce_bucket_size": 1000, "stage3_param_persistence_threshold": 0}
        zero |= {"stage3_prefetch_bucket_size": 0, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
        config = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0, "zero_optimization": zero}
        model, optimizer, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    torch.manual_seed(rank)
    return Training(arm, rank, folder, model, optimizer)


# --- the ways ------------------------------------------------------------------------------------------------------


def expert_without_tokens(t: Training) -> None:
    for ids in t.rows():
        t.step(t.loss(ids % 16 if t.rank else ids))


def fewer_batches(t: Training) -> None:
    t.train(STEPS - t.rank)


def collective_in_branch(t: Training) -> None:
    for ids in t.rows():
        loss = t.loss(ids)
        t.step(loss)
        if t.rank == 0:  # only this rank logs the mean
            dist.all_reduce(loss.detach())


def test_on_rank_0(t: Training) -> None:
    t.train(2)
    if t.rank == 0:
        evaluate(t)
    t.train(2)


@torch.no_grad()
def evaluate(t: Training) -> None:
    t.model.eval()
    for ids in t.rows(2):
        t.model(ids)
    t.model.train()


def checkpoint_on_rank_0(t: Training) -> None:
    t.train(2)
    if t.rank == 0:
        if t.arm == "fsdp2":
            options = state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)
            torch.save(state_dict.get_model_state_dict(t.model, options=options), t.folder / "model.pt")
        elif t.arm == "ddp":
            torch.save(t.model.state_dict(), t.folder / "model.pt")
        else:
            t.model.save_checkpoint(str(t.folder))
    t.train(2)


def exception_on_rank_1(t: Training) -> None:
    for step, ids in enumerate(t.rows()):
        if t.rank and step == 2:
            raise ValueError("a bad row")
        t.step(t.loss(ids))


def batch_skipped(t: Training) -> None:
    for step, ids in enumerate(t.rows()):
        loss = t.loss(ids)
        if t.rank and step == 1:  # it was not finite
            continue
        t.step(loss)


def generation_of_unequal_lengths(t: Training) -> None:
    t.train(2)
    generate(t, tokens=2 if t.rank else 6)
    t.train(2)


@torch.no_grad()
def generate(t: Training, tokens: int) -> None:
    ids = next(t.rows(1))
    for _ in range(tokens):  # until this rank's rows have ended
        ids = torch.cat([ids, t.model(ids)[:, -1:].argmax(-1)], dim=1)


class Rows(torch.utils.data.Dataset):
    """Rows of which one never arrives, or ends the process that reads it."""

    def __init__(self, dies: bool, rank: int):
        self.dies = dies
        self.rank = rank

    def __len__(self) -> int:
        return STEPS * 4

    def __getitem__(self, row: int) -> torch.Tensor:
        if self.rank and row == 10:
            if self.dies:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(MOST_S)
        return torch.arange(8) + 16 * (row % 2)


def loader_stops(t: Training, dies: bool = False) -> None:
    for ids in torch.utils.data.DataLoader(Rows(dies, t.rank), 4, num_workers=1):
        t.step(t.loss(ids))


def loader_dies(t: Training) -> None:
    loader_stops(t, dies=True)


def gradient_on_rank_0(t: Training) -> None:
    for ids in t.rows():
        loss = t.loss(ids)
        is_zero = t.arm.startswith("zero")
        (t.model.backward if is_zero else torch.Tensor.backward)(loss)
        if t.rank == 0:  # only this rank logs the norm
            parameter = next(t.model.parameters())
            whole = safe_get_full_grad(parameter) if is_zero else parameter.grad
            whole = whole.full_tensor() if t.arm == "fsdp2" else whole
            whole.norm()
        (t.model if is_zero else t.optimizer).step()


def weights_on_rank_0(t: Training) -> None:
    t.train(2)
    if t.rank == 0:
        parameter = next(t.model.parameters())
        if t.arm == "zero3":
            with deepspeed.zero.GatheredParameters([parameter]):
                parameter.sum()
        (parameter.full_tensor() if t.arm == "fsdp2" else parameter).sum()
    t.train(2)


WAYS: dict[str, Callable[[Training], None]] = {
    function.__name__: function
    for function in (
        expert_without_tokens, fewer_batches, collective_in_branch, test_on_rank_0, checkpoint_on_rank_0,
        exception_on_rank_1, batch_skipped, generation_of_unequal_lengths, loader_stops, loader_dies,
        gradient_on_rank_0, weights_on_rank_0,
    )
}  # fmt: skip


# --- one cell ------------------------------------------------------------------------------------------------------


def rank_of(way: str, arm: str, rank: int, folder: Path) -> None:
    """Train as one rank, in a process of its own, and write how it ended."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    output = os.open(folder / f"output-{rank}.txt", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    where = dist.FileStore(str(folder / "store"), 2)
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=where, rank=rank, world_size=2, timeout=timeout)
    message = ""
    try:
        training = prepare(arm, rank, folder)
        with instrument.CollectiveLog(folder, rank, every_s=0.2, still_s=STILL_S):
            WAYS[way](training)
            (folder / f"left-{rank}").touch()
            others = [folder / f"{name}-{1 - rank}" for name in ("left", "ended")]
            while not any(path.exists() for path in others):
                time.sleep(0.1)
    except Exception as error:
        message = f"{type(error).__name__}: {' '.join(str(error).split())}"[:LONGEST]
    (folder / f"ended-{rank}").write_text(message)
    os._exit(1 if message else 0)


def cell(way: str, arm: str, folder: Path) -> dict:
    """Return what happens in one way under one arm."""
    begun_s = time.monotonic()
    pids = {}
    for rank in (0, 1):
        pids[rank] = os.fork()
        if pids[rank] == 0:
            rank_of(way, arm, rank, folder)
    waiting: list[RankLog] = []
    alive = set(pids)
    codes = {}
    while alive and time.monotonic() < begun_s + MOST_S:
        for rank in sorted(alive):
            ended, status = os.waitpid(pids[rank], os.WNOHANG)
            if ended:
                codes[rank] = os.waitstatus_to_exitcode(status)
                alive.remove(rank)
        with contextlib.suppress(Exception):  # a file that is being replaced
            logs = collectives.load(folder)
            if len(logs) == 2 and hangs(logs) and not any((log.place or "").startswith("ended") for log in logs):
                waiting = logs
        time.sleep(0.2)
    for rank in alive:
        os.kill(pids[rank], signal.SIGKILL)
        os.waitpid(pids[rank], 0)
    messages = {rank: _last_message(folder, rank, codes.get(rank)) for rank in pids}
    logs = [log.model_copy(update={"recent": log.recent[-KEPT:]}) for log in waiting]
    return {
        "way": way,
        "arm": arm,
        "outcome": _outcome([*messages.values()], still_alive=bool(alive)),
        "messages": messages,
        "logs": [log.model_dump(mode="json", exclude={"pid"}) for log in logs],
        "software": {name: hardware.versions().get(name) for name in ("torch", "deepspeed")},
    }


def _outcome(messages: list[str], still_alive: bool) -> str:
    if any(message.startswith(CRASHED) for message in messages):
        return "crashes"
    if still_alive or any("timed out" in message.lower() or "timeout" in message.lower() for message in messages):
        return "hangs"
    return "fails" if any(messages) else "trains"


def _last_message(folder: Path, rank: int, code: int | None) -> str:
    """Return the message with which a rank ended. It is empty if the rank trained to its end."""
    if code is None:
        return f"nothing in {MOST_S} s"
    path = folder / f"ended-{rank}"
    if path.exists():
        return WHERE.sub("", path.read_text())
    lines = (folder / f"output-{rank}.txt").read_text(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if "what():" in line or "Error" in line), "no message")
    name = signal.Signals(-code).name if code < 0 else code
    return f"{CRASHED} ({name}): {WHERE.sub('', ' '.join(last.split()))}"[:LONGEST]


def main(path: Path, chosen: list[str]) -> None:
    with path.open("a") as file:
        for way in chosen or WAYS:
            for arm in ARMS:
                with TemporaryDirectory() as folder:
                    row = cell(way, arm, Path(folder))
                file.write(json.dumps(row) + "\n")
                file.flush()
                sys.stdout.write(f"{json.dumps({name: row[name] for name in ('way', 'arm', 'outcome', 'messages')})}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
