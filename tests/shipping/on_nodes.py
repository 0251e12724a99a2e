"""Run a script of this folder on a Ray cluster of nodes that are namespaces of this machine."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

__all__ = ["run_on_nodes"]

HERE = Path(__file__).parent


@contextlib.contextmanager
def run_on_nodes(namespaces, script):
    """Yield what the script printed last, as JSON, and the folder of its runs."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VERL_PROFILER")}
    folders = [str(HERE), str(HERE.parent / "capture"), environment.get("PYTHONPATH")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    # Ray's sockets have no room for a long path.
    with tempfile.TemporaryDirectory(prefix="nodes-") as folder:
        done = subprocess.run(
            [*namespaces, sys.executable, str(HERE / script), folder],
            capture_output=True,
            text=True,
            check=False,
            timeout=380,
            cwd=HERE,
            env=environment,
        )
        assert 0 == done.returncode, (done.stdout + done.stderr)[-4000:]
        yield json.loads(done.stdout.splitlines()[-1]), Path(folder) / "logs"
