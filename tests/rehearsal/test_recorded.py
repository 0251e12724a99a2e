"""What a profiled run of the real main_ppo leaves behind: once per engine that is installed.

The stand-in's run is that of examples/own_recipe, so its tool and its reward function record events
of their own.  Its trainer is verl's V0 trainer, the others' V1.
"""

import re
from collections import Counter, defaultdict
from datetime import datetime

import pytest
from reading_back import headers_of, lines_with_files
from tq_lines import of, traced_lines

from verl_profiler.events.vocabulary import EVENTS
from verl_profiler.reading.reader import load

STEPS = 2

pytestmark = [pytest.mark.rehearsal, pytest.mark.timeout(900)]


class Recorded:
    """The files of one run, read the plain way."""

    def __init__(self, engine, directory, output):
        self.engine = engine
        self.has_queue = engine != "standin"
        self.directory = directory
        self.output = output
        self.console = (directory / "console.log").read_text(errors="replace")
        self.lines = lines_with_files(directory)
        for line in self.lines:
            end = datetime.fromisoformat(line["timestamp"]).timestamp()
            line["end"] = round(end * 1e6)
            line["begin"] = line["end"] - round(line.get("duration_sec", 0) * 1e6)
        self.headers = headers_of(directory)

    def of(self, *events, files=""):
        """Return the lines of these events in the files whose names begin so."""
        return [
            line
            for line in self.lines
            if line["event"] in events and line["file"].startswith(files)
        ]

    def by_request(self):
        """Return request id → its lines in the agent-loop workers."""
        found = defaultdict(list)
        for line in self.lines:
            if line["file"].startswith("worker") and "request_id" in line["extra"]:
                found[line["extra"]["request_id"]].append(line)
        return found


@pytest.fixture(scope="session")
def run(rehearsed):
    """The files of the run; the fixture `rehearsed` made them."""
    return Recorded(*rehearsed)


def test_the_command_tells_the_engine_each_step_and_where_the_results_are(run):
    """A person can follow the run, and finds its files; the console is kept."""
    names = {"sglang": "the real SGLang", "vllm": "the real vLLM", "standin": "stand-in"}
    first, *told, last = run.output.splitlines()
    assert names[run.engine] in first
    for step in (1, 2):
        line = re.compile(rf" *\d+ s  step {step} of 2: .* turns per request")
        assert [each for each in told if line.match(each)]
    assert "validation before training" in run.output
    assert f"Results: {run.directory}" == last
    assert "step:2 - " in run.console
    assert (run.directory / "report.html").stat().st_size > 50_000
    assert ("stand-in" in run.output) == (run.engine == "standin")


def test_every_process_of_the_run_recorded(run):
    """Driver, task runner, agent loops, engine servers, trainer ranks, reward, TransferQueue."""
    roles = Counter(header["role"] for header in run.headers.values())

    assert {"trainer": 1, "agent_loop": 2, "engine": 2, "actor": 2, "reward": 1, "driver": 1} == {
        role: count
        for role, count in roles.items()
        if role not in ("tq_controller", "tq_storage", "load_balancer")
    }
    assert run.has_queue == roles["tq_controller"]
    assert run.has_queue == (roles["tq_storage"] >= 1)


def test_no_probe_was_missed_or_failed_and_nothing_was_dropped(run):
    """On this verl all of them hold."""
    for name, header in run.headers.items():
        assert {} == header["probes"]["missed"], name
        assert {} == header["probes"]["errors"], name
        assert 0 == header["counters"]["dropped"], name
        assert 0 == header["counters"]["write_errors"], name
        assert header["clock"]["shared"] or header["role"] == "driver", name


def test_every_event_is_of_the_vocabulary_or_the_users_own(run):
    """The trainer's files hold no timer that is not known."""
    own = {
        "standin": {False: {"answer_check", "dictionary"}, True: set()},
        "sglang": {False: {"hint"}, True: {"choose_samples"}},
        "vllm": {False: set(), True: set()},
    }[run.engine]
    unknown = {
        of_trainer: {
            line["event"] for line in run.lines if line["file"].startswith("trainer") == of_trainer
        }
        - EVENTS.keys()
        for of_trainer in (False, True)
    }

    assert own == unknown


