#!/usr/bin/env bash
# Rehearse memory recording on a CPU: release, weight sync and resume in the real order, with the
# real SGLang or the stand-in. Nothing is freed, because the saver needs CUDA.
#
#     examples/memory_saver/rehearse.sh [--engine standin] [other options of verl-profiler rehearse]
set -euo pipefail

exec verl-profiler rehearse --profiler memory_saver_rehearsal "$@"
