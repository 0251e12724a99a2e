"""Memory at checkpoints, by phase, and around releases."""

import pytest
from cached_runs import cached
from picked import picked

from verl_profiler.analysis.memory import (
    memory_findings,
    memory_timeline,
    release_effects,
    sleep_times,
)
from verl_profiler.reading.reader import load

GB = 10**9
ENGINE = {"used_before": 70, "used_after": 20, "total": 80}


@pytest.fixture
def move(span):
    """A function that makes a release or resume: device numbers in GB."""

    def make(event, begin, end, tags=("kv_cache", "weights"), *, name="engine_0", **more):
        host = {"rss_before": 2, "rss_after": 3, "host_used_before": 50, "host_used_after": 52}
        kept = {key: more.pop(key) for key in ("step", "status") if key in more}
        numbers = {f"{key}_bytes": value * GB for key, value in {**host, **more}.items()}
        return span(event, begin, end, name=name, tags=list(tags), **numbers, **kept)

    return make


@pytest.fixture
def checkpoint(instant):
    """A function that makes a reading at one of verl's checkpoints, in GB."""

    def make(at_s, at, used, *, name="actor_0", total=80, **more):
        numbers = {"used_bytes": used * GB, "total_bytes": total * GB if total > 1 else total}
        return instant("memory", at_s, name=name, at=at, rss_bytes=GB, **numbers, **more)

    return make


@pytest.fixture
def step(span):
    """One step of 10 s: gen until 4 s, update_actor until 8 s, update_weights until 10 s."""
    return [
        span("step", 0, 10, name="trainer_0"),
        span("gen", 0, 4, name="trainer_0"),
        span("update_actor", 4, 8, name="trainer_0"),
        span("update_weights", 8, 10, name="trainer_0"),
    ]


def test_peaks_are_told_by_the_trainers_phase(step, checkpoint, move, tables):
    """The time decides, not the step that a process believes to be in."""
    events = [
        *step,
        checkpoint(1, "Before generate", 70, step=0),
        checkpoint(2, "After generate", 60, step=0),
        checkpoint(5, "After update", 30, step=0),
        checkpoint(9, "After resume weights", 40, step=7),
        move("memory_release", 3.5, 3.9, **ENGINE),
    ]

    rows = {(row["phase"], row["role"]): row for row in memory_timeline(tables(events))}

    assert {1} == {row["step"] for row in rows.values()}
    gen = rows["gen", "actor"]
    assert (70 * GB, 70 / 80, 60 * GB, 2) == picked(
        gen, "used_bytes used_share lowest_used_bytes readings"
    )
    assert GB == gen["rss_bytes"]
    assert 52 * GB == rows["gen", "engine"]["host_used_bytes"]
    assert (70 * GB, 20 * GB) == picked(rows["gen", "engine"], "used_bytes lowest_used_bytes")
    assert 30 * GB == rows["update_actor", "actor"]["used_bytes"]
    assert "After resume weights" == rows["update_weights", "actor"]["at"]
    assert [1, 1, 2, 3] == [row["place"] for row in memory_timeline(tables(events))]


def test_what_moved_is_the_difference_on_the_device(step, move, tables):
    """A release frees, a resume takes; both are positive where they did what they should."""
    events = [
        *step,
        move("memory_release", 3, 4, used_before=70, used_after=20, total=80),
        move("memory_release", 3, 4, name="engine_1", used_before=70, used_after=10, total=80),
        move("memory_resume", 8, 9, ("weights",), used_before=20, used_after=35, total=80),
    ]

    freed, taken = release_effects(tables(events))

    assert ("memory_release", "kv_cache, weights", 2, 2, 55 * GB, 50 * GB, 60 * GB, "moved") == (
        picked(freed, "event tags calls measured moved_bytes least_bytes most_bytes effect")
    )
    assert (15 * GB, GB, 2 * GB) == picked(taken, "moved_bytes rss_bytes host_used_bytes")
    assert [] == memory_findings(tables(events))


