"""A training over several machines: Accelerate's own options, the example for Slurm, and the one record of all."""

import os
import subprocess
from pathlib import Path

import pytest
import slurm_cluster
from conftest import ROOT

from study.core.arms import all_paths, launcher
from study.core.errors import Stop
from study.records import store
from study.records.schema import Record
from study.records.sections import Hardware, Machine
from study.training import launch as machines

SMALL = ["--steps", "3", "--warmup-steps", "1", "--train-rows", "64", "--eval-rows", "16", "--sequence", "32"]
SMALL += ["--data", "embedded", "--init", "random"]
# Names of this machine may lead nowhere, and both machines are this one.
LOOPBACK = {"PET_LOCAL_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
ENDS_WITHIN_S = 240


def of_two_machines(folder: Path) -> Record:
    record = store.load(folder)
    assert (record.status, record.observed.ranks, record.observed.ranks_counted) == ("done", 2, 2)
    assert [machine.ranks for machine in record.machines] == [[0], [1]]
    assert len(record.memory.per_rank) == len(record.traffic.per_rank) == 2
    return record


def test_two_machines_of_one_rank_each_leave_one_record(tmp_path, cache):
    """Over the loopback, with the options of the guide."""
    folder, port = tmp_path / "run", str(slurm_cluster.free_ports(1)[0])
    children = []
    for rank in range(2):
        words = [*launcher(all_paths()["zero2"]), "--num_machines", "2", "--machine_rank", str(rank)]
        words += ["--num_processes", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", port]
        words += ["--rdzv_backend", "c10d", "--rdzv_conf", f"is_host={str(rank == 0).lower()}"]
        words += ["--deepspeed_multinode_launcher", "standard"]
        words += ["study/train.py", "--run-dir", str(folder), "--cache-dir", str(cache), *SMALL]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        children.append(subprocess.Popen(words, cwd=ROOT, env=os.environ | LOOPBACK, **streams))
    try:
        outputs = [child.communicate(timeout=ENDS_WITHIN_S)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0, 0], outputs
    assert of_two_machines(folder).observed.stage == 2


def test_the_example_trains_on_two_nodes_of_a_real_slurm(tmp_path, cache):
    if reason := slurm_cluster.why_not():
        pytest.skip(reason)
    folder, output = tmp_path / "run", tmp_path / "output.txt"
    here = LOOPBACK | {"MAIN_IP": "127.0.0.1", "MAIN_PORT": str(slurm_cluster.free_ports(1)[0]), "RANKS_PER_NODE": "1"}
    with slurm_cluster.running(tmp_path / "slurm") as env:
        words = ["sbatch", "--wait", "--time=20", f"--output={output}", "examples/slurm.sh", "ddp"]
        words += ["--run-dir", str(folder), "--cache-dir", str(cache), *SMALL]
        done = subprocess.run(words, cwd=ROOT, env=env | here, capture_output=True, text=True, timeout=ENDS_WITHIN_S)
        assert done.returncode == 0, done.stdout + done.stderr + output.read_text()
    of_two_machines(folder)


def seen(number: int, torch: str = "2.13.0", cores: int = 8) -> tuple:
    return number, Machine(hardware=Hardware(cores=cores)), {"torch": torch, "numpy": None}


def test_machines_are_told_apart_by_number_and_hold_their_ranks():
    two = machines.merge_machines([seen(0), seen(1, cores=16), seen(0), seen(1, cores=16)])
    assert [(machine.ranks, machine.hardware.cores) for machine in two] == [([0, 2], 8), ([1, 3], 16)]


def test_machines_with_different_versions_do_not_train_together():
    with pytest.raises(Stop, match=r"different versions of torch \(2.13.0 and 2.12.1\)"):
        machines.merge_machines([seen(0), seen(1, torch="2.12.1")])
