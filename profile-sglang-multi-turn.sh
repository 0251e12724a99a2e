#!/usr/bin/env bash
# Run one profiled GRPO training with SGLang multi-turn rollouts on GSM8K with a tool.
#
#     ./profile-sglang-multi-turn.sh 2                          tensor parallel size 2, all GPUs
#     ./profile-sglang-multi-turn.sh --tp 1 --dry-run           print the command without running it
#     ./profile-sglang-multi-turn.sh --tp 1 trainer.total_training_steps=20
#     ./profile-sglang-multi-turn.sh --rehearse                 the same loop on a CPU, tiny sizes
#
# Usage: profile-sglang-multi-turn.sh [--tp] N [--gpus G] [--dry-run] [--rehearse] [HYDRA OVERRIDE…]
#
#   [--tp] N      GPUs per SGLang replica (default with --rehearse: 1)
#   --gpus G      GPUs of this machine to use (default: those of CUDA_VISIBLE_DEVICES, or all)
#   --dry-run     print the command and its environment without running it
#   --rehearse    run it on this machine's CPU, with the stand-in engine (REHEARSE_ENGINE=sglang for
#                 the real one), with the rehearsal's sizes, model and prompts
#   others        are passed to Hydra after the settings below, and take precedence
#
# Variables: EXPERIMENT_NAME, MODEL (Qwen/Qwen2.5-3B-Instruct), DATA_DIR (~/data/gsm8k_with_tool),
# GSM8K (a local copy of the dataset), PROFILER (multiturn; memory_saver), PYTHON (python3),
# WANDB_API_KEY (logs to wandb too).
#
# The console goes to logs/EXPERIMENT_NAME.log, the events to logs/EXPERIMENT_NAME/.
set -euo pipefail

log() { printf '%s\n' "$*" >&2; }
fail() {
    log "profile-sglang-multi-turn: $1"
    exit 2
}
usage() { sed -n '2,/^set -euo/{/^set -euo/d; s/^# \{0,1\}//; p;}' "${BASH_SOURCE[0]}"; }
is_number() { [[ $1 =~ ^[1-9][0-9]{0,3}$ ]]; }

tp='' gpus='' dry_run=false rehearse=false overrides=()
[[ $# -gt 0 ]] || { usage >&2; exit 2; }
while [[ $# -gt 0 ]]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --tp) [[ $# -gt 1 ]] || fail '--tp needs a number, for example --tp 2'; tp=$2; shift ;;
        --tp=*) tp=${1#*=} ;;
        --gpus) [[ $# -gt 1 ]] || fail '--gpus needs a number, for example --gpus 4'; gpus=$2; shift ;;
        --gpus=*) gpus=${1#*=} ;;
        --dry-run) dry_run=true ;;
        --rehearse) rehearse=true ;;
        -*) fail "unknown option $1; --help lists the options" ;;
        *=* | +* | ~*) overrides+=("$1") ;;
        *) [[ -z $tp ]] || fail "unexpected argument $1: the tensor parallel size is already $tp"; tp=$1 ;;
    esac
    shift
done
if [[ -z $tp ]]; then
    $rehearse || fail 'the tensor parallel size is missing. For example: profile-sglang-multi-turn.sh 2'
    tp=1
fi
is_number "$tp" || fail "the tensor parallel size must be a positive integer, not '$tp'"

python=${PYTHON:-python3}
profiler=${PROFILER:-multiturn}
name=${EXPERIMENT_NAME:-multiturn-tp-$tp-$(date +%Y-%m-%d-%H-%M-%S)}
[[ $name =~ ^[A-Za-z0-9_.-]+$ ]] || fail "EXPERIMENT_NAME is '$name'; use letters, digits, '-', '_' and '.'"

