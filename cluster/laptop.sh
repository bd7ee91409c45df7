#!/usr/bin/env bash
# A Ray cluster on this machine alone: a head and two workers, each with a third of the cores.
#
#   eval "$(cluster/laptop.sh start)"    # and this shell knows the cluster
#   eval "$(cluster/laptop.sh stop)"     # ends what start began, and nothing else
#
# FEDSIM_CLUSTER is the folder of its logs and sockets; another one makes a second cluster.
set -euo pipefail

folder=${FEDSIM_CLUSTER:-/tmp/fedsim-$(id -u)}

free_port() {
    python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'
}

# A process id may have been given to another process since, as after a reboot. (-ww: whole lines,
# however narrow the terminal.)
is_ours() {
    [[ $(ps -ww -o args= -p "$1") == *"ray start"*"--temp-dir=$folder/"* ]]
}

ours() {
    local pid
    if [[ -f $folder/pids ]]; then
        while read -r pid; do
            if is_ours "$pid"; then echo "$pid"; fi
        done <"$folder/pids"
    fi
}

# Our nodes and all processes that came from them, a line each: its id and when it started.
family() {
    ps -A -o pid= -o ppid= -o lstart= | awk -v nodes="$(ours | tr '\n' ' ')" '
        { pid = $1; parent[pid] = $2; $1 = $2 = ""; started[pid] = $0 }
        END {
            count = split(nodes, node)
            for (i = 1; i <= count; i++) found[node[i]]
            do {
                grown = 0
                for (pid in parent)
                    if (parent[pid] in found && !(pid in found)) { found[pid]; grown = 1 }
            } while (grown)
            for (pid in found) print pid started[pid]
        }'
}

stop() {
    [[ -f $folder/pids ]] || return 0 # it is not a cluster's
    local pid all now
    all=$(family)
    for pid in $(ours); do kill "$pid"; done
    for _ in {1..150}; do
        [[ -n $(ours) ]] || break
        sleep 0.2
    done
    # What Ray started ends with its parent, except for a worker that is starting itself.
    now=$(ps -A -o pid= -o lstart= | awk '{ pid = $1; $1 = ""; print pid " " $0 }')
    comm -12 <(sort <<<"$all") <(sort <<<"$now") | while read -r pid _; do
        kill -KILL "$pid" 2>/dev/null || true
    done
    rm -rf "$folder"
}

# launch NAME OPTIONS...: start a node in the background; its process is $!.
launch() {
    : >"$folder/$1.log" # there before it is looked into
    nohup ray start --block --temp-dir="$folder/$1" --num-cpus="$cpus" \
        --object-store-memory=2000000000 --dashboard-agent-listen-port=0 \
        --min-worker-port=0 --max-worker-port=0 "${@:2}" >"$folder/$1.log" 2>&1 </dev/null &
    echo $! >>"$folder/pids"
}

# up NAME PROCESS: wait until a node is up. Ray itself gives up after a while.
up() {
    until grep -q "Ray runtime started" "$folder/$1.log"; do
        kill -0 "$2" 2>/dev/null || failed "$1"
        sleep 0.2
    done
}

failed() {
    tail -n 20 "$folder/$1.log" >&2
    echo "error: the cluster's $1 did not start; the lines above say why" >&2
    stop
    exit 1
}

start() {
    if ! command -v ray >/dev/null; then
        echo "error: no ray on the path; activate the environment that fedsim is in" >&2
        exit 2
    fi
    if [[ -n $(ours) ]]; then
        echo "error: it is running already ($folder); to end it: cluster/laptop.sh stop" >&2
        exit 2
    fi
    stop # what a cluster that is gone has left
    if ! mkdir -m 700 "$folder"; then
        echo "error: set FEDSIM_CLUSTER to a folder that can be made" >&2
        exit 2
    fi
    : >"$folder/pids"

    # Who has no token is not let in: a Ray cluster runs whatever it is sent.
    export RAY_AUTH_MODE=token
    ray get-auth-token --generate >/dev/null
    export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0 # end at once, whatever is still running
    cpus=$(($(getconf _NPROCESSORS_ONLN) / 3))
    if ((cpus < 1)); then cpus=1; fi

    launch head --num-gpus=0 --head --port=0 --ray-client-server-port="$(free_port)" \
        --include-dashboard=true --dashboard-port="$(free_port)" --disable-usage-stats
    up head $!
    local address first second
    address=$(<"$folder/head/ray_current_cluster")
    # Each node would count the machine's GPUs as its own: the first worker has them.
    launch worker-1 --address="$address"
    first=$!
    launch worker-2 --address="$address" --num-gpus=0
    second=$!
    up worker-1 "$first"
    up worker-2 "$second"

    local dashboard
    dashboard=$(sed -n "s/.*RAY_API_SERVER_ADDRESS='\([^']*\)'.*/\1/p" "$folder/head.log")
    echo "three nodes are up; dashboard at $dashboard, logs in $folder" >&2
    echo "export RAY_AUTH_MODE=token RAY_ADDRESS=$address RAY_API_SERVER_ADDRESS=$dashboard"
}

case ${1:-} in
start)
    trap '(($? == 0)) || echo false' EXIT # so that the shell's eval fails, too
    start
    ;;
stop)
    stop
    echo "unset RAY_ADDRESS RAY_API_SERVER_ADDRESS"
    ;;
*)
    echo "usage: cluster/laptop.sh start|stop" >&2
    exit 2
    ;;
esac
