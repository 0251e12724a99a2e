"""Shares of events, each of its own whole."""

from verl_profiler.analysis.time_split import event_shares


def test_each_event_has_the_whole_that_it_is_part_of(tables, conversation, span):
    """The step, all requests, or the step in each process of the role."""
    events = [
        span("step", 0, 20, name="trainer_0"),
        span("gen", 0, 12, name="trainer_0"),
        span("testing", 20, 60, name="trainer_0"),
        *conversation("a"),
        *conversation("b", scale=0.5),
        span("update_actor", 12, 17, name="actor_0"),
        span("update_actor", 12, 15, name="actor_1"),
    ]

    shares = {(row["role"], row["event"]): row for row in event_shares(tables(events))}

    assert ("step", 0.6) == (
        shares["trainer", "gen"]["whole"],
        shares["trainer", "gen"]["share"],
    )
    assert ("requests", 0.5) == (
        shares["agent_loop", "engine_call"]["whole"],
        shares["agent_loop", "engine_call"]["share"],
    )
    assert ("processes", 0.2) == (
        shares["actor", "update_actor"]["whole"],
        shares["actor", "update_actor"]["share"],
    )
    assert ("trainer", "testing") not in shares


def test_an_unfinished_step_is_no_whole(tables, span):
    """A share of something that did not end is not known."""
    (row,) = event_shares(tables([span("update_actor", 0, 5, name="actor_0")]))

    assert (5.0, None, None) == (row["total_s"], row["whole_s"], row["share"])
