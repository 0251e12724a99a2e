#!/usr/bin/env bash
# Rehearse the recording of memory on a CPU: release, weight sync and resume in their order, with the
# real SGLang or the stand-in. Nothing is freed there: the saver needs CUDA.
#
#     examples/memory_saver/rehearse.sh [--engine standin] [other options of verl-profiler rehearse]
set -euo pipefail

exec verl-profiler rehearse --profiler memory_saver_rehearsal "$@"
