#!/usr/bin/env bash
# fedsim on the nodes of a Slurm job. What follows the script's name is given to fedsim:
#
#   source .venv/bin/activate            # on a file system that all nodes see, like runs/ and data
#   sbatch cluster/slurm.sh run experiments/quickstart.yaml
#
# Ends with fedsim's own exit code. A job that ran out of time goes on with
# `sbatch cluster/slurm.sh resume runs/<name>/<id>`.
#
#SBATCH --job-name=fedsim
#SBATCH --output=fedsim-%j.log
#SBATCH --time=04:00:00
#SBATCH --nodes=3
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=32G
##SBATCH --gpus-per-node=1
# The loss of a node costs time, not the run:
#SBATCH --no-kill
set -euo pipefail

if ! command -v fedsim >/dev/null; then
    echo "error: no fedsim on the path; activate its environment before sbatch" >&2
    exit 2
fi

folder=/tmp/fedsim-job-$SLURM_JOB_ID # on each node
others=$((SLURM_JOB_NUM_NODES - 1))
nodes=() # process ids

# Who has no token is not let in: a Ray cluster runs whatever it is sent. srun passes it on.
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
RAY_AUTH_TOKEN=$(ray get-auth-token --generate)
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0 # end at once, whatever is still running

# Other jobs may be on the same nodes: no fixed ports, and no more than this job's share.
node=(ray start --block --num-cpus="$SLURM_CPUS_PER_TASK" --dashboard-agent-listen-port=0
    --min-worker-port=0 --max-worker-port=0)
if [[ -n ${SLURM_MEM_PER_NODE:-} ]]; then # in MiB
    node+=(--memory=$((SLURM_MEM_PER_NODE * 700000)))
    node+=(--object-store-memory=$((SLURM_MEM_PER_NODE * 300000)))
fi

on_the_others=(srun --nodes="$others" --ntasks="$others" --ntasks-per-node=1
    --cpus-per-task="$SLURM_CPUS_PER_TASK" --exclude="$SLURMD_NODENAME" --no-kill)

check() { # that what was started last still runs
    if ! kill -0 "${nodes[-1]}" 2>/dev/null; then
        echo "error: $1 did not start; the lines above say why" >&2
        exit 1
    fi
}

stop() {
    kill "${nodes[@]}" 2>/dev/null || true
    wait
    rm -rf "$folder"
    if ((others)); then "${on_the_others[@]}" rm -rf "$folder"; fi
}
trap stop EXIT

mkdir -m 700 "$folder"
port=$(python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
"${node[@]}" --head --port=0 --ray-client-server-port="$port" --include-dashboard=false \
    --disable-usage-stats --temp-dir="$folder/head" &
nodes+=($!)
until [[ -s $folder/head/ray_current_cluster ]]; do
    check "the head"
    sleep 1
done
RAY_ADDRESS=$(<"$folder/head/ray_current_cluster")
export RAY_ADDRESS

if ((others)); then
    "${on_the_others[@]}" "${node[@]}" --address="$RAY_ADDRESS" --temp-dir="$folder/worker" &
    nodes+=($!)
fi
# fedsim plans on the nodes that are there: wait for all.
while true; do
    fedsim doctor | tee "$folder/doctor"
    if grep -q ": $SLURM_JOB_NUM_NODES node(s)" "$folder/doctor"; then break; fi
    check "a worker"
    if ((SECONDS > 900)); then
        echo "slurm.sh: not all $SLURM_JOB_NUM_NODES nodes came within a quarter of an hour" >&2
        exit 1
    fi
    sleep 1
done

fedsim "$@"
