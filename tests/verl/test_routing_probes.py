"""What is recorded of the load balancer's choices, on verl's own class."""


def test_calls_that_were_not_sent_to_the_least_loaded_replica_are_recorded(reported):
    """Loads are those before the call, counted by hand; a choice that fails leaves no event."""
    report = reported("routing_probes.py")
    routes = [x for x in report["events"] if x["event"] == "server_route"]
    first, second, again, third, fourth, none, hashed, same = report["chosen"]

    assert {} == report["errors"]
    assert (first, first, second, None, hashed) == (again, third, fourth, none, same)
    # The second call of `one` adds to one call on each replica; the third to two, and none elsewhere.
    assert [
        ("one", first, "sticky", 2, 0),
        (report["same"], hashed, "hash", 1, 0),
    ] == [
        tuple(
            x["extra"][key]
            for key in ("request_id", "server", "reason", "in_flight", "least_in_flight")
        )
        for x in routes
    ]
    assert all("duration_sec" not in x for x in routes)
