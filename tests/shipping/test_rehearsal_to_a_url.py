"""`verl-profiler rehearse` with a URL as `profiler.output_dir`: how it ends.

The trainer is a script that leaves a recorded run, and uploads it as the driver does.
"""

import shutil
import sys
from pathlib import Path

import pytest
from shipping.copies import contents

from verl_profiler.__main__ import main
from verl_profiler.cli import rehearse
from verl_profiler.cli.rehearsal_command import Command, build

RUN = Path(__file__).parents[1] / "data" / "small_run"
TRAINER = """
import shutil, sys
from pathlib import Path
from verl_profiler.launch import remote_output
run, url = Path(sys.argv[1]), sys.argv[2]
shutil.copytree(sys.argv[3], run, dirs_exist_ok=True)
claimed = remote_output.claim(url, run)
remote_output.start(run, claimed, 60.0)
"""


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """Have the trainer replaced by the script; it uploads to the URL that is given."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rehearse, "_check_installed", lambda engine: None)

    def rehearsed(url, *more):
        script = (sys.executable, "-c", TRAINER, str(tmp_path / "out"), url, str(RUN))
        monkeypatch.setattr(rehearse, "build", lambda **_: Command(script, {}))
        arguments = ["rehearse", "--engine", "standin", "--output", "out", *more]
        return main([*arguments, f"profiler.output_dir={url}"])

    return rehearsed


def test_it_is_uploaded_and_ends_with_the_local_files(trained, s3, capsys, tmp_path):
    """Also where the name was taken."""
    assert 0 == trained(f"{s3}/my-run")
    printed = capsys.readouterr().out
    assert f"the run was uploaded to {s3}/my-run" in printed
    assert "Results: out" == printed.splitlines()[-1]
    assert (tmp_path / "out" / "report.html").stat().st_size > 10_000

    shutil.rmtree(tmp_path / "out")
    assert 0 == trained(f"{s3}/my-run")
    printed = capsys.readouterr().out
    assert "step" in printed
    assert f"the run was uploaded to {s3}/my-run-2" in printed
    assert {*contents(f"{s3}/my-run")} == {*contents(f"{s3}/my-run-2")}


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
