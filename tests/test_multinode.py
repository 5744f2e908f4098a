"""A launch over several machines: what `accelerate launch` is told on each, read back by Accelerate's own functions."""

import dataclasses
import socket
import sys

import psutil
import pytest

from study.errors import Stop
from study.machine import multinode
from study.machine.multinode import Place
from study.spec.arms import all_paths

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


def test_without_the_words_accelerate_takes_pdsh_and_another_port_on_each_machine():
    """What the options are for: with Accelerate's defaults, two machines of an arm never meet."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    ports = set()
    for rank in "01":
        words = ["--config_file", str(all_paths()["zero2"]), "--num_machines", "2", "--machine_rank", rank]
        words += ["--main_process_ip", "10.7.0.1", "--num_processes", "4", "study/train.py"]
        args = _validate_launch_command(launch_command_parser().parse_args(words))[0]
        args.deepspeed_fields_from_accelerate_config = ""
        assert "pdsh" in prepare_deepspeed_cmd_env(args)[0]
        ports.add(args.main_process_port)
    assert len(ports) == 2


def test_one_machine_is_launched_as_ever():
    place = multinode.find_place(["node7"], 0, 3, 29500)
    assert multinode.options(place) == ["--num_processes", "3"]
    assert multinode.environment(place) == {}
    assert as_accelerate_reads("zero2", place).main_process_port == 0  # any free port


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


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: multinode.find_place(["a", "b"], 2, 1, 29500), "machine 2 of 2"),
        (lambda: multinode.find_place(["a", "b"], 0, 0, 29500), "--processes must be at least 1"),
        (lambda: multinode.resolve("no-such-host.invalid"), "has no IPv4 address"),
        (lambda: multinode.command(all_paths()["single"], FIRST, "study/train.py"), "single is one process"),
    ],
)
def test_what_cannot_be_launched_is_one_sentence(call, words, monkeypatch):
    monkeypatch.setattr(multinode, "RESOLVES_WITHIN_S", 0)
    with pytest.raises(Stop, match=words):
        call()