def test_every_request_ended_and_is_whole(run):
    """Nothing is left open; each has a start, one conversation, one result."""
    starts = run.of("request_start")
    requests = run.of("request")
    key = lambda line: (
        line["step"],
        line["file"],
        line["extra"]["sample"],
        line["extra"]["session"],
    )

    assert Counter(map(key, starts)) == Counter(map(key, requests))
    for line in requests:
        assert "status" not in line["extra"], line
        assert line["extra"]["turns"] >= 1
        assert line["extra"]["response_tokens"] > 0
        assert line["extra"]["agent"] == (
            "hinted_agent" if run.engine == "sglang" else "tool_agent"
        )
    for step in range(1, STEPS + 1):
        training = [r for r in requests if r["step"] == step and not r["extra"].get("validate")]
        assert 32 == len(training)


def test_validation_is_marked_and_not_counted(run):
    """Before training it lies in step 0; after the last step, in that step."""
    validated = {line["step"] for line in run.of("request") if line["extra"].get("validate")}

    assert {0, STEPS} == validated
    assert all(line["extra"].get("validate") for line in run.of("request") if line["step"] == 0)
    assert 2 == len(run.of("validation", files="trainer"))


def test_a_requests_events_nest_as_the_vocabulary_says(run):
    """To the microsecond: each event lies within an event of its parent's name."""
    for lines in run.by_request().values():
        by_event = defaultdict(list)
        for line in lines:
            by_event[line["event"]].append(line)
        for line in lines:
            event = EVENTS.get(line["event"])
            if event is None or event.instant or event.parent not in by_event:
                continue
            inside = [
                parent
                for parent in by_event[event.parent]
                if parent["begin"] <= line["begin"] and line["end"] <= parent["end"]
            ]
            assert inside, (line, by_event[event.parent])


def test_turns_engine_calls_and_tools_agree(run):
    """Each turn has one engine call; its tool calls lie within its tool execution."""
    for lines in run.by_request().values():
        count = Counter(line["event"] for line in lines)
        (request,) = [line for line in lines if line["event"] == "request"]
        turns = sorted(line["extra"]["turn"] for line in lines if line["event"] == "turn")

        assert list(range(request["extra"]["turns"])) == turns
        assert count["turn"] == count["engine_call"] == count["server_acquire"]
        assert 1 == count["agent_loop"] == count["prompt_build"] == count["postprocess"]
        executed = sum(
            line["extra"]["tool_calls"] for line in lines if line["event"] == "tool_execution"
        )
        assert count["tool_call"] == executed
    assert len(run.of("tool_call")) > 10


def test_every_engine_call_joins_its_engine_request(run):
    """verl gives the engine an id of its own; both sides carry it, and time agrees."""
    calls = {line["extra"]["engine_request_id"]: line for line in run.of("engine_call")}
    served = {line["extra"]["engine_request_id"]: line for line in run.of("engine_request")}

    assert calls.keys() == served.keys()
    for engine_request_id, call in calls.items():
        server = served[engine_request_id]
        assert call["begin"] <= server["begin"]
        assert server["end"] <= call["end"]
        assert call["extra"]["prompt_tokens"] == server["extra"]["prompt_tokens"]
        assert call["extra"]["response_tokens"] == server["extra"]["response_tokens"]
    assert {"engine_0", "engine_1"} == {line["file"] for line in served.values()}


def test_the_engines_own_account_is_there(run):
    """Queue, prefill and decode add up to no more than the request took."""
    for line in run.of("engine_request"):
        extra = line["extra"]
        parts = extra["queue_s"] + extra["prefill_s"] + extra["decode_s"]
        # The engine's processes place their clocks on the wall each for itself.
        assert -0.005 <= parts <= line["duration_sec"] + 0.05
        if run.engine == "sglang":
            assert extra["e2e_s"] <= line["duration_sec"] + 0.005
        if run.engine != "standin":
            assert extra["cached_tokens"] >= 0


def test_phases_are_verls_own_timings(run):
    """The same numbers as `timing_s/*` in verl's metrics, and they fit into their step.

    On a busy machine, a process is now and then interrupted between the two clocks' readings.
    """
    apart = []
    for step in range(1, STEPS + 1):
        phases = {
            line["event"]: line["duration_sec"]
            for line in run.lines
            if line["file"] == "trainer_0" and line["step"] == step and "duration_sec" in line
        }
        (metrics,) = [
            line["extra"]["metrics"]
            for line in run.of("metrics", files="trainer")
            if line["step"] == step and "timing_s/step" in line["extra"]["metrics"]
        ]
        apart += [
            abs(phases[name] - metrics[f"timing_s/{name}"])
            for name in ("step", "gen", "old_log_prob", "adv", "update_actor", "update_weights")
        ]
        # `prepare_step` is no timer of verl's; it has a line where it was recorded.
        parts = phases.get("prepare_step", 0) + sum(
            phases[name]
            for name in ("gen", "old_log_prob", "ref", "adv", "update_actor", "update_weights")
        )
        assert parts <= phases["step"] + 0.001
    assert sorted(apart)[-3] < 0.005, apart
    assert max(apart) < 0.2, apart


