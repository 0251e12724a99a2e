"""The switches of TransferQueue tracing: settings, environment over them, and the way to others."""

import pytest

from verl_profiler.errors import ConfigError
from verl_profiler.launch.settings import parse
from verl_profiler.transfer_queue.switches import RUN_VARIABLE, Switches, TracingSettings, variables


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
        Switches(detail=True, ranges=True, metrics=False, sample_every=10),
        Switches(metrics=True),
    ],
)
def test_the_switches_arrive_in_other_processes(switches):
    """The other processes read the same switches from their environment."""
    assert switches == Switches().under(variables(switches, {}))


def test_the_log_level_goes_along():
    """And every launch has a name of its own."""
    first = variables(Switches(trace=True), {"VERL_LOGGING_LEVEL": "DEBUG"})
    second = variables(Switches(trace=True), {})

    assert "DEBUG" == first["VERL_LOGGING_LEVEL"]
    assert "VERL_LOGGING_LEVEL" not in second
    assert first[RUN_VARIABLE] != second[RUN_VARIABLE]


@pytest.mark.parametrize(
    ("switches", "any_", "metrics"),
    [
        (Switches(), False, False),
        (Switches(trace=True), True, True),
        (Switches(trace=True, metrics=False), True, False),
        (Switches(metrics=True), True, True),
    ],
)
def test_metrics_come_with_the_others_unless_said_otherwise(switches, any_, metrics):
    """`metrics: null` follows."""
    assert (any_, metrics) == (switches.any, switches.wants_metrics)


@pytest.mark.parametrize(("rate", "every"), [(1, 1), (0.1, 10), (0.3, 3), (0.001, 1000)])
def test_a_rate_is_every_nth_call(rate, every):
    """Rounded; the lines say the N that is used."""
    environment = {"TQ_TRACE_SAMPLE_RATE": str(rate)}
    switches = Switches().under(environment)
    assert every == switches.sample_every
    # In a job that has the rate, its processes get both.
    assert switches == Switches().under({**variables(switches, {}), **environment})


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"TQ_TRACE_ENABLED": "ja"}, "TQ_TRACE_ENABLED=ja in the environment: use 1 or 0"),
        ({"TQ_TRACE_SAMPLE_EVERY": "often"}, "use 1 for all calls, 10 for every tenth"),
        (
            {"TQ_TRACE_SAMPLE_EVERY": "0"},
            "TQ_TRACE_SAMPLE_EVERY=0 in the environment: use 1 for all calls",
        ),
        (
            {"TQ_TRACE_SAMPLE_RATE": "10"},
            "TQ_TRACE_SAMPLE_RATE=10 in the environment: it must be above 0",
        ),
        ({"TQ_TRACE_SAMPLE_RATE": "0.1", "TQ_TRACE_SAMPLE_EVERY": "2"}, "Keep one of them"),
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
