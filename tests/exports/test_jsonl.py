"""JSON lines: documents that say what is known."""

import json
from datetime import datetime

from picked import picked

from verl_profiler.exports.jsonl import json_lines


def test_a_document_for_every_call_and_transfer(log_tables):
    """Times in seconds, `@timestamp` at the end, nothing that is not known."""
    found = [json.loads(line) for line in json_lines(log_tables)]

    calls = [each for each in found if each["kind"] == "call"]
    transfers = [each for each in found if each["kind"] == "transfer"]
    assert (3, 5) == (len(calls), len(transfers))
    assert (0.91, 0.05, 0.8, 0.06, "ok") == picked(
        calls[0], "duration_s get_s compute_s put_s status"
    )
    assert "put_s" not in calls[2]
    assert ["5f0c6a51-3f3e-5b7c-9a64-0b8f3d2c1e4f", "other"] == calls[2]["trace_ids"]
    moments = [datetime.fromisoformat(each["@timestamp"]) for each in calls]
    assert 910 == round((moments[0].timestamp() % 1) * 1000)
    assert {"error"} == {each["status"] for each in found if each["call"].startswith("c2")}