def test_each_rank_did_the_work_of_each_step(run):
    """Bodies of the RPCs, and what is inside them."""
    for step in range(1, STEPS + 1):
        for rank in (0, 1):
            count = Counter(
                line["event"]
                for line in run.lines
                if line["file"] == f"actor_{rank}" and line["step"] == step
            )
            for event in ("compute_log_prob", "update_actor", "optimizer_step", "update_weights"):
                assert 1 == count[event], (step, rank, event, count)
            assert count["forward_backward"] >= 2
            assert {"weights", "kv_cache"} == {
                tag
                for line in run.of("memory_resume", files=f"actor_{rank}")
                if line["step"] == step
                for tag in line["extra"]["tags"]
            }
            assert count["memory"] >= 5


def test_weights_and_memory_are_recorded_inside_the_engine_too(run):
    """SGLang's and vLLM's own release and resume, with their tags."""
    if run.engine == "standin":
        pytest.skip("the stand-in has no memory to give back")
    resumed = [tuple(line["extra"]["tags"]) for line in run.of("memory_resume", files="engine")]

    assert ("weights",) in resumed
    assert ("kv_cache",) in resumed
    assert run.of("memory_release", files="engine")


def test_the_weight_transfer_is_a_part_of_the_weight_sync(run):
    """In each rank and step, and more than the moment of the call."""
    syncs = {(line["file"], line["step"]): line for line in run.of("update_weights", files="actor")}
    transfers = {(line["file"], line["step"]): line for line in run.of("weight_transfer")}

    assert syncs.keys() == transfers.keys()
    for key, transfer in transfers.items():
        sync = syncs[key]
        assert sync["begin"] <= transfer["begin"] < transfer["end"] <= sync["end"]
        assert transfer["duration_sec"] > sync["duration_sec"] / 100
        assert transfer["extra"]["weight_version"] == key[1]


def test_transfers_say_how_many_bytes(run):
    """Puts and gets of rollout workers, trainer and ranks; the V0 trainer has none."""
    if not run.has_queue:
        assert [] == run.of("tq_put", "tq_get", "tq_meta", "tq_clear")
        return
    puts, gets = run.of("tq_put"), run.of("tq_get")

    assert {"worker_0", "worker_1", "actor_0", "actor_1", "trainer_0"} <= {
        line["file"] for line in puts + gets
    }
    assert all(line["extra"]["size_bytes"] > 0 for line in gets)
    assert sum(line["extra"]["size_bytes"] for line in puts) > 10_000
    # A sample's own put carries the identity of its request.
    assert [line for line in puts if "request_id" in line["extra"]]


def test_rewards_are_recorded_where_they_run_and_where_they_are_awaited(run):
    """They join by step, sample and session; V0 tells a reward worker the sample only."""
    key = lambda line: (
        (line["step"], line["extra"]["sample"], line["extra"]["session"])
        if run.has_queue
        else line["extra"]["sample"]
    )
    waits, scores = run.of("reward", files="worker"), run.of("reward_score", files="reward")

    assert len(waits) == len(scores)
    training = [line for line in waits if not line["extra"].get("validate") and line["step"] > 0]
    assert {key(line) for line in training} <= {key(line) for line in scores}


def test_the_users_own_events_know_their_request(run):
    """Also from a tool that verl runs in a thread, and from the reward worker's function."""
    if run.engine != "standin":
        pytest.skip("this run uses the rehearsal's own tools")
    lookups, checks = run.of("dictionary"), run.of("answer_check")

    assert lookups
    for line in lookups:
        assert {"request_id", "turn", "sample", "session", "limit"} <= line["extra"].keys()
        assert line["duration_sec"] >= 0.2

    def samples(lines):
        """Return which samples these are of; verl's V0 trainer gives a reward worker no session."""
        keys = ("sample", "uid", "session")
        return Counter((line["step"], *(line["extra"].get(key) for key in keys)) for line in lines)

    assert samples(checks) == samples(run.of("reward_score"))
    assert all(uid for (_, _, uid, _) in samples(checks))
    assert {"reward_0"} == {line["file"] for line in checks}


