"""Applies the rehearsal's patches in a process: verl imports it by `VERL_USE_EXTERNAL_MODULES`.

Importing this module has side effects; only verl and the rehearsal's Hydra callback import it.
"""

from __future__ import annotations

import importlib.util

from verl_profiler.rehearsal import cpu_patches

# verl 0.8 has no platforms; there a patch stands for this one.
if importlib.util.find_spec("verl.plugin") is not None:
    from verl.plugin.platform.platform_manager import PlatformRegistry

    from verl_profiler.rehearsal.platform import CpuPlatform

    PlatformRegistry.register("cpu")(CpuPlatform)
cpu_patches.install()
