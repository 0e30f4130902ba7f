#!/bin/bash
#SBATCH --job-name=rowhaul
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=32G
#SBATCH --time=08:00:00
#SBATCH --signal=TERM@300
# Two workers and a store, one rank a node: sbatch deploy/slurm.sh DATA RUN [options of rowhaul train]
# DATA and RUN are folders that all nodes see. SLURM sends SIGTERM five minutes before the time is up: the run saves, and
# `sbatch deploy/slurm.sh DATA RUN --resume` continues it.
set -euo pipefail
data=$1 run=$2
shift 2
master=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export ROWHAUL_SECRET OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=300 # of torchrun, which would kill its rank after 30 seconds
ROWHAUL_SECRET=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n') # srun hands it to every rank
exec srun --kill-on-bad-exit=0 bash -c 'exec torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 1 \
    --node-rank "$SLURM_NODEID" --master-addr "$0" --master-port 29500 \
    -m rowhaul train --data "$1" --out "$2" --stores 1 "${@:3}"' "$master" "$data" "$run" "$@"
