"""What holds for every analysis: nothing in, nothing out; no order; validation apart."""

import math

import pytest
from analyses import ANALYSES

from verl_profiler.reading.tables.tables import Tables

NOT_IN_A_REHEARSAL = (
    *("own_spans", "memory_peaks", "captures"),
    *("memory_timeline", "memory_over_time", "phase_spans"),
    *("range_times", "top_kernels", "gpu_idle", "routes"),
    *(
        "engine_load",
        "engine_load_over_time",
        "phase_efficiency",
        "device_use",
        "device_times",
        "staleness",
        "staleness_causes",
        "critical_cycle",
    ),
)
VALIDATING = [
    name
    for name, function in ANALYSES.items()
    if "validate" in (function.__kwdefaults__ or {}) and name not in NOT_IN_A_REHEARSAL
]


def close(rows):
    """Round floats: sums of floats may differ in their last digits."""
    return [
        {key: round(v, 6) if isinstance(v, float) else v for key, v in row.items()} for row in rows
    ]


@pytest.fixture(scope="module")
def damaged(tables, conversation, span):
    """Runs as a killed process or a zero clock leaves them, by what is wrong."""
    killed = [
        event for event in conversation("killed") if event["event"] not in ("request", "agent_loop")
    ]
    return {
        "nothing": Tables.of({}),
        "one request": tables(conversation()),
        "no time at all": tables(conversation(scale=0.0)),
        "unfinished": tables(
            [
                *conversation(),
                *killed,
                span("request", 0, 99, request_id="cut", status="unfinished"),
                span("gen", 0, 50, name="trainer_0"),
            ]
        ),
    }


def test_no_events_give_no_rows(damaged):
    """An empty run is not an error."""
    assert [] == [name for name in ANALYSES if ANALYSES[name](damaged["nothing"])]


def test_numbers_are_finite_or_not_there(damaged):
    """One request has no spread and no trend; a whole of length zero has no shares."""
    wrong = [
        (name, what, row)
        for name, analysis in ANALYSES.items()
        for what in ("one request", "no time at all", "unfinished")
        for row in analysis(damaged[what])
        if not all(math.isfinite(value) for value in row.values() if isinstance(value, float))
    ]

    assert [] == wrong


def test_the_order_of_events_does_not_matter(rehearsed, shuffled):
    """Files may be read in any order: the same rows, in the same order."""
    rows = {name: close(analysis(rehearsed.tables)) for name, analysis in ANALYSES.items()}

    assert [] == [name for name in ANALYSES if rows[name] != close(ANALYSES[name](shuffled))]
    # The rehearsal was on one CPU host, without captures, and before memory was read around releases,
    # the load balancer's choices were recorded and engines were asked for their load.
    empty = [name for name in ANALYSES if not rows[name] and "tq_" not in name]
    assert {*empty} <= {*NOT_IN_A_REHEARSAL}


def test_steps_narrow_every_analysis(rehearsed):
    """With one step chosen, no row is of another one."""
    steps = {
        name: {row["step"] for row in analysis(rehearsed.tables, (2, 2)) if "step" in row}
        for name, analysis in ANALYSES.items()
    }

    assert {} == {name: found for name, found in steps.items() if not found <= {2, None}}
    assert [] == [name for name in ANALYSES if ANALYSES[name](rehearsed.tables, (77, 78))]


def test_validation_is_never_mixed_in(rehearsed):
    """Training and validation of the same step have rows of their own, from different requests."""
    wrong = [
        (name, fault)
        for name in VALIDATING
        for fault in mixed(
            name, ANALYSES[name](rehearsed.tables), ANALYSES[name](rehearsed.tables, validate=True)
        )
    ]

    assert len(VALIDATING) > 6
    assert [] == wrong


def mixed(name, training, validation):
    """Yield what is wrong with the rows of training and validation."""
    if not training or not validation:
        yield "no rows"
    if close(training) == close(validation):
        yield "the same rows"
    # The first validation runs before the first step, and is the only thing that does.
    if not any(row.get("step", 0) == 0 for row in validation):
        yield "no first validation"
    if any(row.get("step") == 0 for row in training):
        yield "training before the first step"