def test_spans_of_an_agent_loop_and_a_sampler_of_ones_own(run):
    """One for each request, and one for each batch inside verl's own phase."""
    if run.engine != "sglang":
        pytest.skip("this run uses verl's own agent loop and sampler")
    hints = run.of("hint")
    requests = run.of("request")
    assert sorted(
        (line["step"], line["extra"]["sample"], line["extra"]["session"]) for line in requests
    ) == sorted((line["step"], line["extra"]["sample"], line["extra"]["session"]) for line in hints)
    with load(run.directory) as opened:
        rows = opened.tables.rows(
            "SELECT parent, step FROM phases WHERE phase = 'choose_samples' AND NOT validate"
        )

    assert {("gen", step) for step in range(1, STEPS + 1)} <= {
        (row["parent"], row["step"]) for row in rows
    }


def test_the_profiler_accounts_for_every_line(run):
    """Per process: its own counts are those of the files."""
    for name in ("worker_0", "worker_1", "actor_0", "trainer_0"):
        lines = [line for line in run.lines if line["file"] == name]
        costs = [line["extra"] for line in lines if line["event"] == "profiler_cost"]
        said = sum(cost["events"] for cost in costs)

        # A killed process has not accounted for its last seconds.
        assert said <= len(lines) - len(costs)
        assert said > 0.5 * (len(lines) - len(costs))
        assert 0 == sum(cost["dropped"] for cost in costs)


def test_the_engines_load_is_read_where_it_was_asked_for(run):
    """SGLang's own counts: no more runs or waits than was sent, within its settings."""
    states = run.of("engine_state")
    if run.engine != "sglang":
        assert [] == states
        return
    loads = [line["extra"] for line in states]
    batches = {(x["kv_capacity_tokens"], x["running_limit"]) for x in loads}

    assert 1 == len(batches)
    assert all(x["kv_used_tokens"] <= x["kv_capacity_tokens"] for x in loads)
    assert 0 < max(x["running_requests"] + x["waiting_requests"] for x in loads) <= 32
    assert {line["file"] for line in run.of("engine_request")} == {line["file"] for line in states}


@pytest.fixture(scope="session")
def traced(run):
    """The lines of TransferQueue tracing, which SGLang's run has."""
    if run.engine != "sglang":
        pytest.skip("this run does not trace")
    return traced_lines(run.console)


def test_each_traced_call_has_all_its_lines_and_an_event(run, traced):
    """Of verl's real bridge in both ranks, and of each agent loop; training sees no failure of it."""
    stages = defaultdict(list)
    for line in of(traced, mark="TQ-TRACE"):
        stages[line["func"], line["call"]].append(line["stage"])
    calls = defaultdict(list)
    for (function, _), found in stages.items():
        calls[function].append(found)
    computed = ["FUNCTION_START", "GET_START", "GET_END", "COMPUTE_START", "COMPUTE_END"]
    whole = [*computed, "PUT_START", "PUT_END", "FUNCTION_END"]

    assert [whole] * 2 * STEPS == calls["compute_log_prob"]
    assert [[*computed, "FUNCTION_END"]] * 2 * STEPS == calls["update_actor"]
    assert len(run.of("request")) == len(calls["_run_agent_loop"])
    assert {"PUT_END"} == {found[-4] for found in calls["_run_agent_loop"]}
    assert {"ok"} == {line["status"] for line in traced if "status" in line}
    assert {call for _, call in stages} == {line["extra"]["call"] for line in run.of("tq_function")}
    for kind in ("GET", "PUT"):
        ends = of(traced, func="compute_log_prob", stage=f"TQ_CLIENT_{kind}_END")
        assert [2 * STEPS, True] == [
            len(ends), all(float(line["data_size_mb"]) > 0 for line in ends)
        ]  # fmt: skip


def test_one_trace_id_joins_rollout_and_update_of_a_step(traced):
    """In all processes; the validation after the last step has another."""
    ids = [
        {line["trace_id"] for line in of(traced, func="update_actor", step=str(step))}
        for step in range(1, STEPS + 1)
    ]

    assert [1] * STEPS == [len(each) for each in ids]
    assert STEPS == len(set.union(*ids))
    for (each,) in ids:
        lines = of(traced, trace_id=each)
        assert {"_run_agent_loop", "compute_log_prob", "update_actor"} <= {
            line.get("func") for line in lines
        }
        assert 32 == len(of(lines, func="_run_agent_loop", stage="FUNCTION_END"))
