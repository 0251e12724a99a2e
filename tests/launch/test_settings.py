"""Settings: messages about invalid ones name the place and the fix."""

import pytest

from verl_profiler.errors import ConfigError
from verl_profiler.events.vocabulary import FAMILIES
from verl_profiler.launch.settings import parse
from verl_profiler.recording.clock import take_anchor
from verl_profiler.recording.worker_config import EventSettings, WorkerConfig


def test_what_travels_comes_back_the_same():
    """The one-line form loses nothing, and what was a tuple is one."""
    some = EventSettings(steps=(1, 2), exclude=("memory",), max_gb=2.0)
    for events, clock, steps in ((some, take_anchor(), (3,)), (EventSettings(), None, ())):
        sent = WorkerConfig("/runs/a", "runs/a", events, clock, captured_steps=steps)

        assert sent == WorkerConfig.decode(sent.encode())


def test_all_families_are_on_unless_excluded():
    """And none where events are off."""
    some = parse({"output_dir": "x", "events": {"exclude": ["memory"]}})
    none = parse({"output_dir": "x", "events": {"enabled": False}})

    assert frozenset(FAMILIES) - {"memory"} == some.events.active_families()
    assert frozenset() == none.events.active_families()


@pytest.mark.parametrize(
    ("node", "slug", "says"),
    [
        ({"output_dir": "x", "evnts": {}}, "unknown-key", "Did you mean profiler.events?"),
        ({"output_dir": "x", "zzz": 1}, "unknown-key", "profiler has: events, "),
        ({"output_dir": 3}, "config-value", "profiler.output_dir: Expected `str`, got `int`"),
        ({}, "config-value", "output_dir"),
        ("multiturn", "config-group-not-found", "Hydra did not find verl-profiler's configs"),
    ],
)
def test_an_invalid_setting_names_its_place_and_the_fix(node, slug, says):
    """The message is enough to fix the command."""
    with pytest.raises(ConfigError) as caught:
        parse(node)

    assert slug == caught.value.slug
    assert says in str(caught.value)
    assert str(caught.value).endswith(f"({slug})")


@pytest.mark.parametrize(
    ("group", "changes", "says"),
    [
        ("events", {"exclude": ["memry"]}, "exclude[0]: Invalid enum value 'memry'"),
        ("events", {"steps": [1, "a"]}, "steps[1]: Expected `int`, got `str`"),
        ("events", {"detail_share": 2}, "detail_share: Expected `float` <= 1"),
        ("nsight", {"options": {"all": {"trace": "x"}}}, "options[...]: Expected `bool | int | fl"),
    ],
)
def test_an_invalid_value_names_its_place(group, changes, says):
    """And what it may be."""
    with pytest.raises(ConfigError) as caught:
        parse({"output_dir": "x", group: changes})

    assert "config-value" == caught.value.slug
    assert f"profiler.{group}.{says}" in str(caught.value)


def test_a_url_is_written_to_a_directory_first():
    """Named as the run, unless another one is given."""
    url = "s3://bucket/team/my-run"
    assert "logs/my-run" == parse({"output_dir": url}).local_dir
    assert "/local/x" == parse({"output_dir": url, "spool_dir": "/local/x"}).local_dir
    assert "logs/x" == parse({"output_dir": "logs/x", "spool_dir": "/local/x"}).local_dir
    with pytest.raises(ConfigError, match="has no folder for the run") as caught:
        _ = parse({"output_dir": "s3://bucket"}).local_dir
    assert "output-url" == caught.value.slug
