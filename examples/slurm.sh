#!/usr/bin/env bash
#SBATCH --job-name=gac
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1        # one torchrun per node, which starts one process per GPU
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue                  # after a preemption or the failure of a node, start again
#SBATCH --open-mode=append         # and continue the log
#SBATCH --signal=B:USR1@300        # five minutes before the time limit, see `trap`

# Trains on several nodes until the last step, over as many time limits as that takes:
#   sbatch examples/slurm.sh examples/gsm8k_fsdp.yaml --set model.path=Qwen/Qwen2.5-7B-Instruct
# `out` must be on a file system that all nodes share. A job that starts again runs the same command,
# which resumes from the newest checkpoint; a run that is over says so and ends.
# Tested: its syntax, and the command that it builds; not on a cluster.
set -euo pipefail

# Requeueing ends the processes with SIGTERM, upon which gac saves a checkpoint. SLURM kills what is
# left after KillWait (30 s by default), so set checkpoint_every to lose little if saving takes longer.
trap 'scontrol requeue "$SLURM_JOB_ID"' USR1

hosts=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
srun --kill-on-bad-exit=1 torchrun \
  --nnodes="$SLURM_NNODES" \
  --nproc-per-node="${SLURM_GPUS_ON_NODE:-gpu}" \
  --rdzv-backend=c10d --rdzv-endpoint="${hosts[0]}:29500" --rdzv-id="$SLURM_JOB_ID" \
  --max-restarts=3 \
  -m gac.cli train "$@" &
wait $!    # in the background, so that the trap runs at once
