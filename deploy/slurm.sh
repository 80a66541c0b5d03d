#!/usr/bin/env bash
# A plan of runs as a Slurm array: every task makes its share of the runs.
#
#   sbatch --array=1-8 deploy/slurm.sh plan.toml runs/plan
#
# `fedproj run` reads the array's variables. A task that is requeued resumes its runs; finished ones are skipped. Submit the
# same command again after a failure. All nodes must see the same directory: `fedproj status plan.toml --out runs/plan`.
#SBATCH --job-name=fedproj
#SBATCH --cpus-per-task=8
#SBATCH --mem=16G
#SBATCH --time=04:00:00
#SBATCH --requeue
# The run ends between two rounds on this signal, and is resumed later.
#SBATCH --signal=B:TERM@120
##SBATCH --gres=gpu:1
set -euo pipefail
plan=$1 out=$2
exec "${FEDPROJ:-fedproj}" run "$plan" --out "$out" --threads "${SLURM_CPUS_PER_TASK:-1}"
