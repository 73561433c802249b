#!/bin/bash
# A training job for Slurm: one torchrun on each node, saved and requeued before its time is over.
#
#   sbatch --nodes=2 scripts/slurm_train.sh config/full_qwen3_1.8b_b200_optimal.py --out_dir=out-qwen3
#
# Submitted from the folder that holds train.py, which all nodes must see, as they must see out_dir. The arguments are
# train.py's; --init_from=auto is added, so that each start goes on from the newest checkpoint. 300 s before the time
# limit Slurm sends SIGUSR1 to this script, which hands it on: all ranks save and end, and the job is queued again. A
# run that fails is not. docs/checkpoints.md has the rest.
#
#SBATCH --job-name=nanomfu
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log

set -uo pipefail

PYTHON=${PYTHON:-python}
GPUS_PER_NODE=${GPUS_PER_NODE:-gpu} # 'gpu': as many processes as torch sees GPUs
MAX_REQUEUES=${MAX_REQUEUES:-1000}
# torchrun kills its processes this long after a signal; older ones (torch 2.11) always after 30 s
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-270}

if [ $# -eq 0 ]; then
    echo "usage: sbatch [--nodes=N] scripts/slurm_train.sh config/FILE.py [--key=value ...]" >&2
    exit 2
fi
case " $* " in
*" --init_from="*) ;;
*) set -- "$@" --init_from=auto ;;
esac

first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))
echo "job $SLURM_JOB_ID, requeued ${SLURM_RESTART_COUNT:-0} times, $SLURM_JOB_NUM_NODES nodes, first $first_node:$port"

stopping=
# scancel signals the processes of the job's steps, not this script
trap 'echo "SIGUSR1: every rank is asked to save and end"; stopping=1; scancel --signal=USR1 "$SLURM_JOB_ID"' USR1

# --signals-to-handle: without it SIGUSR1 ends torchrun at once
srun --kill-on-bad-exit=1 "$PYTHON" -m torch.distributed.run \
    --nnodes="$SLURM_JOB_NUM_NODES" --nproc_per_node="$GPUS_PER_NODE" \
    --rdzv_id="$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" --rdzv_backend=c10d --rdzv_endpoint="$first_node:$port" \
    --signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    train.py "$@" &
srun_pid=$!

interrupted=$((128 + $(kill -l USR1))) # what wait gives when the trap has run
status=$interrupted
while [ "$status" -eq "$interrupted" ]; do
    wait "$srun_pid"
    status=$?
done

echo "training ended with status $status"
if [ -n "$stopping" ] && [ "$status" -ne 0 ]; then
    if [ "${SLURM_RESTART_COUNT:-0}" -ge "$MAX_REQUEUES" ]; then
        echo "not requeued: MAX_REQUEUES=$MAX_REQUEUES" >&2
        exit "$status"
    fi
    scontrol requeue "$SLURM_JOB_ID"
    exit
fi
exit "$status"
