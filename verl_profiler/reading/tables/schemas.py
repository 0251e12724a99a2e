"""The columns of every table that a run is read into; docs/sql.md explains the tables.

A column that is a field of the event files has its type, unit and sentence from `events.fields`;
`columns.md` describes the others.  Times are microseconds since 1970 in UTC (`begin_us`, `end_us`),
lengths are microseconds (`duration_us`).  What was not recorded is NULL, never 0.
"""

from __future__ import annotations

from pathlib import Path

from verl_profiler.events.fields import CAPTURE, HEADER, IDENTITY, LINE, Field, fields_in
from verl_profiler.events.fields import FIELDS as RECORDED
from verl_profiler.events.vocabulary import contract

__all__ = [
    "COLUMNS",
    "COUNT_LIMIT",
    "FIELDS",
    "NUMBER_LIMIT",
    "REQUEST_PARTS",
    "SCHEMAS",
    "TQ_STAGES",
]

# What a function that TransferQueue feeds does, in this order.
TQ_STAGES = ("get", "compute", "put")

# The components of a request's time, in the order in which people read them; with `other_us` minus
# `overlap_us` they add up to `duration_us`.
REQUEST_PARTS = (
    "prompt_build",
    "engine",
    "tool",
    "tool_parsing",
    "token_merge",
    "postprocess",
    "reward",
)

# Integers up to here are exact as DOUBLE; nothing that is measured comes near it.
NUMBER_LIMIT = 1 << 53
# Of steps and turns: sums and differences of two fit into INTEGER.
COUNT_LIMIT = 1 << 30

# Columns that are no fields of the files, or not in the same form.
DERIVED = fields_in(contract(Path(__file__).with_name("columns.md"))["Columns"])

_TYPES = {
    "string": "VARCHAR",
    "integer": "BIGINT",
    "number": "DOUBLE",
    "boolean": "BOOLEAN",
    "object": "JSON",
    "list": "JSON",
}
# Columns of other types: small numbers, and what may be a number or text.
_TYPES_BY_NAME = {
    **dict.fromkeys(("rank", "step", "turn", "replica", "number", "line"), "INTEGER"),
    **dict.fromkeys(("sample", "session", "workid", "weight_version", "tags"), "VARCHAR"),
}


def _type(name: str, field: Field) -> str:
    return _TYPES_BY_NAME.get(name, _TYPES[field.type])


# The fields of events that have columns in `event_fields`, where `rest` is all of `extra` if it holds
# anything else.
FIELDS = {
    **{name: _type(name, field) for name, field in RECORDED.items() if field.column},
    # Of any detail, and of calls in console logs.
    "sampled": "BIGINT",
}

