"""A training over several machines: the example for Slurm, and the one record of all."""

import os
import subprocess
import types

import pytest

from study.core.errors import Stop
from study.core.machine import free_port
from study.records import store
from study.training import setup
from tests.conftest import ROOT

# In place of Slurm's: two nodes, which are this machine, run the same command, and each knows its number.
SRUN = """#!/bin/bash
shift
for node in 0 1; do SLURM_NODEID=$node "$@" & done
wait -n && wait -n
"""
FLAGS = ["--steps", "3", "--warmup-steps", "1", "--train-rows", "64", "--eval-rows", "16", "--sequence", "32"]
FLAGS += ["--data", "embedded", "--init", "random"]


def test_the_example_leaves_one_record_of_two_machines(tmp_path, cache):
    """Over the loopback, where names of this machine may lead nowhere."""
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    job = {"SLURM_SUBMIT_DIR": ROOT, "SLURM_JOB_ID": 1, "SLURM_NNODES": 2, "RANKS_PER_NODE": 1}
    job |= {"MAIN_IP": "127.0.0.1", "MAIN_PORT": free_port(), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    job |= {"PET_LOCAL_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    words = [
        "timeout",
        "240",
        "bash",
        "examples/slurm.sh",
        "zero2",
        "--run-dir",
        tmp_path / "run",
        "--cache-dir",
        cache,
    ]
    env = os.environ | {name: str(value) for name, value in job.items()}
    done = subprocess.run([*words, *FLAGS], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    record = store.load(tmp_path / "run")
    assert (record.status, record.observed.stage) == ("done", 2)
    assert (record.observed.ranks, record.observed.ranks_counted) == (2, 2)
    assert [machine.ranks for machine in record.machines] == [[0], [1]]
    assert len(record.memory.per_rank) == len(record.traffic.per_rank) == 2


def test_machines_with_different_versions_do_not_train_together(monkeypatch):
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")

    def gathered(mine):
        number, described, versions = mine
        return [mine, (number + 1, described, versions | {"torch": "2.0.0"})]

    with pytest.raises(Stop, match="different versions of torch"):
        setup.describe_machines(types.SimpleNamespace(gathered=gathered))
