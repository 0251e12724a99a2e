"""Run sessions of uni-agent's framework with all probes on; report their events as JSON.

    python uni_agent_probes.py

The real classes of a checkout in UNI_AGENT_CHECKOUT, or else the fakes beside this file.
`test_uni_agent_probes.py` reads the report.
"""

import asyncio
import inspect
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import asynchronous_probes
import probes_report

from verl_profiler import span
from verl_profiler.recording import context, recorder
from verl_profiler.recording.clock import now

FAKES = str(Path(__file__).with_name("fakes"))
DIRECTORY = probes_report.begin("agent_loop")
sys.path.insert(0, os.environ.get("UNI_AGENT_CHECKOUT", FAKES))

from uni_agent.framework import framework as of_uni_agent  # noqa: E402
from uni_agent.gateway.manager import GatewayManager  # noqa: E402


class Actor:
    """A gateway's actor handle: it holds sessions, and serves them apart from their agents."""

    def __init__(self, client):
        self.gateway = asynchronous_probes.Gateway(client)
        self.create_session = asynchronous_probes.Remote(self.create)
        self.finalize_session = asynchronous_probes.Remote(lambda **_: [])
        self.abort_session = asynchronous_probes.Remote(lambda **_: None)

    def create(self, session_id, **_):
        return SimpleNamespace(session_id=session_id)


async def run():
    """A prompt of two sessions in step 3, one of a validation, and one whose agent fails."""
    actor = Actor(asynchronous_probes.client_of([(4, "completed", 2)] * 8))
    serving = asyncio.create_task(actor.gateway.serve())

    async def solve(*, session, raw_prompt, **_):
        with span("sandbox"):
            for _ in range(2):
                answer = asyncio.get_running_loop().create_future()
                await actor.gateway.inbox.put((session.session_id, [1], answer))
                await answer
        if raw_prompt == "fail":
            raise ValueError(raw_prompt)

    manager = GatewayManager.__new__(GatewayManager)
    manager.__dict__.update(
        gateways=[actor],
        gateway_count=1,
        active_sessions_per_gateway=[0],
        _session_to_gateway_index={},
    )
    framework = of_uni_agent.OpenAICompatibleAgentFramework.__new__(
        of_uni_agent.OpenAICompatibleAgentFramework
    )
    framework.__dict__.update(
        gateway_manager=manager,
        _inline_runners={"solver": solve},
        _log_dir=None,
        reward_loop_worker_handles=None,
    )
    takes = inspect.signature(framework._run_session).parameters

    def session(uid, number, step, prompt="prompt", **fields):
        given = {
            "sample_fields": {"raw_prompt": prompt, "uid": uid, **fields},
            "sample_index": 7,
            "session_index": number,
            "global_steps": step,
            "runner_name": "solver",
            "runner_config": SimpleNamespace(
                dispatch_mode="inline_async", trajectory_selection="all"
            ),
            "sampling_params": {},
        }
        return framework._run_session(**{name: given[name] for name in takes})

    done = await asyncio.gather(
        session("p", 0, 3),
        session("p", 1, 3),
        session("v", 0, None, validate=True),
        return_exceptions=True,
    )
    failed = await asyncio.gather(session("f", 0, 4, prompt="fail"), return_exceptions=True)
    await actor.gateway.inbox.put(None)
    await serving
    return [*(repr(each) for each in done if isinstance(each, Exception)), *map(repr, failed)]


def main():
    context.process.reset()
    report = {"failures": asyncio.run(run()), "source": of_uni_agent.__file__, "folder": DIRECTORY}
    for number in (0, 1):
        # What the trainer's process records of a sample.
        taken = {"uid": "p", "session": number, "consumed_step": 5}
        recorder.record("sample_consumed", now(), now(), taken, 3)
    probes_report.end(DIRECTORY, report)


if __name__ == "__main__":
    sys.exit(main())
