"""What each version of verl has of the probes' targets: of a pair both or neither, and the page's tables."""

import asyncio
import sys
import types

import pytest
import verl_drift
from omegaconf import OmegaConf
from reading_back import recorded_events
from verl_drift import VERSIONS

from verl_profiler.analysis.explain.fixes import FIXES
from verl_profiler.capture import probes as capture_probes
from verl_profiler.instrumentation import placing
from verl_profiler.launch.targets import Sources
from verl_profiler.probes import all_probes, experimental
from verl_profiler.recording import open_calls


def wheel_of(version):
    """Return the sources of a version; skip where they cannot be had."""
    try:
        return verl_drift.folder_of(version)
    except verl_drift.NoWheel as error:
        pytest.skip(str(error))


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


@pytest.mark.parametrize(
    "version", [None, *(pytest.param(each, marks=pytest.mark.nightly) for each in VERSIONS)]
)
def test_no_version_has_one_half_of_a_pair(version):
    """An opening without its end would last for the rest of the run; None is the installed version."""
    sources = Sources(None if version is None else wheel_of(version))
    probes = [*all_probes(), *capture_probes.PROBES]
    has = {
        target
        for target in {target for probe in probes for target in probe.targets}
        if target.startswith("verl.") and sources.definition(*target.split(":")) is not None
    }
    halves = []
    for target in has:
        owner, _, method = target.rpartition(".")
        closing = PAIRS.get(method)
        if closing is not None and not any(f"{owner}.{other}" in has for other in closing):
            halves.append(target)

    assert [] == halves
    assert version is None or len(has) > 100


@pytest.mark.nightly
def test_the_page_of_versions_is_what_their_sources_have():
    """Run `python tests/verl_drift.py --write` after a change of targets or settings."""
    made = verl_drift.page({version: wheel_of(version) for version in VERSIONS})

    assert made == verl_drift.generated(verl_drift.PAGE.read_text())


@pytest.mark.nightly
@pytest.mark.parametrize("version", VERSIONS)
def test_a_version_has_the_settings_of_the_fixes_that_it_is_given(version):
    """Hydra would refuse the command with a key that it does not have."""
    numbers = tuple(map(int, version.split(".")))
    lacking = verl_drift.settings(wheel_of(version))["fixes of findings"]["none"]
    given = {f"`{key}`" for fix in FIXES.values() if fix.since <= numbers for key in fix.keys}

    assert set() == given & {*lacking}


def test_the_tables_tell_what_a_tree_lacks(tmp_path):
    """By hand: a tree with one of a probe's engines, with another's parameters, and none of the rest."""
    for name, text in (
        ("utils/tracking.py", "class Tracking:\n    def log(self, data): ...\n"),
        ("utils/profiler/performance.py", "def _timer(name, timing_raw): ...\n"),
        ("trainer/config/_generated_ppo_trainer.yaml", "trainer: {test_freq: -1}\n"),
    ):
        file = tmp_path / "verl" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    trainer = verl_drift.families(tmp_path)["trainer"]

    assert (["`timer`"], ["`metrics`"]) == (trainer["fully"], trainer["partly"])
    assert {"`init`", "`dispatch`"} <= {*trainer["none"]}
    config = OmegaConf.create({"a": {"b": "???", "c": {}}})
    assert [True, True, False] == [
        verl_drift.has_key(config, key) for key in ("a.b", "a.c.d", "a.e")
    ]


def test_no_sample_is_expected_where_none_is_noticed(monkeypatch):
    """A verl that names them otherwise: nothing is known of its progress."""

    class FullyAsyncRollouter:
        active_tasks = max_concurrent_samples = staleness_samples = ()

        async def _should_pause_generation(self):
            return False

    name = "verl.experimental.fully_async_policy.fully_async_rollouter"
    module = types.ModuleType(name)
    module.FullyAsyncRollouter = FullyAsyncRollouter
    monkeypatch.setitem(sys.modules, name, module)
    with recorded_events():
        placing.install(experimental.PROBES)
        asyncio.run(FullyAsyncRollouter()._should_pause_generation())
        expected = open_calls.idle_ns
        placing.uninstall()
        open_calls.forget()

    assert expected is None
