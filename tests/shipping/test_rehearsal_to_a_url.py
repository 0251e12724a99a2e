"""`verl-profiler rehearse` with a URL as `profiler.output_dir`; tests/rehearsal uploads a real run."""

import pytest

from verl_profiler.__main__ import main


def test_a_url_is_no_output_directory(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["rehearse", "--output", "s3://bucket/run"])
    assert 2 == ended.value.code
    assert "profiler.output_dir=s3://bucket/run" in capsys.readouterr().err
