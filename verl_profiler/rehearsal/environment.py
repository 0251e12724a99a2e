"""Environment variables that the processes of a rehearsal need before they import verl.

Ray's workers, and the processes that SGLang spawns, inherit it from the process that starts Ray.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

_WORKER_MODULE = "verl_profiler.rehearsal.worker"

# Folders of packages that take precedence over installed ones of the same name.
FOR_SGLANG = Path(__file__).parent / "import-path" / "for_sglang"
FOR_TORCHVISION = Path(__file__).parent / "import-path" / "for_torchvision"


def environment(engine: str, current: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a rehearsal sets.

    Args:
        engine: verl's `rollout.name`.
        current: The environment to start from.  Its VERL_USE_EXTERNAL_MODULES and PYTHONPATH entries
            are kept, and with the stand-in engine its VERL_PLATFORM: ranks on another device.
    """
    modules = [name for name in current.get("VERL_USE_EXTERNAL_MODULES", "").split(",") if name]
    if _WORKER_MODULE not in modules:
        modules.append(_WORKER_MODULE)
    variables = {
        "VERL_PLATFORM": (engine == "standin" and current.get("VERL_PLATFORM")) or "cpu",
        "VERL_USE_EXTERNAL_MODULES": ",".join(modules),
        # Two threads per process make SGLang's decoding 15 times slower on two cores.
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    first: list[str] = []
    if engine == "sglang":
        variables["SGLANG_USE_CPU_ENGINE"] = "1"
        first.append(str(FOR_SGLANG))
    if engine == "vllm":
        # By default each replica binds its threads to the same cores.
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    # Transformers considers torchvision installed if any package has that name.
    if importlib.util.find_spec("torchvision") is not None:
        first.append(str(FOR_TORCHVISION))
    if first:
        others = [name for name in current.get("PYTHONPATH", "").split(os.pathsep) if name]
        others = [name for name in others if name not in first]
        variables["PYTHONPATH"] = os.pathsep.join([*first, *others])
    return variables
