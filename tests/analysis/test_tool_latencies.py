"""Tools: time, failures and the slowest call of each."""

import pytest

from verl_profiler.analysis.tools import tool_latencies


def test_tools_by_time(tables, conversation, span):
    """Over all steps; failures by their kind."""
    events = [
        *conversation("a"),
        *conversation("b", step=2, scale=2.0),
        span(
            "tool_call", 0, 1, request_id="a", turn=0, tool="calc", status="error", error="KeyError"
        ),
        span("tool_call", 0, 1, request_id="a", turn=0, tool="calc", status="cancelled"),
    ]

    search, calc = tool_latencies(tables(events))

    assert ("search", 2, 0, None, 6.0) == tuple(
        search[key] for key in ("tool", "calls", "failed", "errors", "total_s")
    )
    assert ("calc", 4, 2, 0.5, "KeyError 1, cancelled 1", 5.0) == tuple(
        calc[key] for key in ("tool", "calls", "failed", "failed_share", "errors", "total_s")
    )
    assert [6 / 11, 5 / 11] == pytest.approx([search["share"], calc["share"]])
    assert 6 / 30 == pytest.approx(search["requests_share"])
    assert (2, "b", 4.0, 3.0) == tuple(
        search[key] for key in ("slowest_step", "slowest_request_id", "max_s", "p50_s")
    )


def test_a_tool_without_a_name_is_shown(tables, span):
    """Rather than left out of the sum."""
    (row,) = tool_latencies(tables([span("tool_call", 0, 1, request_id="q", turn=0)]))

    assert ("(no name)", 1.0, None) == (row["tool"], row["total_s"], row["requests_share"])
