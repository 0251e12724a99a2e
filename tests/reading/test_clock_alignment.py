"""Clocks of several hosts on one axis: simulated skews, real other clocks, and what is said of them."""

import json
import random
from datetime import datetime, timezone

import pytest
from event_files import line, write_header, write_lines
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_profiler.nodes import clock
from verl_profiler.reading.processes import fit
from verl_profiler.reading.reader import load

SECOND = 10**9
WALL_NS = 1_795_228_400 * SECOND


class Network:
    """Two clocks and what lies between them.

    Args:
        offset_ns: By how much the other clock is ahead at the driver's time 0.
        drift: By how much it gains per nanosecond.
        delay_ns: The least time that a message takes, in each direction.
        jitter_ns: What is added to it at most, and to each direction apart.
    """

    def __init__(self, offset_ns, drift, delay_ns=100_000, jitter_ns=400_000, seed=0):
        self.offset_ns, self.drift = offset_ns, drift
        self._delay_ns, self._jitter_ns = delay_ns, jitter_ns
        self._source = random.Random(seed)
        self.time_ns = 0

    def other(self, driver_ns):
        return round(driver_ns + self.offset_ns + self.drift * driver_ns)

    def now(self):
        return self.time_ns

    def ask(self):
        self.time_ns += self._delay_ns + self._source.randrange(self._jitter_ns)
        told = self.other(self.time_ns)
        self.time_ns += self._delay_ns + self._source.randrange(self._jitter_ns)
        return told

    def samples(self, monkeypatch, bursts=40, every_s=30):
        monkeypatch.setattr(clock, "now", self.now)
        taken = []
        for _ in range(bursts):
            taken.append(clock.exchange(self.ask))
            self.time_ns += every_s * SECOND
        return taken


