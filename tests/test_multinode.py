"""A launch over several machines: what `accelerate launch` is told on each, and the one record of all."""

import dataclasses
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from conftest import ROOT

from study.errors import Stop
from study.extras.hosts import multinode
from study.extras.hosts.multinode import Place
from study.records import store
from study.records.schema import Hardware, Machine
from study.spec.arms import all_paths
from study.training import ending
from study.training import launch as machines

FIRST = Place(2, 0, 4, "10.7.0.1", 29511, "10.7.0.1", "eth7")
SECOND = dataclasses.replace(FIRST, rank=1, address="10.7.0.2", interface="ib0")


def as_accelerate_reads(arm: str, place: Place):
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    words = multinode.command(all_paths()[arm], place, "study/train.py", "--steps", "3")
    assert words[:3] == [sys.executable, "-m", "accelerate.commands.launch"]
    args, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(words[3:]))
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)  # as launch_command does
    return args


@pytest.mark.parametrize("arm", ["ddp", "zero2", "fsdp2"])
@pytest.mark.parametrize("place", [FIRST, SECOND])
def test_all_machines_meet_at_the_first_by_one_port(arm, place):
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    args = as_accelerate_reads(arm, place)
    if args.use_deepspeed:
        assert prepare_deepspeed_cmd_env(args)[0] is None  # no pdsh
    else:
        prepare_multi_gpu_env(args)
    assert (args.rdzv_backend, args.rdzv_endpoint) == ("c10d", "10.7.0.1:29511")
    assert (args.nnodes, args.nproc_per_node, args.node_rank) == ("2", "4", place.rank)
    assert ("is_host=true" in args.rdzv_conf) == (place.rank == 0)
    assert args.training_script_args == ["--steps", "3"]


def test_a_machine_is_named_by_the_address_that_leads_to_the_others(monkeypatch):
    for library in ("GLOO", "NCCL"):
        monkeypatch.delenv(f"{library}_SOCKET_IFNAME", raising=False)
    place = multinode.find_place(["127.0.0.1", "127.0.0.2"], 1, 2, 29500)
    cards = psutil.net_if_addrs()
    assert place.address in [entry.address for entry in cards[place.interface] if entry.family == socket.AF_INET]
    assert place.head == "127.0.0.1"
    assert multinode.environment(place) == {
        "PET_LOCAL_ADDR": place.address,
        "GLOO_SOCKET_IFNAME": place.interface,
        "NCCL_SOCKET_IFNAME": place.interface,
    }
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0,ib1")
    assert multinode.environment(place)["NCCL_SOCKET_IFNAME"] == "ib0,ib1"


def test_the_first_machine_names_the_address_that_the_second_sees(monkeypatch):
    """Its own name may mean 127.0.1.1 to itself, as Debian writes into /etc/hosts."""
    monkeypatch.setattr(multinode, "address_towards", {"10.7.0.2": "10.7.0.1"}.get)
    monkeypatch.setattr(multinode, "resolve", {"first": "127.0.1.1", "second": "10.7.0.2"}.get)
    assert multinode.find_place(["first", "second"], 0, 1, 29500).head == "10.7.0.1"


def test_each_machine_has_its_own_operators_and_disk(monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    operators, disk = multinode.own_folders("/local/$SLURMD_NODENAME")
    assert operators.startswith("/local/node7/torch-")
    assert disk == "/local/node7/nvme"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: multinode.find_place(["a", "b"], 2, 1, 29500), r"--machine-rank must be from 0 to 1 \(got 2\)"),
        (lambda: multinode.find_place(["a", "b"], 0, 0, 29500), "--processes must be at least 1"),
        (lambda: multinode.resolve("no-such-host.invalid"), "has no IPv4 address"),
        (lambda: multinode.own_folders("$NO_SUCH_VARIABLE/x"), "is not an absolute path"),
        (lambda: multinode.command(all_paths()["single"], FIRST, "study/train.py"), "single is an arm for one process"),
    ],
)
def test_what_cannot_be_launched_is_one_sentence(call, words, monkeypatch):
    monkeypatch.setattr(multinode, "RESOLVES_WITHIN_S", 0)
    with pytest.raises(Stop, match=words):
        call()


# --- one record of all machines ---------------------------------------------------------------------------------------


