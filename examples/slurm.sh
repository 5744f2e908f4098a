#!/bin/bash
#SBATCH --job-name=zero-study
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=01:00:00
#SBATCH --no-requeue
# One training over all nodes of a job: a launcher on each node, started by srun. From the checkout, which all nodes see:
#   sbatch --gres=gpu:8 --cpus-per-task=32 examples/slurm.sh zero3 --run-dir runs/first
# The first word is an arm; the others are flags of study/train.py. RANKS_PER_NODE: without a GPU, or to use fewer.
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
export arm="${1:-zero3}"
shift || true

export per_node="${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}"
MAIN_IP="${MAIN_IP:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}"
export MAIN_IP MAIN_PORT="${MAIN_PORT:-$((20000 + SLURM_JOB_ID % 10000))}"

# SLURM_NODEID is known only on the node, so a shell there fills it in. torchrun compares names of hosts to find who
# hosts the meeting, and names may mean 127.0.1.1: is_host says it instead.
srun --kill-on-bad-exit=1 bash -c '
  is_host=$([ "$SLURM_NODEID" = 0 ] && echo true || echo false)
  exec accelerate launch --config_file "accelerate_configs/$arm.yaml" \
    --num_machines "$SLURM_NNODES" --machine_rank "$SLURM_NODEID" --num_processes $((SLURM_NNODES * per_node)) \
    --main_process_ip "$MAIN_IP" --main_process_port "$MAIN_PORT" \
    --rdzv_backend c10d --rdzv_conf "is_host=$is_host,join_timeout=600" --deepspeed_multinode_launcher standard \
    study/train.py "$@"' launch "$@"
