"""Run the real `main_ppo` many times up to `run_ppo`, importing verl only once.

    python compose.py CASES.json RESULTS.json

Each case is a list of command-line words.  A forked child runs verl's own `main` with them, real
Hydra, real callbacks, real validation; only `run_ppo`, which would start Ray, is replaced by a
function that writes down the config that it was given.
"""

import gc
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

import yaml
from hydra.core.plugins import Plugins
from omegaconf import OmegaConf
from verl.trainer import main_ppo

from verl_profiler.launch import hydra_callback  # noqa: F401  what each fork would import


def run(words, folder):
    """Run one case in this (forked) process; never returns."""
    out = os.open(folder / "out", os.O_CREAT | os.O_WRONLY)
    err = os.open(folder / "err", os.O_CREAT | os.O_WRONLY)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.chdir(folder)

    def instead_of_run_ppo(config, task_runner_class=None):
        import ray

        seen = {
            "config": OmegaConf.to_container(config, resolve=False),
            "settings": os.environ.get("VERL_PROFILER_SETTINGS"),
            "ray_init_hooked": hasattr(ray.init, "__verl_profiler__"),
        }
        (folder / "seen.json").write_text(json.dumps(seen))

    main_ppo.run_ppo = instead_of_run_ppo
    sys.argv = ["main_ppo", *words]
    sys.orig_argv = [sys.executable, "-m", "verl.trainer.main_ppo", *words]
    status = 0
    try:
        main_ppo.main()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
        status = 1
    finally:
        from verl_profiler.recording import recorder

        recorder.stop("exit")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main():
    """Run all cases; write what became of each."""
    results = []
    Plugins.instance()
    # OmegaConf takes the slow parser.
    yaml.SafeLoader = yaml.CSafeLoader
    # As in forked.py.
    gc.freeze()
    for words in json.loads(Path(sys.argv[1]).read_text()):
        folder = Path(tempfile.mkdtemp(prefix="compose_"))
        pid = os.fork()
        if pid == 0:
            run([word.replace("FOLDER", str(folder)) for word in words], folder)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        seen = folder / "seen.json"
        launch = folder / "logs" / "run" / "run.json"
        results.append(
            {
                "status": status,
                "out": (folder / "out").read_text(),
                "err": (folder / "err").read_text(),
                "seen": json.loads(seen.read_text()) if seen.exists() else None,
                "launch": json.loads(launch.read_text()) if launch.exists() else None,
                "files": sorted(str(f.relative_to(folder)) for f in folder.rglob("*")),
                "holding": [
                    str(f.relative_to(folder))
                    for f in sorted(folder.rglob("*"))
                    if f.is_file() and b"pLANTed" in f.read_bytes()
                ],
            }
        )
    Path(sys.argv[2]).write_text(json.dumps(results))


main()
