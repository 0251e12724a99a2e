"""Puts verl-profiler's configs on Hydra's search path.

Every Hydra application of the environment imports this module, so it must stay light and must
never raise.
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class VerlProfilerSearchPath(SearchPathPlugin):
    """Makes `+profiler=multiturn` and `+rehearsal=cpu` known to every Hydra command."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the installed configs behind those of the application."""
        search_path.append(provider="verl-profiler", path="pkg://verl_profiler.configs")
