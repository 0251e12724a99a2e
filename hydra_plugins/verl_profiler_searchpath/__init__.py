"""Puts verl-profiler's configs on Hydra's search path.

Every Hydra application of the environment imports this module, so it must stay light and must
never raise.
"""

import os
import sys

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

SFT = (
    "verl's SFT trainers are not recorded, and have a config group `profiler` of their own, to which nothing "
    "can be appended. Remove +profiler=…; profiler.enable=true captures with verl's own profiler. (sft-trainer)"
)


class VerlProfilerSearchPath(SearchPathPlugin):
    """Makes `+profiler=multiturn` and `+rehearsal=cpu` known to every Hydra command."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the installed configs behind those of the application."""
        search_path.append(provider="verl-profiler", path="pkg://verl_profiler.configs")
        _explain_sft()
        _load_plugin()


def _explain_sft() -> None:
    """Print why Hydra is about to refuse `+profiler=…` for an SFT trainer: no config of ours is read then."""
    asked = any(word.lstrip("+").startswith("profiler=") for word in sys.argv[1:])
    if (
        asked
        and "sft_trainer" in os.path.basename(sys.argv[0])
        and os.environ.get("RANK", "0") == "0"
    ):
        print(f"[verl-profiler] {SFT}", file=sys.stderr, flush=True)


def _load_plugin() -> None:
    """Load the plugin into the driver of a verl that loads none itself (before 0.9).

    It does nothing unless the environment switches it on.
    """
    if "verl" in sys.modules and os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto") == "auto":
        try:
            import verl_profiler.plugin  # noqa: F401  # pyright: ignore[reportUnusedImport]
        except Exception as error:  # noqa: BLE001  Hydra's applications are not ours
            print(f"[verl-profiler] WARNING not loaded: {error!r}", file=sys.stderr)
