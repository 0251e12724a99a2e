#!/usr/bin/env bash
# Rehearse your own recipe on a CPU: its reward function, its tool, its number of turns.
#
#     examples/own_recipe/rehearse.sh [--engine standin] [other options of verl-profiler rehearse]
#
# Append data.train_files=…, data.val_files=… and actor_rollout_ref.model.path=… to use your own
# prompts and model too.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

exec verl-profiler rehearse "$@" \
    reward.custom_reward_function.path="$here/reward.py" \
    actor_rollout_ref.rollout.multi_turn.function_tool_path="$here/tools.py" \
    actor_rollout_ref.rollout.multi_turn.tool_config_path=null \
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=4