def seen(number: int, torch: str = "2.13.0", cores: int = 8) -> tuple:
    return number, Machine(hardware=Hardware(cores=cores)), {"torch": torch, "numpy": None}


def test_machines_are_told_apart_by_number_and_hold_their_ranks():
    two = machines.merge_machines([seen(0), seen(1, cores=16), seen(0), seen(1, cores=16)])
    assert [(machine.ranks, machine.hardware.cores) for machine in two] == [([0, 2], 8), ([1, 3], 16)]


def test_machines_with_different_versions_do_not_train_together():
    with pytest.raises(Stop, match=r"different versions of torch \(2.13.0 and 2.12.1\)"):
        machines.merge_machines([seen(0), seen(1, torch="2.12.1")])


@pytest.fixture
def meeting(monkeypatch):
    """The store through which torchrun brings machines together, seen from a rank of a group of two machines."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"GROUP_WORLD_SIZE": 2, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": 1, "MASTER_ADDR": "127.0.0.1"}
    for name, value in (env | {"MASTER_PORT": store.port}).items():
        monkeypatch.setenv(name, str(value))
    return store


def failed(folder, rank: int, error: BaseException) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    try:
        ending.fail(folder, rank, error)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_a_failure_on_a_machine_without_the_run_folder_is_in_the_record(meeting, tmp_path, capsys):
    """The first rank only sees that the connection broke, or a SIGTERM from Slurm."""
    folder = tmp_path / "run"
    folder.mkdir()
    store.write(folder, store.new("run", []))
    failed(tmp_path / "not shared", 1, Stop("its disk is full", "make room", "failed"))
    assert "failed: its disk is full. What to do: make room." in capsys.readouterr().out
    failed(folder, 0, KeyboardInterrupt("SIGTERM"))
    record = store.load(folder)
    assert (record.status, record.error.message) == ("failed", "its disk is full")
    assert record.error.where == "rank 1 on machine 1"


@pytest.mark.slow
def test_two_machines_without_a_common_folder_leave_one_record_with_the_failure_of_the_second(tmp_path, cache):
    """Real launches. The second machine has no data; the first waits for it, and only sees that it is gone."""
    flags = [
        "--cache-dir",
        str(cache),
        *["--steps", "3", "--warmup-steps", "1", "--train-rows", "64", "--eval-rows", "16"],
    ]
    children = []
    for rank, host in enumerate(("first", "second")):
        words = [sys.executable, "-m", "study.extras.hosts.multinode", "--hosts", "127.0.0.1,127.0.0.2"]
        words += ["--processes", "1"]
        words += ["--machine-rank", str(rank), "--port", str(29700 + os.getpid() % 200)]
        words += [str(all_paths()["ddp"]), "study/train.py", "--run-dir", str(tmp_path / host / "run"), *flags]
        words += ["--data", str(tmp_path / "gone")] if rank else []
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        children.append(subprocess.Popen(words, cwd=ROOT, **streams))
    outputs = [child.communicate(timeout=200)[0] for child in children]
    assert all(child.returncode for child in children), outputs
    (folder,) = tmp_path.glob("*/run")
    record = store.load(folder)
    assert (folder.parent.name, record.status) == ("first", "failed")
    assert "gone" in record.error.message
    assert record.error.where == "rank 1 on machine 1"


# --- the page of instructions -----------------------------------------------------------------------------------------


def test_the_ssh_commands_start_each_machine_with_its_number(tmp_path):
    """The shell of the page, in which ssh tells what it is to run."""
    script = re.search(r"\n## ssh\n.*?```bash\n(.*?)```", (ROOT / "CLUSTERS.md").read_text(), re.DOTALL)[1]
    (tmp_path / "hosts.txt").write_text("10.7.0.1\n10.7.0.2\n")
    told = subprocess.run(["bash", "-e", "-c", 'ssh() { echo "$@"; }\n' + script], cwd=tmp_path, capture_output=True)
    for line in told.stdout.decode().splitlines():
        words = shlex.split(line.partition(".multinode ")[2])
        given = multinode.arguments(words)
        assert line.startswith(given.hosts.split(",")[given.machine_rank]), "each host gets its own number"
        assert (given.config, given.words[0]) == (Path("accelerate_configs/zero3.yaml"), "study/train.py")
    assert told.stdout.count(b"10.7.0.1,10.7.0.2") == 2
