"""Makes torchvision importable where its build and torch's do not match, as a rehearsal does."""

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from no_alarm import ended
from shipping.conftest import s3, s3_environment, s3_server  # noqa: F401  as fixtures

from verl_profiler.events.remote import connect
from verl_profiler.rehearsal.environment import environment


@pytest.fixture(scope="session")
def _import_path():
    folders = environment("standin", {}).get("PYTHONPATH")
    if folders and folders not in sys.path:
        sys.path.insert(0, folders)


ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_recipe" / "rehearse.sh"
STEPS = 2
# SGLang's run is uploaded, where there is a server.
URL = "s3://rehearsal/run"
CAPTURED = [
    f"trainer.profile_steps=[{STEPS}]",
    "actor_rollout_ref.actor.profile_ranks=[0]",
    "profiler.nsight.roles.agent_loop=[0]",
    "profiler.nsight.roles.engine=true",
    "profiler.nsight.roles.transfer_queue=true",
]
# The last step of each run is captured: the stand-in's with the torch profiler, SGLang's with nsys
# where there is one.  The stand-in's run is the example of a recipe of one's own too, on a Ray node
# that runs already, and with verl's V0 trainer, which knows no TransferQueue.  vLLM's is there where vLLM is: it takes an environment of its own.
COMMANDS = {
    "standin": (
        [str(EXAMPLE)],
        ["profiler.nsight.tool=torch", *CAPTURED, "trainer.use_v1=false"],
    ),
    "sglang": (
        [str(Path(sys.executable).parent / "verl-profiler"), "rehearse"],
        [
            "profiler.events.engine_timing=true",
            "profiler.events.engine_state=true",
            "profiler.transfer_queue.trace=true",
            "profiler.transfer_queue.detail=true",
            f"trainer.v1.sampler.custom_sampler.path={EXAMPLE.parent / 'sampler.py'}",
            "trainer.v1.sampler.custom_sampler.name=TimedReplayBuffer",
            f"actor_rollout_ref.rollout.agent.agent_loop_config_path={EXAMPLE.parent / 'agent_loops.yaml'}",
            "actor_rollout_ref.rollout.agent.default_agent_loop=hinted_agent",
        ],
    ),
    "vllm": (
        [str(Path(sys.executable).parent / "verl-profiler"), "rehearse"],
        ["profiler.events.engine_timing=true"],
    ),
}


@pytest.fixture(scope="session")
def command_environment():
    """Let the example find the command that belongs to this interpreter."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONUNBUFFERED": "1"}


# A node takes the token that a driver left in the home directory; a driver that is told an address
# does not (ray 2.60).
WITHOUT_TOKEN = {"RAY_AUTH_MODE": "disabled"}


@contextlib.contextmanager
def running_cluster():
    """Start a Ray node as a user would before the command; give its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        *(str(Path(sys.executable).parent / "ray"), "start", "--head", "--block"),
        *("--port", str(port), "--num-cpus=16", "--num-gpus=2"),
        *("--include-dashboard=false", "--disable-usage-stats"),
    ]
    with subprocess.Popen(
        command,
        # Ray's runtime environments cannot mend what its workers import before they know them.
        env={**os.environ, **environment("standin", dict(os.environ)), **WITHOUT_TOKEN},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as node:
        try:
            for _ in range(300):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.2)
            yield f"127.0.0.1:{port}"
        finally:
            os.killpg(node.pid, signal.SIGKILL)


# SGLang's run is that of each push.
ENGINES = {
    name: pytest.param(name, marks=[] if name == "sglang" else pytest.mark.nightly)
    for name in COMMANDS
}


def of_engine(engine):
    """Take the run of one engine."""
    return pytest.mark.parametrize("rehearsed", [ENGINES[engine]], indirect=True)


@pytest.fixture(scope="session", params=ENGINES.values())
def rehearsed(request, tmp_path_factory, command_environment, nsys_or_reason):
    """A finished run, one per engine and session: engine, run directory, what the command printed."""
    engine = request.param
    needed = ["verl", "ray", "transfer_queue", *([engine] if engine != "standin" else [])]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    output = tmp_path_factory.mktemp(engine) / "run"
    command, overrides = COMMANDS[engine]
    if engine == "sglang" and importlib.util.find_spec("moto") is not None:
        command_environment = {**command_environment, **request.getfixturevalue("s3_environment")}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in request.getfixturevalue("s3_environment").items():
                patch.setenv(name, value)
            connect("s3://rehearsal")[0].mkdir("rehearsal")
        overrides = [*overrides, f"profiler.output_dir={URL}"]
    if engine == "sglang" and not isinstance(nsys_or_reason, str):
        overrides = [*overrides, "actor_rollout_ref.actor.profile_discrete=true", *CAPTURED]
        command_environment = {**command_environment, **nsys_or_reason}
    # The example's agent loop is imported by its module's name.
    folders = [str(EXAMPLE.parent), command_environment.get("PYTHONPATH")]
    command_environment = {
        **command_environment,
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        # The lines of TransferQueue tracing are printed at this level; each of them is looked at.
        "VERL_LOGGING_LEVEL": "INFO",
        "RAY_DEDUP_LOGS": "0",
    }
    command = [*command, "--engine", engine, "--steps", str(STEPS), "-o", str(output)]
    with contextlib.ExitStack() as stack:
        if engine == "standin":
            address = stack.enter_context(running_cluster())
            command_environment = {**command_environment, **WITHOUT_TOKEN}
            overrides = [*overrides, f"ray_kwargs.ray_init.address={address}"]
        return engine, output, ended([*command, *overrides], command_environment, output)
