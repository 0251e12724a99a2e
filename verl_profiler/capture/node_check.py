"""Check before training that every node can capture as planned.

Ray detects a missing or failing nsys only when it starts the first actor under it, tries three times,
and prints the output as bytes; with a wrong `python` on PATH it waits forever.  So an actor on each node
first tries what Ray's agent will do, with the agent's PATH.
"""

from __future__ import annotations

import importlib
import os
import stat
import tempfile
from collections.abc import Mapping
from typing import Any

from verl_profiler.capture import tools
from verl_profiler.capture.plan import Plan
from verl_profiler.errors import ConfigError
from verl_profiler.nodes.actor import NodeActor
from verl_profiler.recording.complaints import announce

_TIMEOUT_S = 400.0


def check_nodes(plan: Plan) -> None:
    """Check every node of the cluster.

    Args:
        plan: What is captured.

    Raises:
        ConfigError: A node cannot capture.
    """
    problems: list[str] = []
    versions: dict[str, list[str]] = {}
    for host, (found, version) in _check_each(plan).items():
        problems += [f"{host}: {problem}" for problem in found]
        if version:
            versions.setdefault(version, []).append(host)
    if len(versions) > 1:
        listed = "; ".join(f"{version} on {', '.join(on)}" for version, on in versions.items())
        announce(
            f"WARNING the nodes have different versions of {plan.tool}: {listed}. Open and export the "
            "reports with the newest of them. (nsys-versions)"
        )
    if problems:
        listed = "\n  ".join(problems)
        raise ConfigError(
            f"captures are not possible:\n  {listed}\nFix it, or train without captures with "
            "trainer.profile_steps=null.",
            "cannot-capture",
        )


def _check_each(plan: Plan) -> dict[str, tuple[list[str], str]]:
    ray: Any = importlib.import_module("ray")
    options = {role: capture.options for role, capture in plan.roles.items()}
    nodes = {
        host: NodeActor(ray, node)
        for host, node in _names([node for node in ray.nodes() if node["Alive"]]).items()
    }
    answers = {
        host: node.start("run", check_node, plan.tool, plan.directory, options)
        for host, node in nodes.items()
    }
    found: dict[str, tuple[list[str], str]] = {}
    for host, answer in answers.items():
        try:
            found[host] = answer(_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001  a node that cannot answer cannot capture either
            lines = f"{type(error).__name__}: {error}".strip().splitlines()
            text = lines[0] if len(lines) == 1 else f"{lines[0]} … {lines[-1]}"
            found[host] = [f"it did not answer: {text}"], ""
        nodes[host].end()
    return found


def _names(nodes: list[dict[str, Any]]) -> dict[str, str]:
    """Return name → node id; nodes may share a host name, for example in containers."""
    hosts = [node["NodeManagerHostname"] for node in nodes]
    return {
        host if hosts.count(host) == 1 else f"{host} ({node['NodeID'][:8]})": node["NodeID"]
        for node, host in zip(nodes, hosts, strict=True)
    }


def check_node(
    tool: str,
    directory: str,
    options: Mapping[str, Mapping[str, str]],
    path: str | None = None,
) -> tuple[list[str], str]:
    """Return what prevents captures on this node, each with its fix, and the tool's version; runs there.

    Args:
        tool: Name of the capture tool.
        directory: Where the tool will write; created here, because nsys writes elsewhere without it.
        options: Role → the tool's options.
        path: PATH for the tool's program; None for that of the parent process, which is Ray.
    """
    try:
        os.makedirs(directory, exist_ok=True)
        problem = _foreign(directory)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        problem = error.strerror or str(error)
    problems, version = tools.get(tool).check_node(options, path)
    if problem:
        problems.append(
            f"{directory} cannot be written: {problem}. "
            "Set profiler.nsight.directory to a folder that every node can write."
        )
    return problems, version


def _foreign(directory: str) -> str | None:
    """Return which other user could read or replace the reports, or None.

    Where everybody may write, as in /tmp, another user can create a folder of that name first.
    """
    path = os.path.abspath(directory)
    while path != (parent := os.path.dirname(path)):
        everybodys = os.stat(parent).st_mode & stat.S_IWOTH
        if everybodys and os.lstat(path).st_uid not in (os.getuid(), 0):
            return f"{path} belongs to another user"
        path = parent
    return None
