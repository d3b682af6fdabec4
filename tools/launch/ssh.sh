#!/bin/bash
# Plain ssh, several hosts: one torchrun on each. Ctrl-C saves a checkpoint and ends, a second Ctrl-C only ends.
#
#   fsdp2kit launch ssh toml/x.toml --nodes 4 --gpus-per-node 8 --out x.sh    # writes this file, filled in
#   bash x.sh    # in a directory that all hosts share; ssh must not ask for a password; the same command resumes

# ---- edit 1 of 2: the hosts, of which the first is where ranks meet, and the ranks of a host ----
hosts=(host1 host2 host3 host4)
ranks_per_node=8
# Elastic: nnodes=2:4 goes on with two or three hosts when others are lost, if the run's batch divides by them.
nnodes=${#hosts[@]}

# ---- edit 2 of 2: what runs, and what a host needs for it ----
setup=true # or: setup='source .venv/bin/activate; export NCCL_SOCKET_IFNAME=…'    (docs/clusters.md)
run=(toml/x.toml)

# ---- nothing to edit below ----
set -u
torchrun=(torchrun --nnodes "$nnodes" --nproc-per-node "$ranks_per_node" --max-restarts 1 --rdzv-backend c10d
  --rdzv-id "$$" --rdzv-endpoint "${hosts[0]}:29500" -m fsdp2kit.run "${run[@]}")
# torchrun ignores USR1, which would end it and kill the ranks after 30 seconds; the ranks handle it.
printf -v start 'cd %q && %s && trap "" USR1 && exec %s' "$PWD" "$setup" "$(printf '%q ' "${torchrun[@]}")"

# shellcheck disable=SC2317,SC2329 # the trap calls it
signal() { # to torchrun and the ranks on every host
  for host in "${hosts[@]}"; do
    ssh -n "$host" "pkill -$1 -f '[f]sdp2kit.run ${run[0]//[^[:alnum:]]/.}'"
  done
}

trap '' USR1 # if this machine is one of the hosts
trap 'trap "signal TERM" INT; signal USR1' INT
started=()
for host in "${hosts[@]}"; do
  ssh -n "$host" "$start" &
  started+=($!)
done

code=0
for process in "${started[@]}"; do
  while kill -0 "$process" 2>/dev/null; do
    wait "$process" # returns early at Ctrl-C
  done
  wait "$process" || code=$?
done
exit "$code"