_INTERVAL = "begin_us end_us duration_us"
_REQUEST = "run step name validate request_id"
_RANK = "run step name role rank"
# A report of nsys, its process and host, and the step that it was made in.
_REPORT = "run step name file host"
_LINES = (
    f"run name role rank host pid:INTEGER step event family {_INTERVAL} request_id turn "
    "validate sample session status error workid recorded"
)
# The columns by table; a type stands behind a colon where the table's differs.
_TABLES = {
    "events": f"{_LINES} extra",
    "event_fields": f"{_LINES} {' '.join(FIELDS)} rest",
    "event_counts": "run step role family event events of_requests begin_us end_us",
    "processes": (
        "run name role rank replica host ip pid ppid actor_name actor_class python boot_id "
        "clock_shared uncertainty_ns shift_us drift drift_from_us clock_bound_us "
        "clock_residual_us recorded_events size_bytes dropped write_errors wrapper_s writer_s "
        "started updated ended end_reason has_header header"
    ),
    "requests": (
        f"{_REQUEST} rank sample session agent uid status error finished endings {_INTERVAL} "
        "last_us turns:INTEGER tool_calls prompt_tokens response_tokens generated_tokens "
        "tool_tokens reward prompt_build_us engine_us tool_us tool_parsing_us token_merge_us "
        "postprocess_us reward_us other_us overlap_us engine_calls detailed sampled:INTEGER"
    ),
    "turns": (
        f"{_REQUEST} turn finished {_INTERVAL} engine_calls tool_calls prompt_tokens "
        "response_tokens engine_us tool_us tool_parsing_us token_merge_us other_us sampled:INTEGER"
    ),
    "samples": (
        "run step uid session fate consumed_step reason min_weight_version max_weight_version "
        "trainer_version at_us"
    ),
    "dispatched": "run uid at_us",
    "tool_calls": f"{_REQUEST} turn tool status error stalled_us {_INTERVAL} sampled:INTEGER",
    "engine_requests": (
        f"run step name replica engine_request_id request_id validate status {_INTERVAL} "
        "prompt_tokens response_tokens cached_tokens finish_reason queue_us prefill_us decode_us "
        "e2e_us first_token_us decode_tokens_per_s weight_version dp_rank retractions draft_tokens "
        "accepted_draft_tokens"
    ),
    "engine_calls": (
        f"{_REQUEST} turn engine_request_id server status error {_INTERVAL} prompt_tokens "
        "response_tokens finish_reason engine_name replica engine_begin_us engine_end_us "
        "engine_duration_us cached_tokens queue_us prefill_us decode_us outside_us weight_version "
        "retractions draft_tokens accepted_draft_tokens parked_us sampled:INTEGER"
    ),
    "engine_attempts": (
        f"{_REQUEST} turn attempt engine_request_id server {_INTERVAL} prompt_tokens response_tokens "
        "weight_version finish_reason"
    ),
    "engine_parked": f"run name engine_request_id {_INTERVAL}",
    "engine_states": (
        "run step name replica dp_rank at_us held_us running_requests waiting_requests "
        "running_limit kv_used_tokens kv_capacity_tokens kv_share iterations prefill_tokens "
        "decode_tokens retractions prefix_queried_tokens prefix_hit_tokens"
    ),
    "devices": ("run host device uuid bus_id total_bytes power_limit_w interval_us users of_run"),
    "device_readings": (
        "run step name host device at_us begin_us end_us utilization memory_utilization used_bytes "
        "power_w sm_mhz memory_mhz temperature_c slowed_by:VARCHAR"
    ),
    "engine_iterations": (
        "run step name replica dp_rank begin_us end_us busy_us iterations decode_requests "
        "prefill_tokens context_tokens running_requests waiting_requests retracted_requests"
    ),
    "engine_call_times": (
        f"{_REQUEST} turn attempt engine_request_id engine_name begin_us call_us outside_us queue_from_us queue_us "
        "parked_us prefill_us:DOUBLE cold_us decode_us:DOUBLE recomputed_us undivided_us decoded_tokens retractions "
        "lost_tokens moved batch batch_tokens others_prefill_us sampled:INTEGER"
    ),
    "server_routes": (
        f"{_REQUEST} turn server sticky reason in_flight least_in_flight loads at_us "
        "sampled:INTEGER"
    ),
    "phases": f"run step name rank phase parent validate {_INTERVAL} self_us",
    "steps": (
        f"run step finished {_INTERVAL} phases_us unaccounted_us requests unfinished_requests "
        "validation_requests generated_tokens tool_tokens generated_tokens_per_s"
    ),
    "phase_tokens": (
        "run step phase duration_us batches tokens sequences estimated_us tflop promised_tflops ranks mfu"
    ),
    "gens": f"run step name in_step gens {_INTERVAL}",
    "asynchronous": "run requests later",
    "last_requests": (
        "run step trainer gen_begin_us gen_end_us wait_end_us name request_id begin_us end_us"
    ),
    "request_caused_wait": (
        "run step name request_id sample place many caused_wait_us behind_us late_us queued_us "
        "parked_us:DOUBLE cold_us prefill_us:DOUBLE recomputed_us undivided_us long_us slow_us tool_us:DOUBLE other_us:DOUBLE because sampled:INTEGER"
    ),
    "tool_caused_wait": "run step tool last caused_wait_us",
    "rank_spans": f"{_RANK} event family status {_INTERVAL}",
    "weight_moves": (
        f"{_RANK} event status {_INTERVAL} sender bucket tensors size_bytes buckets transfer_s"
    ),
    "transfers": (
        f"{_REQUEST} role event op partition status {_INTERVAL} size_bytes rows func trace_id call "
        "sampled:INTEGER"
    ),
    "tq_calls": (
        f"{_REQUEST} role func trace_id call sampled:INTEGER source stage status finished "
        f"estimated {_INTERVAL} get_us compute_us put_us waits rows more"
    ),
    "tq_stages": f"run step name func call stage {_INTERVAL}",
    "reward_scores": (
        f"run step name request_id uid session validate status {_INTERVAL} score wait_us compute_us"
    ),
    "memory": (
        f"{_RANK} end_us at allocated_bytes reserved_bytes used_bytes total_bytes rss_bytes"
    ),
    "memory_moves": (
        f"{_RANK} event source tags status {_INTERVAL} total_bytes used_before_bytes "
        "used_after_bytes rss_before_bytes rss_after_bytes host_used_before_bytes "
        "host_used_after_bytes"
    ),
    "memory_readings": (
        "run step phase name role rank at_us source at allocated_bytes reserved_bytes used_bytes "
        "total_bytes rss_bytes host_used_bytes"
    ),
    "lags": (
        "run step name role loop during function innermost file line tool request_id turn "
        f"begin_error_us {_INTERVAL} until_us of_host"
    ),
    "costs": (
        "run step name role events size_bytes dropped wrapper_s wrapper_cpu_s writer_s writer_cpu_s"
    ),
    "captures": (f"{_RANK} host pid task number tool file size_bytes begin_ns end_ns problem"),
    "capture_ranges": f"{_REPORT} domain event category payload kind pid tid begin_ns end_ns",
    "capture_work": f"{_REPORT} kind kernel gpu stream pid tid launch_ns begin_ns end_ns",
}


def _columns(table: str) -> dict[str, tuple[str, Field]]:
    known = {**CAPTURE, **HEADER, **RECORDED, **IDENTITY, **LINE, **DERIVED}
    if table.startswith("capture"):
        known |= CAPTURE
    columns: dict[str, tuple[str, Field]] = {}
    for column in _TABLES[table].split():
        name, _, kind = column.partition(":")
        columns[name] = (kind or _type(name, known[name]), known[name])
    return columns


# Table → column → its type in duckdb, and what it is.
COLUMNS = {table: _columns(table) for table in _TABLES}
SCHEMAS = {
    table: {name: kind for name, (kind, _) in columns.items()} for table, columns in COLUMNS.items()
}
