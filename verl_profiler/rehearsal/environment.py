"""What the processes of a rehearsal must find in their environment before they import verl.

Ray's workers, and the processes that SGLang spawns, inherit it from the process that starts Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

__all__ = ["IMPORT_PATH", "environment"]

WORKER_MODULE = "verl_profiler.rehearsal.worker"

# Packages that must be found before the installed ones of the same name.
IMPORT_PATH = Path(__file__).parent / "import_path"


def environment(engine: str, current: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a rehearsal sets.

    Args:
        engine: verl's `rollout.name`.
        current: The environment to start from.  Modules that verl already imports, and folders
            that Python already searches, are kept.
    """
    modules = [name for name in current.get("VERL_USE_EXTERNAL_MODULES", "").split(",") if name]
    if WORKER_MODULE not in modules:
        modules.append(WORKER_MODULE)
    variables = {
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": ",".join(modules),
        # Two threads per process make SGLang's decoding 15 times slower on two cores.
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    folders = [name for name in current.get("PYTHONPATH", "").split(":") if name]
    if str(IMPORT_PATH) not in folders:
        folders.insert(0, str(IMPORT_PATH))
    variables["PYTHONPATH"] = ":".join(folders)
    if engine == "sglang":
        variables["SGLANG_USE_CPU_ENGINE"] = "1"
    return variables
