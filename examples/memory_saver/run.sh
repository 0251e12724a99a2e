#!/usr/bin/env bash
# The memory smoke test of verl's first memory-saver guide, with current keys: PPO of a 7B model on
# four GPUs, SGLang at tensor parallel size 4, memory released between rollouts.
#
#     examples/memory_saver/run.sh [HYDRA OVERRIDE…]
#     verl-profiler memory logs/memory-saver
#
# Needs four GPUs, verl with SGLang, torch-memory-saver, and GSM8K prepared by verl's example:
#     python examples/data_preprocess/gsm8k.py        (in a checkout of verl)
# README.md in this folder lists the guide's keys and their current names.
#
# Variables: DATA_DIR (~/data/gsm8k), MODEL (Qwen/Qwen2-7B-Instruct), GPUS (4), TP (GPUS),
# EXPERIMENT_NAME (memory-saver), PYTHON (python3).
set -euo pipefail

data=${DATA_DIR:-$HOME/data/gsm8k}
model=${MODEL:-Qwen/Qwen2-7B-Instruct}
gpus=${GPUS:-4}
# The guide's batch sizes are totals; verl now counts per GPU.
per_gpu=$((gpus < 16 ? 16 / gpus : 1))

for split in train test; do
    if [[ ! -f $data/$split.parquet ]]; then
        echo "$data/$split.parquet is missing: prepare GSM8K, or set DATA_DIR" >&2
        exit 2
    fi
done

mkdir -p logs
export EXPERIMENT_NAME=${EXPERIMENT_NAME:-memory-saver}
# Also print verl's own memory lines, for use of the console log without the run.
export VERL_LOGGING_LEVEL=${VERL_LOGGING_LEVEL:-DEBUG} RAY_DEDUP_LOGS=0

"${PYTHON:-python3}" -m verl.trainer.main_ppo +profiler=memory_saver \
    algorithm.adv_estimator=gae \
    algorithm.kl_ctrl.kl_coef=0.001 \
    data.train_files="$data/train.parquet" \
    data.val_files="$data/test.parquet" \
    data.train_batch_size=64 \
    data.max_prompt_length=512 \
    data.max_response_length=1 \
    actor_rollout_ref.model.path="$model" \
    actor_rollout_ref.model.use_remove_padding=True \
    actor_rollout_ref.model.enable_gradient_checkpointing=True \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
    actor_rollout_ref.rollout.name=sglang \
    actor_rollout_ref.rollout.tensor_model_parallel_size="${TP:-$gpus}" \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu="$per_gpu" \
    critic.optim.lr=1e-5 \
    critic.model.path="$model" \
    critic.model.use_remove_padding=True \
    critic.model.enable_gradient_checkpointing=True \
    critic.ppo_micro_batch_size_per_gpu="$per_gpu" \
    trainer.critic_warmup=0 \
    trainer.logger='["console"]' \
    trainer.val_before_train=True \
    trainer.default_hdfs_dir=null \
    trainer.n_gpus_per_node="$gpus" \
    trainer.nnodes=1 \
    trainer.save_freq=-1 \
    trainer.test_freq=10 \
    trainer.total_epochs=1 \
    "$@" 2>&1 | tee "logs/$EXPERIMENT_NAME.log"
