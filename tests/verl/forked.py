"""Run scripts, each in a fork of this process, which has imported what verl imports of others.

    python forked.py

Takes a line of JSON per script: its words, the folders to put before its imports, its environment, the
files for its output, and whether it is a fork of a fork that has placed all probes and then imported verl.
Answers each with the script's exit status.
"""

import gc
import importlib
import json
import os
import runpy
import sys
import traceback

# Neither verl nor anything that is probed: scripts place probes before they import it.
OTHERS = ("torch", "tensordict", "ray", "transformers", "hydra", "datasets", "peft")
# What scripts import after the probes are placed.
PROBED = (
    "verl.checkpoint_engine.base",
    "verl.experimental.agent_loop.agent_loop",
    "verl.trainer.ppo.v1.trainer_separate_async",
    "verl.workers.engine_workers",
    "verl.workers.rollout.llm_server",
)


def run(words, path, environment, out, err):
    """Run a script as `python WORDS` does; to its end, with what is registered for it."""
    for file, number in ((os.devnull, 0), (out, 1), (err, 2)):
        os.dup2(os.open(file, os.O_CREAT | os.O_RDWR), number)
    os.environ.update(environment)
    sys.argv = words
    sys.path[:1] = [os.path.dirname(words[0]), *path]
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        return end.code
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def probed():
    """Return the ends of the pipes to a fork that serves scripts with all probes and verl in it."""
    (orders, to_fork), (from_fork, answers) = os.pipe(), os.pipe()
    if os.fork():
        return os.fdopen(to_fork, "w"), os.fdopen(from_fork)
    os.close(to_fork)
    os.dup2(orders, 0)
    os.dup2(answers, 1)
    from verl_profiler.instrumentation import placing
    from verl_profiler.probes import all_probes

    placing.install(all_probes())
    for name in PROBED:
        importlib.import_module(name)
    with open(0, closefd=False) as orders_of_fork:
        serve(orders_of_fork)
    os._exit(0)


def serve(orders):
    """Run scripts until there are no more."""
    # What is imported is not collected: forks would look through it, and copy it.
    gc.freeze()
    fork = None
    for line in orders:
        order = json.loads(line)
        if order.pop("probed"):
            fork = fork or probed()
            print(json.dumps({**order, "probed": False}), file=fork[0], flush=True)
            print(int(fork[1].readline() or 1), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            sys.exit(run(**order))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    if fork:
        fork[0].close()
        os.wait()


if __name__ == "__main__":
    for name in OTHERS:
        importlib.import_module(name)
    serve(sys.stdin)