# Modules are located, not imported: importing takes a minute and needs a GPU.
has() { "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)' "$1"; }
command -v "$python" > /dev/null || fail "$python not found; set PYTHON"
has verl_profiler || fail "verl_profiler is not installed for $python: $python -m pip install $(dirname "$0"), or set PYTHON"
tool=$("$python" -c 'import importlib.util; print(importlib.util.find_spec("verl_profiler.recipes").submodule_search_locations[0])')/gsm8k_tool.yaml

show() {
    printf 'EXPERIMENT_NAME=%q \\\n' "$name"
    printf '%q %q %q' "$1" "$2" "$3"
    printf ' \\\n    %q' "${@:4}"
    printf '\n'
}
# Print or run a command, with its console output in the log.
carry_out() {
    if $dry_run; then
        show "$@"
        exit 0
    fi
    mkdir -p logs
    log "console: logs/$name.log   events: logs/$name/"
    EXPERIMENT_NAME=$name "$@" 2>&1 | tee -a "logs/$name.log"
}

# Settings for both GPUs and rehearsals.
recipe=(
    algorithm.adv_estimator=grpo
    algorithm.use_kl_in_reward=False
    actor_rollout_ref.actor.use_kl_loss=True
    actor_rollout_ref.actor.kl_loss_coef=0.001
    actor_rollout_ref.actor.kl_loss_type=low_var_kl
    actor_rollout_ref.actor.entropy_coeff=0
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.rollout.tensor_model_parallel_size="$tp"
    actor_rollout_ref.rollout.multi_turn.enable=True
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=5
    actor_rollout_ref.rollout.multi_turn.format=hermes
    actor_rollout_ref.rollout.multi_turn.tool_config_path="$tool"
    actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent
    trainer.critic_warmup=0
    trainer.project_name=verl-profile-sglang-qwen2.5
    trainer.experiment_name="$name"
)

# The preset of PROFILER=memory_saver sets these.
if [[ $profiler != memory_saver* ]]; then
    recipe+=(
        actor_rollout_ref.actor.fsdp_config.param_offload=False
        actor_rollout_ref.actor.fsdp_config.optimizer_offload=False
        actor_rollout_ref.ref.fsdp_config.param_offload=True
    )
    $rehearse || recipe+=(actor_rollout_ref.rollout.gpu_memory_utilization=0.5)
fi

if $rehearse; then
    has verl || fail "verl is not installed for $python; see docs/rehearsal.md"
    # Enough ranks for two replicas.
    carry_out "$python" -m verl_profiler rehearse --engine "${REHEARSE_ENGINE:-standin}" \
        --profiler "$profiler" --ranks $((2 * tp)) -o "logs/$name" \
        "${recipe[@]}" actor_rollout_ref.rollout.multi_turn.function_tool_path=null \
        ${overrides[@]+"${overrides[@]}"}
    exit
fi

if [[ -z $gpus ]]; then
    if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
        gpus=$(tr ',' '\n' <<< "$CUDA_VISIBLE_DEVICES" | grep -c '^[^-]') ||
            fail "CUDA_VISIBLE_DEVICES='$CUDA_VISIBLE_DEVICES' selects no GPU; try --rehearse"
    else
        command -v nvidia-smi > /dev/null || fail 'nvidia-smi not found: run on a GPU machine, pass --gpus G, or try --rehearse'
        gpus=$(nvidia-smi --list-gpus | grep -c '^GPU ') || fail 'nvidia-smi lists no GPU; try --rehearse'
    fi
fi
is_number "$gpus" || fail "the number of GPUs must be a positive integer, not '$gpus'"
((gpus % tp == 0)) || fail "$gpus GPUs are not divisible by tensor parallel size $tp"
for package in verl sglang ray; do
    has "$package" || $dry_run || fail "$package is not installed for $python: pip install 'verl[sglang]', or set PYTHON"
done

# 256 prompts with 16 requests each, rounded down to a multiple of the GPUs, in equal micro batches.
requests=16
batch=$((gpus < 256 ? 256 / gpus * gpus : gpus))
each=$((batch * requests / gpus))
micro=32
while ((each % micro)); do micro=$((micro - 1)); done

data=${DATA_DIR:-$HOME/data/gsm8k_with_tool}
if [[ ! -f $data/train.parquet || ! -f $data/test.parquet ]]; then
    prepare=("$python" -m verl_profiler.recipes.gsm8k_data --out "$data" ${GSM8K:+--dataset "$GSM8K"})
    if $dry_run; then
        printf '%q ' "${prepare[@]}" && printf '\n'
    else
        log "preparing GSM8K with a tool in $data"
        "${prepare[@]}" || fail 'cannot prepare the data; see above'
    fi
fi

logger='["console"]'
[[ -z ${WANDB_API_KEY:-} ]] || logger='["console","wandb"]'
# Thousands of requests need as many open connections.
$dry_run || ulimit -n 65535 2> /dev/null || log "warning: at most $(ulimit -n) open files; many requests may need more"

carry_out "$python" -m verl.trainer.main_ppo "+profiler=$profiler" \
    "${recipe[@]}" \
    actor_rollout_ref.rollout.name=sglang \
    data.train_files="$data/train.parquet" \
    data.val_files="$data/test.parquet" \
    data.train_batch_size="$batch" \
    data.max_prompt_length=1024 \
    data.max_response_length=1024 \
    data.filter_overlong_prompts=True \
    data.truncation=error \
    data.return_raw_chat=True \
    actor_rollout_ref.model.path="${MODEL:-Qwen/Qwen2.5-3B-Instruct}" \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.ppo_mini_batch_size="$batch" \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu="$micro" \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu="$micro" \
    actor_rollout_ref.rollout.n="$requests" \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu="$micro" \
    trainer.logger="$logger" \
    trainer.n_gpus_per_node="$gpus" \
    trainer.nnodes=1 \
    trainer.save_freq=-1 \
    trainer.test_freq=20 \
    trainer.total_epochs=15 \
    ${overrides[@]+"${overrides[@]}"}
