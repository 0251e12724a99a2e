"""The load balancer's choices, against a balancer that the test plays by hand."""

import json

from picked import picked

from verl_profiler.analysis.engine import routes

# Request, turn, server, and the loads before the call: of the chosen replica and the smallest.
CHOICES = [
    ("a", 0, "east", 0, 0),
    ("b", 0, "west", 0, 0),
    ("c", 0, "east", 1, 1),
    # Requests a and c stay with their replica, while b has ended.
    ("a", 1, "east", 1, 0),
    ("c", 1, "east", 2, 0),
    ("d", 0, "west", 0, 0),
    # The replica of a left.
    ("a", 2, "west", 1, 0),
]


def choices(span, *, loads="all", clock_s=0.0, **request):
    """Events as they are recorded; with sampled details the balancer's only where the loads differ."""
    found = []
    seen = set()
    for place, (name, turn, server, load, least) in enumerate(CHOICES):
        at = 10 + place
        who = {"request_id": name, "turn": turn, "step": 3, **request}
        found += [
            span("server_acquire", at, at + 0.1, server=server, **who),
            span("engine_call", at, at + 0.9, engine_request_id=f"{name}{turn}", **who),
        ]
        if name == "a" and turn == 0:
            found.append(
                span("engine_request", at, at + 0.8, name="engine_1", engine_request_id="a0")
            )
        if loads == "all" or (loads == "unbalanced" and load > least):
            moment = at + 0.05 + clock_s
            # The other replica has the fewest wherever this one has not.
            both = [load, least] if server == "east" else [least, load]
            own = {"in_flight": load, "server": server, "loads": both}
            if least != load:
                own["least_in_flight"] = least
            own["reason"] = "sticky" if (name, server) in seen else "least_loaded"
            if place == 0 or loads == "unbalanced":
                own["servers"] = ["east", "west"]
            route = span("server_route", moment, moment, name="load_balancer_0", step=None, **own)
            found.append({**route, "request_id": name, "duration_us": None})
        seen.add((name, server))
    return found


def test_calls_are_counted_by_replica_with_their_loads(span, tables):
    """Steps and turns are the client's, since a load balancer is told none."""
    east, west = routes(tables(choices(span)))

    assert {
        "run": "r",
        "step": 3,
        "server": "east",
        "replica": "engine_1",
        "calls": 4,
        "share": 4 / 7,
        "sticky": 2,
        "least_loaded": 2,
        "by_hash": 0,
        "only_one": 0,
        "unbalanced": 2,
        "excess": 0.75,
        "max_excess": 2,
        "estimated": False,
    } == east
    assert ("west", None, 3, 0, 1, 1 / 3) == picked(
        west, "server replica calls sticky unbalanced excess"
    )


def test_unbalanced_calls_alone_give_the_same_loads(span, tables):
    """As they are recorded with sampled details."""
    east, _ = routes(tables(choices(span, loads="unbalanced")))

    assert (2, 0.75, 2) == (east["unbalanced"], east["excess"], east["max_excess"])


def test_clocks_of_two_hosts_may_differ(span, tables):
    """A route is joined though it seems to lie a little before the client's call."""
    east, _ = routes(tables(choices(span, clock_s=-0.0515)))

    assert (2, 0.75) == (east["unbalanced"], east["excess"])


def test_loads_that_were_not_recorded_are_not_zero(span, tables):
    """Of runs of an older version, or of a balancer with rules of its own."""
    east, _ = routes(tables(choices(span, loads="none")))

    names = ("calls", "sticky", "least_loaded", "only_one", "unbalanced", "excess", "max_excess")
    assert (4, 2, None, None, None, None, None) == tuple(east[key] for key in names)


def test_validation_is_apart(span, tables):
    """Its calls have rows of their own."""
    validating = tables(choices(span, validate=True))

    assert [] == routes(validating)
    assert [4, 3] == [row["calls"] for row in routes(validating, validate=True)]


def test_loads_of_all_replicas_are_with_each_call(span, tables):
    """The replicas' names are in the balancer's first line only."""
    rows = tables(choices(span)).rows(
        "SELECT request_id, turn, reason, loads FROM server_routes ORDER BY at_us"
    )

    assert [
        ("a", 0, "least_loaded", {"east": 0, "west": 0}),
        ("b", 0, "least_loaded", {"east": 0, "west": 0}),
        ("c", 0, "least_loaded", {"east": 1, "west": 1}),
        ("a", 1, "sticky", {"east": 1, "west": 0}),
        ("c", 1, "sticky", {"east": 2, "west": 0}),
        ("d", 0, "least_loaded", {"east": 0, "west": 0}),
        ("a", 2, "least_loaded", {"east": 0, "west": 1}),
    ] == [(row["request_id"], row["turn"], row["reason"], json.loads(row["loads"])) for row in rows]


def test_loads_of_another_form_cost_themselves_alone(span, tables):
    """Not the whole report, as when all columns of a small run are made at once."""
    events = choices(span)
    for each in events:
        if each["event"] == "server_route":
            each["extra"] = {**each["extra"], "loads": {"east": 1}}

    assert routes(tables(events))