def test_a_saver_that_frees_nothing_is_a_fault(step, move, tables):
    """The calls succeed all the same; other processes' few megabytes do not hide it."""
    events = [
        *step,
        move("memory_release", 3, 4, used_before=70, used_after=69.9, total=80),
        move("memory_resume", 8, 9, used_before=30, used_after=30.1, total=80),
    ]

    (found,) = memory_findings(tables(events))
    asked = {"r": {"training": {"memory": {"enable_memory_saver": False}}}}
    (known,) = memory_findings(tables(events), launches=asked)

    assert ("nothing-freed", True) == (found["slug"], found["fault"])
    assert "Releases free nothing: 2 releases and resumes" in found["message"]
    assert "expandable_segments" in found["advice"]
    assert known["message"].startswith("Releases free nothing, with enable_memory_saver=false:")
    for engine, said in (
        ("vllm", "Take enable_sleep_mode=false out of rollout."),
        ("standin", "The engine standin has no memory saver."),
    ):
        asked["r"]["training"]["rollout"] = engine
        (other,) = memory_findings(tables(events), launches=asked)
        assert said == other["advice"]
        assert "enable_memory_saver" not in other["message"]


def test_checkpoints_show_it_where_no_call_was_recorded(checkpoint, tables):
    """As in console logs; a release before verl 0.7 has checkpoints of its own."""
    events = [
        checkpoint(1, "Before resume weights", 10),
        checkpoint(2, "After resume weights", 25),
        checkpoint(3, "After update_weights", 26),
        checkpoint(4, "After resume kv_cache", 66),
        checkpoint(5, "Before SGLang offload in sharding manager", 70),
        checkpoint(6, "After SGLang offload in sharding manager", 12),
        checkpoint(2.5, "After resume weights", 99, name="actor_1"),
    ]

    rows = release_effects(tables(events))

    assert [("memory_release", "all", 58), ("memory_resume", "kv_cache", 40)] == [
        (row["event"], row["tags"], row["moved_bytes"] // GB) for row in rows[:2]
    ]
    assert ("weights", 15, "checkpoint", None) == (
        rows[2]["tags"],
        rows[2]["moved_bytes"] // GB,
        rows[2]["source"],
        rows[2]["p50_s"],
    )


@pytest.mark.parametrize(
    ("memory", "slug", "says"),
    [
        ({"free_cache_engine": False}, "not-requested", "free_cache_engine is false"),
        ({"device": "cpu"}, "not-measured", "on a CPU"),
        ({}, "not-measured", "no device memory could be read"),
    ],
)
def test_what_cannot_be_told_is_said_with_its_reason(step, move, tables, memory, slug, says):
    """None of it is a fault."""
    launches = {"r": {"training": {"memory": memory}}}
    (found,) = memory_findings(tables([*step, move("memory_release", 3, 4)]), launches=launches)

    assert (slug, False) == (found["slug"], found["fault"])
    assert says in found["message"]


def test_other_tags_than_promised_are_a_fault(step, move, tables):
    """An adapter keeps its weights; then nobody should count on that memory."""
    launches = {"r": {"training": {"memory": {"tags": ["weights"]}}}}
    events = [*step, move("memory_release", 3, 4, ("kv_cache",), **ENGINE)]
    (found,) = memory_findings(tables(events), launches=launches)

    assert ("other-tags", True) == (found["slug"], found["fault"])


def test_sleep_and_wake_are_those_of_the_slowest_process(step, move, tables):
    """They happen at the same time; failed calls are counted."""
    events = [
        *step,
        move("memory_release", 3, 3.5),
        move("memory_release", 3, 4, name="engine_1", status="error"),
        move("memory_resume", 8, 8.25, ("weights",)),
        move("memory_resume", 9, 9.5, ("kv_cache",)),
    ]

    (row,) = sleep_times(tables(events))

    assert (2, 2, 1) == (row["releases"], row["resumes"], row["failed"])
    assert (1.0, 0.75, "engine_0") == (row["release_s"], row["resume_s"], row["slowest"])
    assert (10.0, 0.175) == (row["step_s"], row["share"])


def test_a_sampled_device_has_the_memory_of_each_phase():
    """A recorded run on an H100; MiB of nvidia-smi, every 0.2 s, the highest in each phase."""
    with load(cached("h100_sglang")) as run:
        rows = memory_timeline(run.tables, (1, 1))
    used = {row["phase"]: row["used_bytes"] / 2**20 for row in rows if row["role"] == "device"}

    for phase, mib in (("gen", 35_174), ("old_log_prob", 11_330), ("ref", 5_948)):
        assert used[phase] == pytest.approx(mib, rel=0.01), phase
