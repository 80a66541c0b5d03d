#!/usr/bin/env bash
# A plan of runs with GNU parallel, on this machine or on those of --sshlogin.
#
#   deploy/parallel.sh 4 plan.toml runs/plan [arguments of parallel, such as --sshlogin host1,host2]
#
# The machines must see the same directory. --halt ends all shards when one fails; start it again to resume.
set -euo pipefail
n=$1 plan=$2 out=$3
shift 3
seq "$n" | parallel --will-cite --jobs "$n" --halt soon,fail=1 "$@" \
    "${FEDPROJ:-fedproj}" run "$plan" --out "$out" --threads "${THREADS:-1}" --quiet --shard "{}/$n"
exec "${FEDPROJ:-fedproj}" status "$plan" --out "$out"
