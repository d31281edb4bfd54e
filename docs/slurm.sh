#!/bin/bash
# One process for each node of a SLURM cluster: sbatch docs/slurm.sh
# Edit the numbers, the mesh (nodes x GPUs of a node devices in all) and the paths.
#SBATCH --job-name=jpipe
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log

set -euo pipefail
source "$HOME/venv/bin/activate" # with jpipe[cuda12] installed, the same on every node

# JAX finds the other processes from what SLURM says of the job. --out must be on a shared disk.
srun --kill-on-bad-exit=1 python -m jpipe.train \
    --distributed \
    --platform gpu \
    --mesh 8x2 \
    --layers 48 --width 2048 --heads 16 --context 2048 \
    --batch-size 256 --microbatches 32 --recompute stage \
    --data "$SCRATCH/tokens.npy" --vocab-size 50304 \
    --out "$SCRATCH/runs/$SLURM_JOB_ID"
