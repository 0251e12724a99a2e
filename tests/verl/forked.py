"""Run scripts, each in a fork of this process, which has imported what verl imports of others.

    python forked.py

Takes a line of JSON per script: its words, the folders to put before its imports, its environment, and the
files for its output.  Answers each with the script's exit status.
"""

import importlib
import json
import os
import runpy
import sys
import traceback

# Neither verl nor anything that is probed: scripts place probes before they import it.
OTHERS = ("torch", "tensordict", "ray", "transformers", "hydra", "datasets", "peft")


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


def main():
    """Serve scripts until there are no more."""
    for name in OTHERS:
        importlib.import_module(name)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            return run(**json.loads(line))
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
