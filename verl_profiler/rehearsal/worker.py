"""Makes a process part of a rehearsal: verl imports it by `VERL_USE_EXTERNAL_MODULES`.

Importing this module has effects; nothing imports it but verl and the rehearsal's Hydra callback.
"""

from __future__ import annotations

from verl.plugin.platform.platform_manager import PlatformRegistry

from verl_profiler.rehearsal import cpu_patches
from verl_profiler.rehearsal.platform import CpuPlatform

PlatformRegistry.register("cpu")(CpuPlatform)
cpu_patches.install()
