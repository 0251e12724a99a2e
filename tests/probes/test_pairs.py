"""What one probe begins another one ends: each version of verl has both of their targets, or neither.

`data/verl_methods.json` has the targets by version; `verl_methods.py` writes it from verl's wheels.
"""

import asyncio
import json
import sys
import types

import pytest
import verl_methods

from verl_profiler.instrumentation import placing
from verl_profiler.probes import experimental
from verl_profiler.recording import open_calls
from verl_profiler.testing import recorded_events

# Methods of one class: what is called while something is open, and what closes it.
PAIRS = {
    "abort_all_requests": ("open_submission_gate", "resume_generation"),
    "abort_replicas": ("resume_generation_replicas",),
    "release": ("resume",),
    "sleep": ("wake_up",),
    "switch_to_rollout": ("switch_to_trainer",),
    "activate_hybrid_replicas": ("deactivate_hybrid_replicas",),
    "remove_replicas_from_balancer": ("add_replicas_to_balancer",),
    "_start_profiling": ("_stop_profiling",),
    # A turn, and the time in which its tools run.
    "_handle_generating_state": ("_handle_processing_tools_state",),
    "_call_tool": ("_handle_processing_tools_state",),
    # A limit that is reached ends a rollouter's wait for its next sample.
    "_should_pause_generation": ("_process_single_sample_streaming",),
    "put_sample": ("get_sample",),
    "_async_gen_next_batch": ("_fit_generate",),
    # Why a group is cleared, and prompts are added.
    "_clear_groups": ("_evict_terminal_groups",),
    "_add_async_warmup_batches": ("_add_prompts_to_generate",),
    "_add_prompts_to_generate": ("_submit_batch_to_rollout",),
    # The step of a server's next requests.
    "set_global_steps": ("generate",),
}


def test_no_version_has_one_half_of_a_pair():
    """An opening without its end would last for the rest of the run."""
    table = json.loads(verl_methods.TABLE.read_text())
    has = {target: table.get(target, "").split() for target in verl_methods.targets()}
    halves = []
    for target, versions in has.items():
        owner, _, method = target.rpartition(".")
        closing = {
            version
            for other in PAIRS.get(method, ())
            for version in has.get(f"{owner}.{other}", ())
        }
        if method in PAIRS:
            halves += [(version, target) for version in versions if version not in closing]

    assert [] == halves


def test_the_table_has_every_target():
    """Run `python tests/verl_methods.py WHEELS` after a change of targets."""
    assert verl_methods.targets() == [*json.loads(verl_methods.TABLE.read_text())]


@pytest.fixture
def rollouter(monkeypatch):
    """Give a function that puts a stub in the place of verl's rollouter, and returns one of it."""

    def make(*, has_samples):
        class FullyAsyncRollouter:
            active_tasks = max_concurrent_samples = staleness_samples = ()

            async def _should_pause_generation(self):
                return False

            async def _process_single_sample_streaming(self, rollout_sample):
                pass

        if not has_samples:
            del FullyAsyncRollouter._process_single_sample_streaming
        name = "verl.experimental.fully_async_policy.fully_async_rollouter"
        module = types.ModuleType(name)
        module.FullyAsyncRollouter = FullyAsyncRollouter
        monkeypatch.setitem(sys.modules, name, module)
        placing.install(experimental.PROBES)
        return FullyAsyncRollouter()

    monkeypatch.setattr(experimental, "_rollouter", experimental._Rollouter())
    with recorded_events():
        yield make
        placing.uninstall()
        open_calls.forget()


def test_samples_are_progress_where_verl_does_not_count_them(rollouter):
    """As verl 0.8: without it, a wait for the next sample would last from the first check on."""
    made = rollouter(has_samples=True)
    asyncio.run(made._should_pause_generation())
    waits = [open_calls.idle_ns]
    for number in (1, 2):
        asyncio.run(made._process_single_sample_streaming(types.SimpleNamespace(sample_id=number)))
        waits.append(open_calls.idle_ns)

    assert None not in waits
    assert sorted({*waits}) == waits


def test_no_sample_is_expected_where_none_is_noticed(rollouter):
    """A verl that names them otherwise: nothing is known of its progress."""
    made = rollouter(has_samples=False)
    asyncio.run(made._should_pause_generation())

    assert open_calls.idle_ns is None
