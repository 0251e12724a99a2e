"""What probes record has a name and a switch, and their targets are in the installed sources."""

import importlib.util

import pytest

from verl_profiler.capture import probes
from verl_profiler.events.vocabulary import EVENTS, FAMILIES
from verl_profiler.launch.targets import find_targets, lost
from verl_profiler.probes import all_probes

# The event of these probes is chosen per call, or they record none of their own.
CONTEXT_ONLY = {"timer"}


def test_every_event_of_a_probe_is_in_the_vocabulary():
    """A reader knows what it finds."""
    unknown = {probe.event for probe in all_probes()} - EVENTS.keys() - CONTEXT_ONLY - {None}

    assert set() == unknown


def test_every_family_has_probes_and_a_switch():
    """`event_loop` is no probe; the heartbeat asks for the switch itself."""
    assert set(FAMILIES) - {"event_loop"} == {probe.family for probe in all_probes()}


@pytest.mark.verl
@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed")
def test_every_target_is_in_the_installed_sources():
    """For verl 0.9 all of them; a newer verl shows here first what has moved."""
    rows = find_targets([*all_probes(), *probes.PROBES])

    assert [] == lost(rows)
    assert [] == [row.target for row in rows if row.state == "missing" and not row.probe.optional]
    assert [] == [(row.target, row.unread) for row in rows if row.unread]
    assert sum(row.state == "found" for row in rows) >= 60
