"""The actor that reads a run's files on a node with a disk of its own."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from verl_profiler.capture.connected_ray import actor_on_node

__all__ = ["node_actor"]


def node_actor(ray: Any, node_id: str) -> Any:
    """Start the actor on a node, and return its handle.

    Args:
        ray: The module, connected.
        node_id: Ray's id of the node.
    """

    # A class that is defined here is pickled by value: the node need not have this package.
    class VerlProfilerFiles:
        """Reads the files of a run on its node."""

        def open(self, directory: str) -> str | bool | None:
            """Return the name of the disk; None without a run directory, False without the package."""
            with contextlib.suppress(OSError):
                os.nice(19)
            try:
                from verl_profiler.shipping import node_files
            except ImportError:
                return False
            self.directory = directory
            return node_files.disk_of(node_files.Path(directory))

        def begin(self, have: dict[str, int]) -> None:
            """Take note of what the other side has."""
            from verl_profiler.shipping.node_files import NodeFiles

            self.files = NodeFiles(self.directory, have)

        def request_evidence(self, hangs: int) -> None:
            """Make the folders that processes of this node look for."""
            from verl_profiler.shipping import node_files

            node_files.request_evidence(node_files.Path(self.directory), hangs)

        def scan(self, light: bool) -> None:
            """Find out what has changed."""
            self.files.scan(light=light)

        def pieces(self, limit: int) -> Any:
            """Return the next pieces."""
            return self.files.pieces(limit)

    return actor_on_node(ray, VerlProfilerFiles, node_id)
