"""TransferQueue tracing on verl 0.7.0 and 0.6.1 with the TransferQueue of their time, all from wheels."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import verl_drift
from tq_lines import ON, of, traced_lines

HERE = Path(__file__).parent

pytestmark = [pytest.mark.nightly, pytest.mark.ray]


@pytest.fixture(
    params=[("0.7.0", "0.1.5.dev3"), ("0.6.1", "0.0.1.dev0")], ids=lambda versions: versions[0]
)
def older_environment(verl_environment, request):
    verl, queue = request.param
    try:
        folders = [
            verl_drift.folder_of(verl),
            verl_drift.folder_of(queue, "TransferQueue"),
            verl_environment["PYTHONPATH"],
        ]
    except verl_drift.NoWheel as error:
        pytest.skip(str(error))
    return {**verl_environment, "PYTHONPATH": os.pathsep.join(map(str, folders))}


def run(environment, **variables):
    """Run the driver; return what it printed."""
    done = subprocess.run(
        [sys.executable, str(HERE / "tq_optional_driver.py")],
        env={**environment, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )
    assert "FOUND " in done.stdout, done.stdout[-4000:]
    return done.stdout


def test_the_optional_queue_is_traced(older_environment):
    """verl 0.6 and 0.7.0: real `@register`, DataProto on both sides, partitions that name the step."""
    on = run(older_environment, **ON)
    off = run(older_environment)
    reports = [json.loads(text.partition("FOUND ")[2].splitlines()[0]) for text in (on, off)]
    lines = traced_lines(on)
    ends = of(lines, stage="FUNCTION_END")
    gets = of(lines, func="compute_log_prob", stage="TQ_CLIENT_GET_END")

    assert reports[0]["training"] == reports[1]["training"]
    assert ["1", None] == [report["switch"] for report in reports]
    assert [] == traced_lines(off)
    assert ["compute_log_prob", "compute_log_prob", "broken"] == [line["func"] for line in ends]
    assert ["ok", "ok", "error"] == [line["status"] for line in ends]
    assert "mine" not in ends[0]["trace_id"]
    assert ends[0]["trace_id"] != "N/A"
    assert "mine" == ends[1]["trace_id"]
    assert {"3"} == {line.get("step") for line in ends}
    assert ["0.25", "0.25"] == [line["data_size_mb"] for line in gets]
