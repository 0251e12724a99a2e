#!/usr/bin/env bash
# Record the three runs of docs/tutorial.md again: before, after, fixed; about four minutes each on two cores.
#
#     examples/tutorial/record.sh DIR [VERSION ...]
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
output=$(mkdir -p "${1:?usage: record.sh DIR [VERSION ...]}" && cd "$1" && pwd)
shift
[ $# -gt 0 ] || set -- before after fixed

for version in "$@"; do
    cd "$here/$version"
    verl-profiler rehearse --engine standin --steps 10 -o "$output/$version" \
        actor_rollout_ref.rollout.multi_turn.function_tool_path=tools.py \
        rehearsal.poll_interval_s=0.1 trainer.val_before_train=false trainer.test_freq=-1
done
