"""Makes torchvision importable where its build and torch's do not match, as a rehearsal does."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl_profiler.rehearsal.environment import environment


@pytest.fixture(scope="session")
def _import_path():
    folders = environment("standin", {}).get("PYTHONPATH")
    if folders and folders not in sys.path:
        sys.path.insert(0, folders)


ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_recipe" / "rehearse.sh"
STEPS = 2
# Who is captured beside the trainer and an actor, in every run with captures.
CAPTURED = [
    "actor_rollout_ref.actor.profile_ranks=[0]",
    *(
        f"profiler.nsight.roles.{role}"
        for role in ("agent_loop=[0]", "engine=true", "transfer_queue=true")
    ),
]
# The stand-in's run is the example of a recipe of one's own, and its last step is captured with the
# torch profiler, so that all of it is tried in one run.
COMMANDS = {
    "standin": (
        [str(EXAMPLE)],
        [f"trainer.profile_steps=[{STEPS}]", "profiler.nsight.tool=torch", *CAPTURED],
    ),
    "sglang": (
        [str(Path(sys.executable).parent / "verl-profiler"), "rehearse"],
        ["profiler.events.engine_timing=true"],
    ),
}


@pytest.fixture(scope="session")
def command_environment():
    """Let the example find the command that belongs to this interpreter."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONUNBUFFERED": "1"}


@pytest.fixture(scope="session", params=list(COMMANDS))
def rehearsed(request, tmp_path_factory, command_environment):
    """A finished run, one per engine and session: engine, run directory, what the command printed."""
    engine = request.param
    needed = ["verl", "ray", "transfer_queue", *(["sglang"] if engine == "sglang" else [])]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    output = tmp_path_factory.mktemp(engine) / "run"
    command, overrides = COMMANDS[engine]
    arguments = ["--engine", engine, "--steps", str(STEPS), "--output", str(output)]
    done = subprocess.run(
        [*command, *arguments, *overrides],
        env=command_environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=840,
    )
    assert 0 == done.returncode, done.stdout[-6000:]
    return engine, output, done.stdout
