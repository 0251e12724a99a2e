"""The switches of TransferQueue tracing: settings, environment over them, and the way to others."""

import pytest

from verl_profiler.errors import ConfigError
from verl_profiler.launch.settings import parse
from verl_profiler.transfer_queue.switches import Switches, TracingSettings, variables


def test_the_environment_wins():
    """In both directions; other variables change nothing."""
    settings = TracingSettings(trace=True, detail=False)
    switches = Switches(trace=True, sample_every=3)
    assert switches == switches.under({"PATH": "/bin"})
    under = settings.under(
        {"TQ_TRACE_ENABLED": "0", "TQ_TRACE_DETAIL_ENABLED": "1", "TQ_TRACE_SAMPLE_EVERY": "10"}
    )

    assert (False, True, 10) == (under.trace, under.detail, under.sample_every)


@pytest.mark.parametrize(
    "switches",
    [
        Switches(),
        Switches(trace=True),
        Switches(detail=True, metrics=False, sample_every=10),
        Switches(metrics=True),
    ],
)
def test_the_switches_arrive_in_other_processes(switches):
    """The other processes read the same switches from their environment."""
    assert switches == Switches().under(variables(switches, {}))


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"TQ_TRACE_ENABLED": "ja"}, "TQ_TRACE_ENABLED=ja in the environment: use 1 or 0"),
        (
            {"TQ_TRACE_SAMPLE_EVERY": "0"},
            "TQ_TRACE_SAMPLE_EVERY=0 in the environment: use 1 for all calls",
        ),
    ],
)
def test_a_variable_that_cannot_be_read_names_itself_and_the_mend(environment, says):
    """Before training."""
    with pytest.raises(ConfigError) as caught:
        Switches().under(environment)

    assert says in str(caught.value)
    assert "config-value" == caught.value.slug


@pytest.mark.parametrize(
    ("node", "says"),
    [
        ({"trase": True}, "Did you mean profiler.transfer_queue.trace?"),
        ({"trace": "yes"}, "profiler.transfer_queue.trace: Expected `bool`, got `str`"),
    ],
)
def test_a_wrong_setting_names_its_place_and_the_mend(node, says):
    """As all other settings do."""
    with pytest.raises(ConfigError) as caught:
        parse({"output_dir": "x", "transfer_queue": node})

    assert says in str(caught.value)
