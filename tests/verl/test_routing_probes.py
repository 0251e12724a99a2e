"""What is recorded of the load balancer's choices, on verl's own class."""


def test_each_choice_has_its_reason_and_the_load_of_every_replica(reported):
    """Loads are those before the call, counted by hand; a choice that fails leaves no event."""
    report = reported("routing_probes.py", probed=True)
    routes = [x for x in report["events"] if x["event"] == "server_route"]
    first, second, again, third, fourth, none, hashed, same, *others = report["chosen"]
    alone, still, sixth, seventh, last = others
    at = {"east": 0, "west": 1}

    def loads(server, own, other):
        return [own, other] if at[server] == 0 else [other, own]

    assert {} == report["errors"]
    assert (first, first, second, None, hashed) == (again, third, fourth, none, same)
    assert ("east", "east") == (alone, still)
    assert {"west", "south"} == {sixth, seventh}
    assert last == seventh
    both, other_two = ["east", "west"], ["west", "south"]
    assert [
        ("one", first, "least_loaded", 0, None, [0, 0], both),
        ("two", second, "least_loaded", 0, None, loads(first, 1, 0), None),
        ("one", first, "sticky", 1, None, [1, 1], None),
        # The second call of `one` adds to two calls; that of `two` has ended.
        ("one", first, "sticky", 2, 0, loads(first, 2, 0), None),
        ("three", second, "least_loaded", 0, None, loads(first, 3, 0), None),
        ("five", hashed, "hash", 0, None, [0, 0], both),
        (report["same"], hashed, "hash", 1, 0, loads(hashed, 1, 0), None),
        ("six", "east", "only_one", 0, None, [0], ["east"]),
        ("six", "east", "only_one", 1, None, [1], None),
        ("six", sixth, "least_loaded", 0, None, [0, 0], other_two),
        ("seven", seventh, "least_loaded", 0, None, [int(x == sixth) for x in other_two], None),
        ("seven", seventh, "sticky", 1, None, [1, 1], None),
    ] == [
        tuple(
            x["extra"].get(key)
            for key in (
                "request_id",
                "server",
                "reason",
                "in_flight",
                "least_in_flight",
                "loads",
                "servers",
            )
        )
        for x in routes
    ]
    assert all("duration_sec" not in x for x in routes)


def test_with_sampled_details_only_calls_that_another_replica_was_freer_for_are_recorded(reported):
    """The others follow from the client's own line, of which most are left out then."""
    report = reported("routing_probes.py", "0.5", probed=True)
    first, _, _, _, _, _, hashed, *_ = report["chosen"]
    routes = [x["extra"] for x in report["events"] if x["event"] == "server_route"]

    assert [("one", first, 2, 0), (report["same"], hashed, 1, 0)] == [
        tuple(x[key] for key in ("request_id", "server", "in_flight", "least_in_flight"))
        for x in routes
    ]
    assert all(["east", "west"] == x["servers"] for x in routes)
