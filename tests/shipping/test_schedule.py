"""When shipments are due: after seconds, or after steps."""

import pytest

from verl_profiler.shipping import schedule
from verl_profiler.shipping.schedule import Schedule, newest_step


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test sets, in seconds."""
    at = [100.0]
    monkeypatch.setattr(schedule.time, "monotonic", lambda: at[0])
    return at


def begin(run, *names):
    for name in names:
        (run / name).mkdir()


def test_the_newest_step_is_that_of_the_folders(tmp_path):
    assert 0 == newest_step(tmp_path / "missing")
    begin(tmp_path, "step_0", "step_9", "step_10", "processes", "steps")
    assert 10 == newest_step(tmp_path)


def test_without_steps_seconds_alone_count(tmp_path, clock):
    due = Schedule(tmp_path, 60.0)
    assert 60.0 == due.look_s
    begin(tmp_path, "step_500")
    clock[0] += 59
    assert not due.is_due()
    clock[0] += 1
    assert due.is_due()
    assert not due.is_due()


def test_so_many_steps_later_it_is_due_before_the_time_is_up(tmp_path, clock):
    begin(tmp_path, "step_0", "step_7")
    due = Schedule(tmp_path, 60.0, 3)
    assert 5.0 == due.look_s
    for step, expected in (
        (8, False),
        (9, False),
        (10, True),
        (11, False),
        (12, False),
        (14, True),
    ):
        clock[0] += 1
        begin(tmp_path, f"step_{step}")
        assert expected is due.is_due(), step
    begin(tmp_path, "step_15")
    clock[0] += 60
    assert due.is_due()
    # Both count anew from there.
    begin(tmp_path, "step_16", "step_17")
    assert not due.is_due()
    begin(tmp_path, "step_18")
    assert due.is_due()
