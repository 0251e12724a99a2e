"""`verl-profiler verify`: the verdict, and errors that help."""

import json

import pytest
from cached_runs import REHEARSED, SMALL

from verl_profiler.cli import main


def run(*words):
    return main(["verify", *map(str, words)])


def test_the_same_run_twice_kept_nothing(capsys):
    """Two steps are too few for an interval, so nothing is claimed."""
    assert 1 == run("polling", SMALL, SMALL)

    text = capsys.readouterr().out
    assert text.startswith("polling (poll interval of the replay buffer): undecided; ")
    assert "measured   0 s per step" in text
    assert "remaining  up to 1.55 s per step" in text


def test_json_has_the_prediction_and_the_measurement(capsys):
    """For a script that publishes how good predictions are."""
    run("polling", SMALL, SMALL, "--json")

    content = json.loads(capsys.readouterr().out)
    assert content["miss_s"] == pytest.approx(-content["predicted_s"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("poling", SMALL, SMALL), "did you mean polling?"),
        (("slow_ranks", REHEARSED, SMALL), "does not have the finding slow_ranks; it has: "),
        (("polling", SMALL, "nowhere"), "nowhere does not exist"),
    ],
)
def test_what_cannot_be_verified_is_refused(capsys, words, message):
    """With what there is."""
    assert 2 == run(*words)
    assert message in capsys.readouterr().err
