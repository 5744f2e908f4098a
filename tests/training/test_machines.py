"""A training over several machines: the example for Slurm, the one record of all, and the launcher that it starts."""

import os
import subprocess
import types

import pytest

from study.core.errors import Stop
from study.core.machine import free_port
from study.records import store
from study.training import setup
from tests.conftest import ROOT, STEPS, TRAINED, left_running

# In place of Slurm's: two nodes, which are this machine, run the same command, and each knows its number.
SRUN = """#!/bin/bash
shift
for node in 0 1; do SLURM_NODEID=$node "$@" & done
wait -n && wait -n
"""
OF_A_CPU = ("--data", "embedded", "--init", "random")  # also where a GPU is


@pytest.mark.slow
def test_the_example_leaves_one_record_of_two_machines_equal_to_that_of_a_forked_launch(trained, tmp_path, cache):
    """Two real launchers, over the loopback, where names of this machine may lead nowhere.

    All other trainings of these tests have forked ranks.
    """
    trained("ddp", *TRAINED)  # draws the weights, unless another test did: a rank that draws them keeps 16 bytes more
    forked = trained("zero2", *TRAINED).record
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    job = {"SLURM_SUBMIT_DIR": ROOT, "SLURM_JOB_ID": 1, "SLURM_NNODES": 2, "RANKS_PER_NODE": 1}
    job |= {"MAIN_IP": "127.0.0.1", "MAIN_PORT": free_port(), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    job |= {"PET_LOCAL_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    words = ["timeout", "240", "bash", "examples/slurm.sh", "zero2"]
    flags = ["--run-dir", tmp_path / "run", "--cache-dir", cache, *TRAINED, *OF_A_CPU]
    env = os.environ | {name: str(value) for name, value in job.items()}
    done = subprocess.run([*words, *flags], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    real = store.load(tmp_path / "run")
    assert [machine.ranks for machine in real.machines] == [[0], [1]]
    assert left_running(tmp_path / "run") == []
    assert forked.status == real.status == "done"
    real.requested.run_dir = forked.requested.run_dir
    assert (forked.requested, forked.observed, forked.loss) == (real.requested, real.observed, real.loss)
    assert len(forked.loss.train) == STEPS
    assert forked.traffic.per_rank == real.traffic.per_rank
    assert forked.memory.components == real.memory.components


def test_machines_with_different_versions_do_not_train_together(monkeypatch):
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")

    def gathered(mine):
        number, described, versions = mine
        return [mine, (number + 1, described, versions | {"torch": "2.0.0"})]

    with pytest.raises(Stop, match="different versions of torch"):
        setup.describe_machines(types.SimpleNamespace(gathered=gathered))
