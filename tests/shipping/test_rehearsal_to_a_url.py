"""`verl-profiler rehearse` with a URL as `profiler.output_dir`; tests/rehearsal uploads a real run."""

from pathlib import Path

import pytest

from verl_profiler.__main__ import main
from verl_profiler.cli.rehearsal_command import build


def test_the_run_is_written_to_the_output_directory_and_uploaded():
    settings = {"engine": "standin", "profiler": "multiturn", "steps": 3, "ranks": 2, "workers": 2}
    settings |= {"output": Path("/runs/one"), "current": {}}
    for given in ("profiler.output_dir=s3://b/run", "++profiler.output_dir='s3://b/run'"):
        arguments = build(**settings, overrides=[given]).arguments
        assert "profiler.spool_dir=/runs/one" in arguments
        assert given == arguments[-1]
    local = build(**settings, overrides=["profiler.output_dir=/runs/two"]).arguments
    assert not [each for each in local if "spool_dir" in each]


def test_a_url_is_no_output_directory(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["rehearse", "--output", "s3://bucket/run"])
    assert 2 == ended.value.code
    assert "profiler.output_dir=s3://bucket/run" in capsys.readouterr().err