@settings(max_examples=60, deadline=None)
@given(
    offset_ns=st.integers(-(10**15), 10**15),
    drift=st.floats(-1e-4, 1e-4),
    delay_ns=st.integers(1_000, 20_000_000),
    jitter_ns=st.integers(1, 20_000_000),
    bursts=st.integers(1, 60),
    seed=st.integers(0, 1000),
)
def test_the_truth_is_within_the_bound(offset_ns, drift, delay_ns, jitter_ns, bursts, seed):
    """Wherever clocks were compared, whatever the network did with each half of the way."""
    network = Network(offset_ns, drift, delay_ns, jitter_ns, seed)
    with pytest.MonkeyPatch.context() as patch:
        samples = network.samples(patch, bursts)
    for at_ns, ahead_ns, bound_ns in samples:
        assert abs(network.other(at_ns) - at_ns - ahead_ns) <= bound_ns + abs(drift) * bound_ns + 1
    line = fit(samples)

    limit = 4 * sorted(bound for _, _, bound in samples)[len(samples) // 2]
    for at_ns, _, bound_ns in samples:
        if bound_ns <= limit / 4:
            other_ns = network.other(at_ns)
            said = line.offset_ns + line.drift * (other_ns - line.at_ns)
            assert abs(said - (other_ns - at_ns)) <= line.bound_ns + 50


def test_a_usual_network_is_aligned_to_half_a_millisecond(monkeypatch):
    """0.1 to 0.5 ms each way, clocks 20 ppm apart, an hour; one comparison that took a second loosens nothing.

    Few comparisons give no drift: over some seconds it would be noise, and be multiplied.
    """
    samples = Network(7 * SECOND, 2e-5).samples(monkeypatch, bursts=120)
    line = fit(samples)
    assert pytest.approx(2e-5, abs=2e-8) == line.drift
    assert line.bound_ns < 500_000
    samples[10] = [samples[10][0], samples[10][1] + 400_000_000, 500_000_000]
    assert line.bound_ns == pytest.approx(fit(samples).bound_ns, rel=0.05)
    assert 119 == fit(samples).samples
    assert 0.0 == fit(Network(SECOND, 0.0).samples(monkeypatch, bursts=3, every_s=5)).drift
    assert fit([]) is None


def write_run(folder, network, *, exchange=None, wall_error_ns=0):
    """Write calls of a worker on the driver's host to an engine on another, every minute.

    The engine has each request for all of the call but 2 ms at either end.
    """
    anchors = {
        "a": (WALL_NS, 0),
        # Taken at the driver's time 0 from a wall clock that is wrong.
        "b": (WALL_NS + wall_error_ns, network.other(0)),
    }
    folder.mkdir()
    clocks = {
        boot: {"boot_id": boot, "wall_ns": wall, "monotonic_ns": monotonic, "uncertainty_ns": 50}
        for boot, (wall, monotonic) in anchors.items()
    }
    launch = {"format": 1, "launched": "x", "clock": clocks["a"]}
    (folder / "run.json").write_text(json.dumps(launch))
    headers = {"driver_a_1": "a", "worker_0": "a", "engine_0": "b"}
    for name, boot in headers.items():
        header = {"host": boot, "clock": clocks[boot], "ended": "2026-11-21T09:00:00+00:00"}
        if name == "driver_a_1" and exchange:
            header["clock_exchange"] = {
                "boot_id": "a",
                "peers": [{"boot_id": "b", "host": "b", "samples": exchange}],
            }
        write_header(folder, name, **header)
    truths = []
    for number in range(60):
        begin_ns, end_ns = (number * 60 + 5) * SECOND, (number * 60 + 46) * SECOND
        for name, event, first_ns, last_ns in (
            ("worker_0", "engine_call", begin_ns, end_ns),
            ("engine_0", "engine_request", begin_ns + 2_000_000, end_ns - 2_000_000),
        ):
            wall, monotonic = anchors[headers[name]]
            clock = network.other if headers[name] == "b" else round
            at = [(wall + clock(each) - monotonic) // 1000 for each in (first_ns, last_ns)]
            moment = datetime.fromtimestamp(at[1] // 10**6, timezone.utc)
            written = line(
                event=event,
                timestamp=f"{moment:%Y-%m-%dT%H:%M:%S}.{at[1] % 10**6:06}+00:00",
                duration_sec=(at[1] - at[0]) / 1e6,
                extra={"engine_request_id": f"e{number}", "request_id": "q", "turn": number},
            )
            write_lines(folder, **{name: [json.loads(written)]})
            truths.append(
                (name, number, *((WALL_NS + each) // 1000 for each in (first_ns, last_ns)))
            )
    return truths


def worst_us(opened, truths):
    """Return by how much the engine's times are wrong at most."""
    rows = opened.rows("SELECT name, turn, begin_us, end_us FROM events")
    found = {(row["name"], row["turn"]): (row["begin_us"], row["end_us"]) for row in rows}
    return max(
        abs(own - truth)
        for name, number, *times in truths
        for own, truth in zip(found[name, number], times, strict=True)
    )


@pytest.mark.parametrize(
    ("wall_error_ns", "drift"), [(0, 0.0), (37_000_000, 4e-5), (-3 * SECOND, -8e-5)]
)
def test_hosts_are_placed_within_the_stated_bound(tmp_path, monkeypatch, wall_error_ns, drift):
    """An hour with clocks that are wrong and drift: below a millisecond, and no request comes early."""
    network = Network(86_400 * SECOND, drift, seed=5)
    exchange = network.samples(monkeypatch, bursts=120)
    truths = write_run(tmp_path / "run", network, exchange=exchange, wall_error_ns=wall_error_ns)

    with load(tmp_path / "run", cache=False) as opened:
        (bound,) = opened.rows("SELECT clock_bound_us AS us FROM processes WHERE host = 'b'")
        assert worst_us(opened, truths) <= bound["us"] < 1000
        assert any("clocks aligned with the driver's: b (moved by" in p for p in opened.problems)
        assert not any("before they were sent" in p for p in opened.problems)


def test_without_comparisons_contradictions_are_said(tmp_path):
    """The wall clock of the engine's host is 37 ms behind: its requests seem to come before they are sent."""
    network = Network(86_400 * SECOND, 0.0)
    truths = write_run(tmp_path / "run", network, wall_error_ns=-37_000_000)

    with load(tmp_path / "run", cache=False) as opened:
        assert 37_000 == worst_us(opened, truths)
        problems = "\n".join(opened.problems)
    assert "the clocks of b were not compared with the driver's" in problems
    assert "60 of 60 generate calls from host a appear on host b before they were sent" in problems
    # 2 ms of the 37 cannot be seen.
    assert "differ by at least 35.000 ms" in problems


def test_few_samples_are_kept():
    """A week of bursts stays small, and so does a year of new nodes."""
    clock.begin()
    assert {} == clock.account()
    for number in range(2000):
        clock.keep("other", "there", [number, 0, 1])

    (peer,) = clock.account()["clock_exchange"]["peers"]
    kept = [at for at, _, _ in peer["samples"]]
    assert ("other", "there") == (peer["boot_id"], peer["host"])
    assert len(kept) <= 128
    assert (0, 1999) == (kept[0], kept[-1])
    assert kept == sorted(kept)
    for number in range(1000):
        clock.keep(f"boot-n{number}", "there", [2000 + number, 0, 1])
    boots = [peer["boot_id"] for peer in clock.account()["clock_exchange"]["peers"]]
    assert len(boots) <= 256
    assert "boot-n999" in boots


def test_questions_and_answers_bound_the_difference_apart(monkeypatch):
    """A quick question in one exchange and a quick answer in another: a hundredth of what each says alone."""
    moments = iter([0, 1_010_000, 2_000_000, 3_010_000])
    told = iter([7_000_010_000, 7_003_000_000])
    monkeypatch.setattr(clock, "now", lambda: next(moments))
    _, ahead, bound = clock.exchange(lambda: next(told), tries=2)

    # 10 us each way, and what the clocks may have drifted between the exchanges.
    assert 7_000_000_000 == pytest.approx(ahead, abs=bound)
    assert 10_000 < bound < 12_000
