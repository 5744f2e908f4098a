#!/bin/bash
#SBATCH --job-name=zero-study-eight
#SBATCH --nodes=1
#SBATCH --exclusive
#SBATCH --gres=gpu:8
#SBATCH --time=01:15:00
#SBATCH --requeue
#SBATCH --signal=B:TERM@90
# One hour on the GPUs of a node. From the checkout: sbatch --partition=YOURS examples/slurm_eight.sh
# What it costs, your cluster says. A job that is preempted is queued again, and goes on: the records are in the checkout.
# The cell that runs gets SIGTERM 90 s before the end, and has a record.
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
trap 'kill -TERM "$hour"' TERM
bash examples/eight.sh & hour=$!
wait "$hour" || wait "$hour"  # the first wait ends with the signal
