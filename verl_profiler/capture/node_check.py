"""Ask every node before training whether it can capture as planned.

Ray finds out only when it starts the first actor under nsys, tries three times, and shows the tool's
answer as bytes; a wrong `python` on PATH makes it wait for ever.  So each node is asked first, by a
task that tries what Ray's agent will do, with the PATH that the agent has.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from typing import Any

from verl_profiler.capture.plan import Plan, words_of
from verl_profiler.errors import ConfigError
from verl_profiler.recording import recorder

__all__ = ["check_nodes", "look", "problems_of"]

_PATIENCE_S = 400.0
_TRIES, _TRY_S = 3, 120
_CUT_OFF = -2
# nvtx takes a tool that is too old for none, and then gives out a domain that does nothing.
_ASK_NVTX = (
    "import nvtx; ask = getattr(nvtx, 'get_domain', None); "
    "print('domain', type(ask('verl_profiler')).__name__ if ask else '')"
)


def check_nodes(plan: Plan, config: Any) -> bool:
    """Look at every node of the cluster.

    Args:
        plan: What is captured.
        config: verl's config; its profiler is switched off when captures cannot be had.

    Returns:
        False when nothing will be captured.

    Raises:
        ConfigError: If a node cannot capture and `profiler.nsight.on_missing` is `error`.
    """
    problems = []
    versions: dict[str, list[str]] = {}
    for host, seen in _ask_nodes(plan).items():
        problems += [f"{host}: {problem}" for problem in problems_of(seen, plan)]
        if seen.get("version"):
            versions.setdefault(seen["version"], []).append(host)
    if len(versions) > 1:
        listed = "; ".join(f"{version} on {', '.join(on)}" for version, on in versions.items())
        recorder.say(
            f"WARNING the nodes have different versions of nsys: {listed}. Open and export the "
            "reports with the newest of them. (nsys-versions)"
        )
    if not problems:
        return True
    text = "captures are not possible:\n  " + "\n  ".join(problems)
    if plan.on_missing == "error":
        raise ConfigError(
            f"{text}\nMend it, train without captures by trainer.profile_steps=null, or let such "
            "runs go on without them by profiler.nsight.on_missing=warn.",
            "cannot-capture",
        )
    recorder.say(f"WARNING {text}\nTraining goes on without captures. (cannot-capture)")
    from omegaconf import open_dict

    with open_dict(config):
        config.global_profiler.steps = None
        config.global_profiler.tool = None
    return False


def _ask_nodes(plan: Plan) -> dict[str, dict[str, Any]]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ask = ray.remote(num_cpus=0)(look)
    commands = {
        role: words_of({key: value for key, value in capture.options.items() if key != "o"})
        for role, capture in plan.roles.items()
    }
    asked = {
        name: ask.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote(plan.tool, plan.directory, commands)
        for name, node in _names([node for node in ray.nodes() if node["Alive"]]).items()
    }
    answers = {}
    for host, reference in asked.items():
        try:
            answers[host] = ray.get(reference, timeout=_PATIENCE_S)
        except Exception as error:  # noqa: BLE001  a node that cannot answer cannot capture either
            said = f"{type(error).__name__}: {error}".strip().splitlines()
            answers[host] = {"failed": said[0] if len(said) == 1 else f"{said[0]} … {said[-1]}"}
    return answers


def _names(nodes: list[dict[str, Any]]) -> dict[str, str]:
    """Return name → node id; two nodes may have one host name, in containers for example."""
    hosts = [node["NodeManagerHostname"] for node in nodes]
    return {
        host if hosts.count(host) == 1 else f"{host} ({node['NodeID'][:8]})": node["NodeID"]
        for node, host in zip(nodes, hosts, strict=True)
    }


def look(
    tool: str, directory: str, commands: dict[str, list[str]], path: str | None = None
) -> dict[str, Any]:
    """Return what this node can do; runs there.

    Args:
        tool: `nsys` or `torch`.
        directory: Where the tool will write; made here, because nsys writes elsewhere without it.
        commands: Role → its nsys options.
        path: Where to look for nsys; None for the PATH of the parent, which on a node is Ray.

    Returns:
        For `problems_of`.
    """
    seen: dict[str, Any] = {"python": sys.executable, "directory": None, "options": {}}
    try:
        os.makedirs(directory, exist_ok=True)
        seen["directory"] = _foreign(directory)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        seen["directory"] = error.strerror or str(error)
    if tool == "nsys":
        seen.update(_look_for_nsys(_agent_path() if path is None else path, commands))
    return seen


def _foreign(directory: str) -> str | None:
    """Return who else could read or replace the reports, or None.

    Where everybody may write, as in /tmp, another user can make a folder of that name beforehand.
    """
    path = os.path.abspath(directory)
    while path != (parent := os.path.dirname(path)):
        everybodys = os.stat(parent).st_mode & stat.S_IWOTH
        if everybodys and os.lstat(path).st_uid not in (os.getuid(), 0):
            return f"{path} belongs to another user"
        path = parent
    return None


def _look_for_nsys(path: str, commands: dict[str, list[str]]) -> dict[str, Any]:
    seen: dict[str, Any] = {"nvtx": None, "options": {}, "silent": False}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        seen["nvtx"] = importlib.metadata.version("nvtx")
    seen["nsys"] = nsys = shutil.which("nsys", path=path)
    seen["nsys_of_job"] = shutil.which("nsys")
    if nsys is None:
        return seen
    # What a captured process will find, see `actor_placement.runtime_env_for`.
    path = f"{os.path.dirname(sys.executable)}{os.pathsep}{path}"
    seen["version"] = _run(path, nsys, "--version")[1]
    seen["bare_python"] = _run(path, "python", "-c", "import ray")[0] == 0
    tried: dict[tuple[str, ...], tuple[int, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for role, options in commands.items():
            key = tuple(options)
            if key not in tried:
                script = _ASK_NVTX if seen["nvtx"] else ""
                words = [nsys, "profile", *options, "-o", f"{folder}/{len(tried)}"]
                # nsys itself fails now and then on a busy machine; Ray tries three times too.
                for _ in range(_TRIES):
                    tried[key] = _run(path, *words, sys.executable, "-c", script)
                    if tried[key][0] in (0, _CUT_OFF):
                        break
            code, output = tried[key]
            seen["silent"] = seen["silent"] or "domain DummyDomain" in output
            if code:
                seen["options"][role] = output[-300:]
    return seen


def _agent_path() -> str:
    """Return the PATH of the process that started this one.

    Ray's agent runs nsys, and it has the raylet's environment, not the job's.
    """
    try:
        with open(f"/proc/{os.getppid()}/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        entries = []
    for entry in entries:
        if entry.startswith(b"PATH="):
            return os.fsdecode(entry[len(b"PATH=") :])
    return os.environ.get("PATH", "")


def _run(path: str, *words: str) -> tuple[int, str]:
    """Return exit status and output of a command; a negative status where it did not end itself."""
    try:
        done = subprocess.run(  # noqa: S603
            words,
            capture_output=True,
            text=True,
            timeout=_TRY_S,
            check=False,
            env={**os.environ, "PATH": path},
        )
    except subprocess.TimeoutExpired:
        return _CUT_OFF, (
            f"it did not end in {_TRY_S} s (a container may need sample=none and cpuctxsw=none)"
        )
    except OSError as error:
        return -1, str(error)
    return done.returncode, (done.stdout + done.stderr).strip()


def problems_of(seen: dict[str, Any], plan: Plan) -> list[str]:
    """Return what keeps a node from capturing, each with its mend."""
    if "failed" in seen:
        return [f"it did not answer: {seen['failed']}"]
    problems = []
    if seen["directory"]:
        problems.append(
            f"{plan.directory} cannot be written: {seen['directory']}. "
            "Set profiler.nsight.directory to a folder that every node can write."
        )
    if plan.tool != "nsys":
        return problems
    if seen["nvtx"] is None:
        problems.append(f"nvtx is not installed for {seen['python']}. Run: pip install nvtx")
    if seen["nsys"] is None:
        found = seen.get("nsys_of_job")
        problems.append(
            f"nsys is at {found}, but not on the PATH that Ray was started with there. Add its "
            "folder to PATH before `ray start`."
            if found
            else "nsys is not on the PATH that Ray was started with. Install Nsight Systems there "
            "and start Ray again, or use profiler.nsight.tool=torch, which needs no nsys."
        )
        return problems
    if not seen["bare_python"]:
        problems.append(
            "`python` on PATH cannot import ray, and Ray starts workers under nsys by that name: "
            f"they would never come up. Put {seen['python']}'s folder first on PATH."
        )
    for role, output in seen["options"].items():
        problems.append(f"nsys fails with the options for {role}: {output}")
    waits = {capture.waits_for() for capture in plan.roles.values()}
    if seen.get("silent") and "nvtx" in waits:
        problems.append(
            f"nvtx {seen['nvtx']} records no range under {seen['version']}, and says nothing. "
            "Use a newer nsys, or pip install 'nvtx==0.2.11'."
        )
    return problems
