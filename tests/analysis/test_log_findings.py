"""What a log alone answers: figures and culprits from step lines that this file writes itself."""

import importlib
import json
import random
import re
from dataclasses import replace

import pytest

from verl_profiler.analysis.compare.step_metrics import logged_metrics
from verl_profiler.analysis.explain.finding import in_few
from verl_profiler.analysis.log_findings import log_findings
from verl_profiler.cli import main
from verl_profiler.reading.formats.console_steps import logged_runs

GEN, UPDATE, FORWARD, SYNC = 400.0, 260.0, 72.0, 6.0


def steps(number, *, seed=1, tokens=3.2e6, **changes):
    """Metrics of each step; `changes` are functions of the step, by timer."""
    draw = random.Random(seed)
    for step in range(1, number + 1):
        usual = {
            "gen": GEN, "old_log_prob": FORWARD, "ref": FORWARD, "adv": 0.04, "update_actor": UPDATE,
            "update_weights": SYNC,
        }  # fmt: skip
        timers = {name: value * draw.uniform(0.98, 1.02) for name, value in usual.items()}
        timers |= {name: change(step) for name, change in changes.items() if name in usual}
        timers["step"] = sum(timers.values())
        beside = {name: change(step) for name, change in changes.items() if name not in timers}
        timers |= {name: value for name, value in beside.items() if value is not None}
        total = tokens(step) if callable(tokens) else tokens
        yield (
            step,
            {f"timing_s/{name}": value for name, value in timers.items()}
            | {
                "perf/total_num_tokens": total,
                "perf/time_per_step": timers["step"],
                "perf/throughput": total / timers["step"] / 8,
            },
        )


def console(path, rows, pid=7):
    lines = [
        f"(TaskRunner pid={pid}) step:{step} - "
        + " - ".join(f"{name}:{value}" for name, value in values.items())
        for step, values in rows
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def found(path):
    (run,) = logged_runs([path], [])
    return [
        (row["finding"], row["accounts"] and next(iter(row["accounts"])), row["recoverable_s"])
        for row in log_findings(run)
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # One of the 29 steps that count, 19 times its median.
        ({"gen": lambda step: 7600.0 if step == 23 else GEN}, ("stalled_step", "gen", 7200 / 29)),
        ({"gen": lambda step: 1160.0 if step == 23 else GEN}, ("stalled_step", "gen", 760 / 29)),
        # Phases that change at once are one cause.
        (
            {
                "update_actor": lambda step: UPDATE + (200 if step >= 15 else 0),
                "old_log_prob": lambda step: FORWARD + (60 if step >= 15 else 0),
            },
            ("changed", "update_actor", 260 * 16 / 29),
        ),
        # From 260 by 18 s a step.
        ({"update_actor": lambda step: UPDATE + 18 * step}, ("grows", "update_actor", 18 * 13.0)),
        ({"param_sync": lambda step: 6.0 if step < 21 else 1500.0}, ("changed", "param_sync", 1494 * 10 / 29)),
        # Half of the steps, every second one.
        ({"gen": lambda step: 2 * GEN if step % 2 else GEN}, ("uneven_times", "gen", GEN * 14 / 29)),
        ({"adv": lambda _step: 340.0}, ("adv", "adv", 340.0)),
        ({"old_log_prob": lambda _step: 250.0}, ("forward_only", "old_log_prob", 250 - UPDATE / 3)),
        ({"testing": lambda step: 900.0 if step % 5 == 0 else None}, ("validation", "testing", 900 * 6 / 29)),
        ({"save_checkpoint": lambda step: 300.0 if step % 2 else None}, ("checkpoint", "save_checkpoint", 300 * 14 / 29)),
        ({}, ("rollout_bound", "gen", GEN)),
    ],
)  # fmt: skip
def test_the_planted_cause_is_first(tmp_path, changes, expected):
    name, phase, seconds = expected
    first = found(console(tmp_path / "train.log", steps(30, **changes)))[0]

    assert (name, phase) == first[:2]
    assert first[2] == pytest.approx(seconds, rel=0.1)


def test_few_steps_show_a_change_that_is_clear(tmp_path):
    """After two of the five steps that count."""
    log = console(tmp_path / "train.log", steps(6, gen=lambda step: GEN * (2 if step > 3 else 1)))
    (run,) = logged_runs([log], [])
    first = log_findings(run)[0]

    assert ("changed", "gen") == (first["finding"], next(iter(first["accounts"])))
    assert first["recoverable_s"] == pytest.approx(GEN * 3 / 5)
    assert "since step 4" in first["culprit_text"]


def test_of_many_steps_the_first_are_named():
    """Validation in every second of 42 steps was followed by a list of 20 numbers."""
    by_step = {step: 9.0 * (step % 2 == 0 and step != 22) for step in range(1, 43)}

    assert "mostly in steps 2, 4, 6, 8, 10, 12 and 14 others" == in_few(by_step)["where"]


@pytest.mark.parametrize("seed", range(4))
def test_a_steady_log_has_no_anomaly(tmp_path, seed):
    assert [("rollout_bound", "gen")] == [
        each[:2] for each in found(console(tmp_path / "train.log", steps(20, seed=seed)))
    ]


def test_growth_with_the_tokens_is_told_from_growth_without(tmp_path, capsys):
    growing = {"update_actor": lambda step: UPDATE * (1 + step / 10)}
    with_tokens = steps(20, tokens=lambda step: 3.2e6 * (1 + step / 10), **growing)
    assert 0 == main(["summary", str(console(tmp_path / "a.log", with_tokens))])
    assert "3,840,000 to 9,600,000 tokens per step in update_actor" in " ".join(
        capsys.readouterr().out.split()
    )
    assert 0 == main(["summary", str(console(tmp_path / "b.log", steps(20, **growing)))])
    out = " ".join(capsys.readouterr().out.split())
    assert "ms per token, tokens as before" in out
    assert "8 GPUs" in out
    # In 811 s 800,000 tokens per GPU in the first half of the steps, then half as many.
    fewer = steps(20, tokens=lambda step: 6.4e6 if step < 11 else 3.2e6, gen=lambda _step: GEN)
    assert 0 == main(["summary", str(console(tmp_path / "c.log", fewer))])
    falls = r"throughput falls from 9[89]\d to 49\d tokens/s per GPU since step 11"
    assert re.search(falls, capsys.readouterr().out)


def test_times_per_token_have_the_tokens_where_nothing_else_has_them(tmp_path):
    """As in verl 0.3; a critic's update is work like the actor's, not a phase that should take little."""
    path = tmp_path / "train.log"
    rows = []
    for step in range(1, 31):
        tokens = 1e5 * (1 + step / 30)
        spent = {
            name: ms * tokens / 1e3
            for name, ms in (("gen", 0.27), ("update_critic", 0.13), ("update_actor", 0.1))
        }
        timers = {f"timing_s/{name}": round(each, 3) for name, each in spent.items()}
        timers["timing_s/step"] = round(sum(spent.values()), 3)
        timers["timing_per_token_ms/update_critic"] = round(
            spent["update_critic"] / tokens * 1e3, 3
        )
        rows.append((step, timers))
    (run,) = logged_runs([console(path, rows)], [])
    findings = log_findings(run)

    assert "more_tokens" == findings[0]["finding"]
    assert "tokens were not recorded" not in "".join(row["message"] for row in findings)
    assert not any("update_critic takes" in row["message"] for row in findings)


def write_json(path, rows, _run):
    path.write_text(
        "".join(json.dumps({"step": step, "data": values}) + "\n" for step, values in rows)
    )


def write_history(path, rows, _run):
    path.write_text("".join(json.dumps({"_step": step, **values}) + "\n" for step, values in rows))


def write_csv(path, rows, prefix):
    names = list(rows[0][1])
    head = ",".join(["_step" if not prefix else "Step", *(f'"{prefix}{name}"' for name in names)])
    body = [",".join(map(str, [step, *(values[name] for name in names)])) for step, values in rows]
    path.write_text("\ufeff" + "\r\n".join([head, *body]) + "\r\n", encoding="utf-8")


def write_with_times(path, rows, _run):
    """As SwanLab gives them: a column of times beside each metric."""
    names = list(rows[0][1])
    head = ",".join(["step", *(f"{name},{name}_timestamp" for name in names)])
    body = [
        ",".join(map(str, [step, *(f"{values[name]},1795000000000" for name in names)]))
        for step, values in rows
    ]
    path.write_text("\n".join([head, *body]) + "\n")


def write_utf16(path, rows, _run):
    path.write_bytes(console(path, rows).read_text().encode("utf-16"))


def write_long(path, rows, _run):
    body = [f"r1,{name},{value},{step}" for step, values in rows for name, value in values.items()]
    path.write_text("\n".join(["run_id,key,value,step", *body]) + "\n")


@pytest.mark.parametrize(
    ("name", "write", "run"),
    [
        ("metrics.jsonl", write_json, ""),
        ("history.jsonl", write_history, ""),
        ("history.csv", write_csv, ""),
        ("panel.csv", write_csv, "my-run - "),
        ("mlflow.csv", write_long, ""),
        ("swanlab.csv", write_with_times, ""),
        ("powershell.log", write_utf16, ""),
    ],
)
def test_files_of_other_loggers_have_the_figures_of_the_console(tmp_path, capsys, name, write, run):
    rows = list(steps(6, seed=3))
    console(tmp_path / "train.log", rows)
    write(tmp_path / name, rows, run)

    answers = []
    for path in ("train.log", name):
        assert 0 == main(["summary", "--json", str(tmp_path / path)])
        answers.append(json.loads(capsys.readouterr().out))
    for answer in answers:
        for row in [
            *answer["findings"],
            *(row for rows in answer["tables"].values() for row in rows),
        ]:
            row.pop("run")
    assert answers[0]["tables"] == answers[1]["tables"]
    assert answers[0]["findings"] == answers[1]["findings"]
    assert 6 == len(answers[0]["tables"]["logged_steps"])


def test_files_of_tensorboard_have_a_metric_each(tmp_path, capsys):
    rows = list(steps(6, seed=3))
    names = [name for name in rows[0][1] if name.startswith(("timing_s/", "perf/"))]
    for name in names:
        body = [f"1795000000.5,{step},{values[name]}" for step, values in rows]
        path = tmp_path / f"my_run-tag-{name.replace('/', '_')}.csv"
        path.write_text("\n".join(["Wall time,Step,Value", *body]) + "\n")

    paths = sorted(tmp_path.glob("*.csv"), key=lambda path: "timing_s" not in path.name)
    assert 0 == main(["timing", "--json", *map(str, paths)])
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert [{"step": step, **{name: values[name] for name in names}} for step, values in rows] == [
        {name: row[name] for name in ("step", *names)} for row in run["metrics"]
    ]


def test_events_of_tensorboard_are_a_log(tmp_path, capsys):
    """As torch's SummaryWriter writes them for verl: one number per event, 32 bits."""
    event = pytest.importorskip("tensorboard.compat.proto.event_pb2")
    protobuf = importlib.import_module("tensorboard.compat.proto.summary_pb2")
    writers = importlib.import_module("tensorboard.summary.writer.event_file_writer")
    rows = list(steps(6, seed=3))
    writer = writers.EventFileWriter(str(tmp_path))
    for step, values in rows:
        for name, value in values.items():
            summary = protobuf.Summary(value=[protobuf.Summary.Value(tag=name, simple_value=value)])
            writer.add_event(event.Event(wall_time=1.5, step=step, summary=summary))
    writer.close()

    (path,) = tmp_path.glob("events.out.tfevents.*")
    assert 0 == main(["timing", "--json", str(path)])
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    timers = [name for name in rows[0][1] if name.startswith("timing_s/")]
    assert timers
    for (step, values), row in zip(rows, run["metrics"], strict=True):
        assert step == row["step"]
        assert {name: row[name] for name in timers} == pytest.approx(
            {name: values[name] for name in timers}, rel=1e-6
        )

    other = tmp_path / path.name.replace("tfevents.", "tfevents.0")
    other.write_bytes(b"\x07no events")
    assert 1 == main(["summary", str(other)])
    assert "there are no scalars of steps in it; name the file" in capsys.readouterr().err


def test_the_summary_that_wandb_prints_is_the_last_step_of_a_log_without_any(tmp_path, capsys):
    log = tmp_path / "train.log"
    values = {"timing_s/gen": 40.25, "timing_s/step": 60.5, "training/global_step": 31}
    lines = ["Run history:", "  timing_s/gen ▁▂▅▇", "Run summary:"]
    lines += [f"{name:>40} {value}" for name, value in values.items()]
    log.write_text("".join(f"(TaskRunner pid=7) wandb: {line}\n" for line in lines))

    (run,) = logged_runs([log], problems := [])
    assert [(31, 40.25, 60.5)] == [
        (line.step, line.values["timing_s/gen"], line.values["timing_s/step"]) for line in run.lines
    ]
    assert [f"{log} has no step lines; W&B's summary has the last step."] == problems
    # As of verl before 0.4: https://github.com/AgentR1/Agent-R1/issues/32.
    log.write_text("".join(f"(main_task pid=7) wandb: {line}\n" for line in lines[:-1]))
    (run,) = logged_runs([log], problems := [])
    assert 40.25 == run.lines[0].values["timing_s/gen"]
    assert [
        f"{log} has no step lines; W&B's summary has the last step, without its number."
    ] == problems


def test_jobs_that_logged_at_once_are_two_runs(tmp_path):
    one = console(tmp_path / "a", steps(6), pid=111).read_text().splitlines()
    two = (
        console(tmp_path / "b", steps(6, gen=lambda _step: 900.0), pid=222).read_text().splitlines()
    )
    log = tmp_path / "jobs.log"
    log.write_text("\n".join(line for pair in zip(one, two, strict=True) for line in pair) + "\n")

    runs = logged_runs([log], [])
    assert [6, 6] == [len(run.lines) for run in runs]
    assert [900.0] * 6 == [line.values["timing_s/gen"] for line in runs[1].lines]


def test_late_lines_of_an_earlier_version_are_no_resumption(tmp_path):
    """As the fully asynchronous trainer of verl 0.7 logs its rollouter's validations."""
    rows = []
    for step, values in steps(12):
        rows += [(step, values), (step, {"timing_s/param_sync": 6.0})]
        if step % 5 == 1 and step > 1:
            rows += [
                (step - 1, {"val-core/acc": 0.5}),
                (step - 1, {"timing_s/rollouter/validate_time": 88.0}),
            ]
    problems = []
    (run,) = logged_runs([console(tmp_path / "train.log", rows)], problems)

    assert [*range(1, 13)] == [line.step for line in run.lines]
    assert [1] == list(run.begins)
    assert [5, 10] == [
        line.step for line in run.lines if "timing_s/rollouter/validate_time" in line.values
    ]
    assert [] == problems


def test_gen_of_a_fully_asynchronous_log_is_a_wait_for_samples(tmp_path, capsys):
    """Of another trainer it is the rollout itself, of which the log shows nothing more."""
    for name, more in (("trainer", {"fully_async/trainer/idle_ratio": 0.6}), ("sync", {})):
        rows = [(step, values | more) for step, values in steps(8, gen=lambda _: 900.0)]
        log = console(tmp_path / f"{name}.log", rows)

        assert 0 == main(["why", "--json", str(log)])
        (found, *_) = json.loads(capsys.readouterr().out)["findings"]

        expected = "waits_for_rollout" if more else "rollout_bound"
        assert (expected, not more) == (found["finding"], found["dominates"])
        assert bool(more) == ("staleness_threshold" in found["advice"])


def test_what_an_asynchronous_trainer_measured_is_told_in_the_sentences_of_its_log(
    tmp_path, capsys
):
    """Idle shares, staleness and cut responses: means by hand; a count is the last one."""
    rows = []
    for step, values in steps(8, param_sync=lambda step: 6.0 if step < 5 else 1500.0):
        more = {
            "response_length/clip_ratio": 0.04 * step,
            "response_length/mean": 1000.0,
            "timing_s/agent_loop/generate_sequences/max": 390.0,
            "timing_s/agent_loop/generate_sequences/mean": 60.0,
            "timing_s/agent_loop/slowest/response_length": 4096,
            "timing_s/agent_loop/slowest/tool_calls": 12.5,
            "fully_async/trainer/idle_ratio": 0.25,
            "training/off_policy/trajectory_staleness/mean": 1.5,
            "fully_async/count/dropped_stale_samples": 10 * step,
        }
        rows += [(step, {"fully_async/rollouter/idle_ratio": 0.5}), (step, values | more)]
    log = console(tmp_path / "train.log", rows)

    assert 0 == main(["summary", "--json", str(log)])
    answer = json.loads(capsys.readouterr().out)
    assert [
        "train: responses at the length limit 18 %",
        "train: the trainer's step without samples 25 %",
        "train: a version's time since the rollouter's last pause began 50 %",
        "train: mean staleness of samples, in versions 1.5",
        "train: samples dropped as too old, by now 80",
    ] == answer["notes"]
    (figures,) = answer["headline"]
    _, *lengths = (values["timing_s/step"] for _, values in rows if "timing_s/step" in values)
    assert (8, [1], pytest.approx(sum(lengths) / 7), max(lengths)) == (
        figures["steps"], figures["left_out"], figures["step_mean_s"], figures["step_most_s"],
    )  # fmt: skip
    messages = " ".join(row["message"] for row in answer["findings"])
    assert "6 min 30 s, mean 60.0 s; 4,096 response tokens, mean 1,000; 12.5 s in its" in messages
    assert "param_sync: 6.00 s to 25 min 0 s since step 5." in messages
    assert 0 == main(["report", str(log), "--out", str(tmp_path / "r.html")])
    assert "responses at the length limit 18 %" in (tmp_path / "r.html").read_text()


def test_slime_s_lines_are_read(tmp_path, capsys):
    times = "{'perf/update_weights_time': 1.3, 'perf/train_wait_time': 211.3, 'perf/actor_train_time': 81.0, 'perf/train_time': 95.0, 'perf/step_time': 306.3}"
    log = tmp_path / "slime.log"
    log.write_text(
        "".join(f"(Actor pid=3) metric_utils.py:44 - perf {n}: {times}\n" for n in range(1, 7))
    )

    assert 0 == main(["summary", str(log)])
    out = capsys.readouterr().out
    assert re.search(r"\ntrain_wait +3 min 31 s +69 %", out)
    assert "slime (lines of slime): 6 steps, 30 min 38 s; mean 5 min 6 s" in out
    # No setting of this package records slime.
    assert "profiler=multiturn" not in out


def test_a_log_that_ends_without_a_step_is_answered_with_what_ended_it(tmp_path, capsys):
    log = tmp_path / "train.log"
    log.write_text(
        "(TaskRunner pid=42) Training Progress:   0%|          | 0/105 [00:00<?, ?it/s]\n"
        "Error executing job with overrides: ['x=1']\nTraceback (most recent call last):\n"
        '  File "/w/verl/trainer/main_ppo.py", line 97, in run_ppo\n    ray.get(1)\n'
        "ray.exceptions.RayTaskError(KeyError): ray::TaskRunner.run() (pid=42, ip=10.0.0.4)\n"
        '  File "/w/my_rewards.py", line 12, in compute_score\n    return table[key]\n'
        "KeyError: 'answer'\n"
    )
    for command in ("summary", "timing"):
        assert 1 == main([command, str(log)])
        assert (
            "No step was finished: after start-up was over it failed with KeyError in compute_score "
            "(/w/my_rewards.py:12, reward function): 'answer'." in capsys.readouterr().err
        )
    # verl logs what requests raise, and fails because nothing came of them.
    request = (
        "(AgentLoopWorker pid={pid}) ERROR:Error in _run_prompt for uid=1\n"
        '(AgentLoopWorker pid={pid})   File "/w/my_rewards.py", line 12, in compute_score\n'
        "(AgentLoopWorker pid={other}) INFO: between both lines\n"
        '(AgentLoopWorker pid={pid})   File "/usr/lib/python3.11/json/decoder.py", line 3, in decode\n'
        "(AgentLoopWorker pid={pid}) KeyError: 'answer'\n"
    )
    log.write_text(
        "".join(request.format(pid=pid, other=9 - pid) for pid in (4, 5, 4))
        + 'Traceback (most recent call last):\n  File "/x/site-packages/tq/client.py", line 961, in get\n'
        "ValueError: Received an empty list.\n"
    )
    assert 1 == main(["summary", str(log)])
    assert (
        "KeyError was raised 3 times in compute_score (/w/my_rewards.py:12, reward function): 'answer'; "
        "then it failed with ValueError in get (/x/site-packages/tq/client.py:961): Received an empty list.\n"
    ) in capsys.readouterr().err
    console(log, steps(3))
    log.write_text(log.read_text() + "CUDA out of memory. Tried to allocate 2.00 GiB\n")
    assert 0 == main(["summary", str(log)])
    assert (
        "After step 3 it failed (CUDA out of memory. Tried to allocate 2.00 GiB)."
        in capsys.readouterr().out
    )


def test_a_log_that_stops_during_start_up_is_answered_with_how_far_it_came(tmp_path, capsys):
    log = tmp_path / "train.log"
    log.write_text(
        "2026-11-21 01:46:10,685 INFO worker.py:2038 -- Started a local Ray instance.\n"
        "(TaskRunnerV1 pid=11052) dataset len: 64\n"
        "(TaskRunnerV1 pid=11052) INFO:2026-11-21 01:46:30,685:Total training steps: 3\n"
        "(WorkerDict pid=11227) Before FSDP, memory allocated (GB): 0.00\n"
    )
    for command in ("summary", "timing", "why"):
        assert 1 == main([command, str(log)])
        assert (
            "No step was finished: the log ends after the data loaders were made; its last line: "
            "Before FSDP, memory allocated (GB): 0.00\n" in capsys.readouterr().err
        )


def test_what_an_engine_handled_before_training_began_did_not_end_it(tmp_path, capsys):
    """Lines of SGLang 0.5.12 without openai_harmony; the run generated until it was killed."""
    engine = "(SGLangHttpServer pid=3455)"
    log = tmp_path / "train.log"
    log.write_text(
        f"{engine} [2026-11-27 08:52:52] Can not initialize OpenAIServingResponses, error: Traceback "
        "(most recent call last):\n"
        f'{engine}   File "/opt/sglang/srt/entrypoints/openai/serving_responses.py", line 30, in <module>\n'
        f"{engine}     from openai_harmony import Message as OpenAIMessage\n"
        f"{engine} ModuleNotFoundError: No module named 'openai_harmony'\n"
        f"{engine} \n{engine} [2026-11-27 08:52:52] The server is fired up and ready to roll!\n"
        "(TaskRunnerV1 pid=2184) Training Progress:   0%|          | 0/4 [00:00<?, ?it/s]\n"
        f"{engine} [2026-11-27 08:53:44] Decode batch, #running-req: 1, #token: 637\n"
    )
    assert 1 == main(["summary", str(log)])
    assert (
        "No step was finished: the log ends after start-up was over; its last line: "
        "[2026-11-27 08:53:44] Decode batch, #running-req: 1, #token: 637\n"
        in capsys.readouterr().err
    )


def test_a_log_without_figures_is_answered_from_its_progress_bar(tmp_path, capsys):
    """verl prints no line of a step where trainer.logger has no console; its bar is there."""
    log = tmp_path / "train.log"
    bar = "(TaskRunner pid=4) Training Progress:   1%|1   | {}/624 [{}<103:53:21, 600.32s/it]"
    bars = [
        bar.format(*at) for at in ((20, "00:00"), (21, "10:00"), (22, "20:10"), (24, "1:02:10"))
    ]
    lacking = (
        "the log has no figures of steps. Add console to trainer.logger, or name the file that another "
        "logger wrote.\n"
    )
    four = f"step 24 of 624 after 4 steps in 62 min 10 s, 15 min 33 s each; {lacking}"
    for end in ("\n", "\r"):
        log.write_text(end.join(bars) + "\n")
        for command in ("summary", "timing", "why"):
            assert 1 == main([command, str(log)])
            assert f"The progress bar is at {four}" in capsys.readouterr().err
    log.write_text("\n".join([*bars, "CUDA out of memory. Tried to allocate 2.00 GiB", ""]))
    assert 1 == main(["summary", str(log)])
    failed = "After step 24 it failed (CUDA out of memory. Tried to allocate 2.00 GiB)."
    assert f"{failed} The progress bar is at {four}" in capsys.readouterr().err
    # The end of a log.
    log.write_text(f"{bars[-1]}\n")
    assert 1 == main(["summary", str(log)])
    assert f"The progress bar is at step 24 of 624; {lacking}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "ended"),
    [
        (
            (
                "Could not override 'actor_rollout_ref.rollout.foo'.\nKey 'foo' is not in struct\n"
                "    full_key: actor_rollout_ref.rollout.foo\n\nSet the environment variable HYDRA_FULL_ERROR=1\n"
            ),
            "it failed (Could not override 'actor_rollout_ref.rollout.foo' (Hydra: the config has no such key)).",
        ),
        (
            "omegaconf.errors.ConfigAttributeError: Key 'foo' is not in struct\n    full_key: data.foo\n",
            "it failed with ConfigAttributeError: Key 'foo' is not in struct (data.foo).",
        ),
        (
            (
                "(WorkerDict pid=99) [rank3]:[E1010 12:00:00.123 ProcessGroupNCCL.cpp:632] [Rank 3] Watchdog caught "
                "collective operation timeout: WorkNCCL(SeqNum=4486, OpType=ALLREDUCE, Timeout(ms)=600000) ran for "
                "600013 milliseconds before timing out.\n"
            ),
            (
                "it failed ([Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4486, "
                "OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600013 milliseconds)."
            ),
        ),
        (
            "slurmstepd: error: *** JOB 123 ON n1 CANCELLED AT 2026-01-01T10:00:00 DUE TO TIME LIMIT ***\n",
            "it failed (*** JOB 123 ON n1 CANCELLED AT 2026-01-01T10:00:00 DUE TO TIME LIMIT (Slurm)).",
        ),
        ("run.sh: line 3:  4711 Killed                  python3 -m verl\n", "Killed (by SIGKILL)"),
        (
            "main_ppo.py: error: unrecognized arguments: --foo\n\n",
            "as verl prints one per step; its last line: main_ppo.py: error: unrecognized arguments: --foo",
        ),
    ],
)
def test_a_log_without_an_exception_ends_with_what_it_shows(tmp_path, capsys, text, ended):
    """Texts of Hydra, omegaconf, torch, Slurm and bash."""
    log = tmp_path / "train.log"
    log.write_text(text)

    assert 1 == main(["summary", str(log)])
    assert ended in capsys.readouterr().err


def test_the_report_of_a_log_begins_as_that_of_a_run_and_that_of_two_with_their_difference(
    tmp_path, capsys
):
    before = console(tmp_path / "before.log", steps(12))
    after = console(tmp_path / "after.log", steps(12, gen=lambda _: 2 * GEN))
    assert 0 == main(["summary", str(before)])
    assert {before, after} == set(tmp_path.iterdir())
    assert 0 == main(["report", str(before), "--out", str(tmp_path / "one.html")])
    page = (tmp_path / "one.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    assert "before: 12 steps" in page
    assert "bounds the step" in page
    assert "This is from the log alone" in data["about"]["notes"][-1]
    (bar,) = data["mean_step"]
    assert bar["whole_s"] == pytest.approx(GEN + UPDATE + 2 * FORWARD + SYNC, rel=0.02)
    assert 4 <= sum(len(view["charts"]) for view in data["views"].values())
    assert not data["timelines"]["requests"]["rows"]
    assert 0 == main(["report", str(before), str(after), "--out", str(tmp_path / "two.html")])
    page = (tmp_path / "two.html").read_text()
    assert "Difference of the runs" in page
    assert "The largest other significant change is gen.mean, +6 min 40 s." in page
    assert 0 == main(["report", str(before)])
    assert (tmp_path / "before-report.html").exists()
    capsys.readouterr()


def test_commands_that_need_a_run_name_those_that_take_a_log(tmp_path, capsys):
    log = console(tmp_path / "train.log", steps(6))
    assert 0 == main(["why", str(log)])
    out = " ".join(capsys.readouterr().out.split())
    assert "gen bounds the step" in out
    # In full.
    assert "requests, turns, tools, engines, ranks. see: step_timing_breakdown" in out
    for name in ("console.log", "files/output.log"):
        folder = tmp_path / name.partition(".")[0].partition("/")[0]
        held = folder / name
        held.parent.mkdir(parents=True)
        held.write_text(log.read_text())
        assert 2 == main(["summary", str(folder)])
        assert f"It holds a log: name {held} (no-events)" in capsys.readouterr().err
    for command in ("requests", "export perfetto", "plot slowest_requests"):
        assert 2 == main([*command.split(), str(log)])
        error = capsys.readouterr().err
        assert "is a log" in error
        assert "summary, why, report, diff, timing, tq and memory take logs" in error


def test_means_and_gains_leave_out_the_first_step_of_a_launch_and_the_text_names_it(
    tmp_path, capsys
):
    """As of a recorded run; steps that the user chose all count."""
    path = console(tmp_path / "train.log", steps(6, gen=lambda step: 4e3 if step == 1 else GEN))
    assert 0 == main(["summary", str(path)])
    out = capsys.readouterr().out
    assert "What to change first (gains per step, without step 1, not additive)" in out
    assert re.search(r"; mean 13 min \d+ s, .*; means without step 1 \(73 min \d+ s\)", out)
    assert re.search(r"\ngen +6 min 40 s +4\d %", out)
    assert 0 == main(["summary", str(path), "--steps", "2:6"])
    out = capsys.readouterr().out
    assert "What to change first (gains per step, not additive)" in out
    assert "means without" not in out
    assert 0 == main(["summary", str(path), "--json"])
    (headline,) = json.loads(capsys.readouterr().out)["headline"]
    assert (6, [1]) == (headline["steps"], headline["left_out"])
    assert 0 == main(["report", str(path)])
    page = (tmp_path / "train-report.html").read_text()
    data = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    (bar,) = data["mean_step"]
    assert GEN == pytest.approx(next(part[1] for part in bar["parts"] if part[0] == "gen"))
    (run,) = logged_runs([path], [])
    chosen = replace(run, lines=run.lines[1:])
    assert [(row["steps"], row["recoverable_s"]) for row in log_findings(run)] == [
        (row["steps"], row["recoverable_s"]) for row in log_findings(chosen)
    ]


def first_of(path):
    (run,) = logged_runs([path], [])
    return log_findings(run)[0]


def test_a_timer_that_is_not_a_number_is_no_stall(tmp_path):
    rows = list(steps(10))
    rows[4][1]["timing_s/gen"] = float("nan")

    assert [("rollout_bound", "gen")] == [
        each[:2] for each in found(console(tmp_path / "a.log", rows))
    ]


def loops(step, values, slowest_s, tools_s, **more):
    """Add what verl measures of the requests of a batch; the longest generation is another request's."""
    loop = "timing_s/agent_loop"
    own = {
        "generate_sequences/max": 1.5 * slowest_s, "generate_sequences/mean": slowest_s / 2,
        "slowest/generate_sequences": slowest_s, "slowest/tool_calls": tools_s,
    } | more  # fmt: skip
    return step, {**{f"{loop}/{name}": value for name, value in own.items()}, **values}


def test_what_gen_takes_besides_its_slowest_request_is_named(tmp_path):
    """Tools of that request, and what precedes or follows all requests, such as a weight reload."""
    slow = [loops(*row, 20.0, 350.0) for row in steps(8)]
    first = first_of(console(tmp_path / "a.log", slow))
    assert ("tool_time", pytest.approx(350, rel=0.01)) == (first["finding"], first["recoverable_s"])
    reload = [loops(*row, 120.0, 0.0) for row in steps(8)]
    first = first_of(console(tmp_path / "b.log", reload))
    assert ("gen_besides", pytest.approx(GEN - 180, rel=0.02)) == (
        first["finding"], first["recoverable_s"],
    )  # fmt: skip
    resharded = [
        (step, {"timing_s/generate_sequences": 90.0, "timing_s/reshard": 300.0} | values)
        for step, values in steps(8)
    ]
    first = first_of(console(tmp_path / "c.log", resharded))
    assert ("reshard", 300.0) == (first["finding"], first["recoverable_s"])


def test_preemptions_have_their_own_remedy(tmp_path):
    rows = [
        loops(*row, 260.0, 0.0, **{"num_preempted/mean": 12.4, "slowest/num_preempted": 25})
        for row in steps(8)
    ]
    (bound,) = [
        row for row in log_findings(logged_runs([console(tmp_path / "a.log", rows)], [])[0])
        if row["finding"] == "rollout_bound"
    ]  # fmt: skip
    assert "preempted 25 times" in bound["message"]
    assert "gpu_memory_utilization" in bound["advice"]


def test_batches_that_are_generated_again_explain_a_gen_that_grows(tmp_path):
    """As verl's DAPO recipe does while groups are filtered out."""
    rows = [
        (step, values | {"train/num_gen_batches": 1 + step // 5})
        for step, values in steps(35, gen=lambda step: 150.0 * (1 + step // 5))
    ]
    first = first_of(console(tmp_path / "a.log", rows))

    assert "more_batches" == first["finding"]
    assert "clocks" not in first["advice"]
    assert 8 * 150 / 2 == pytest.approx(first["recoverable_s"], rel=0.35)


def test_as_many_batches_in_each_step_are_two_thirds_of_gen(tmp_path):
    """https://github.com/verl-project/verl/issues/1458: 1,400 s of gen."""
    rows = [
        (step, values | {"train/num_gen_batches": 3})
        for step, values in steps(6, gen=lambda _: 1400.0)
    ]
    first = first_of(console(tmp_path / "a.log", rows))

    assert ("more_batches", 1400 * 2 / 3) == (
        first["finding"],
        pytest.approx(first["recoverable_s"]),
    )
    assert "3 per step" in first["message"]


def test_lengths_of_responses_are_stated_where_requests_were_not_measured(tmp_path):
    lengths = {"response_length/mean": 1161.2, "response_length/max": 9723.0}
    rows = [(step, values | lengths) for step, values in steps(6, gen=lambda _: 1400.0)]
    (run,) = logged_runs([console(tmp_path / "a.log", rows)], [])

    (bound,) = [row for row in log_findings(run) if row["finding"] == "rollout_bound"]
    assert "1,161 tokens on average, the longest 9,723" in bound["message"]


def test_a_comparison_names_timers_inside_gen_and_work_that_explains_too_little(tmp_path, capsys):
    """https://github.com/verl-project/verl/issues/3173 and 1885."""

    def log(name, reshard_s, tokens):
        rows = [
            (step, values | {"timing_s/generate_sequences": 200.0, "timing_s/reshard": reshard_s + step % 2})
            for step, values in steps(8, gen=lambda _: 210 + reshard_s, tokens=tokens)
        ]  # fmt: skip
        return str(console(tmp_path / name, rows))

    assert 0 == main(["diff", log("a.log", 15.0, 1e6), log("b.log", 1200.0, 1.26e6)])
    first = capsys.readouterr().out
    assert "total_tokens 1,000,000 to 1,260,000 (+26 %); step times change by far more" in first
    assert re.search(
        r"\n  reshard\.mean .*\+19 min 45 s", first.partition("Significant changes")[2]
    )


def test_host_memory_that_grows_is_reported(tmp_path):
    def memory(per_step):
        return [
            (step, values | {"perf/cpu_memory_used_gb": 150.0 + per_step * step + step % 3})
            for step, values in steps(20)
        ]

    (row,) = [
        row
        for row in log_findings(logged_runs([console(tmp_path / "a.log", memory(26.0))], [])[0])
        if row["finding"] == "host_memory"
    ]
    assert "26.0 GB per step" in row["message"]
    assert "host_memory" not in [
        each[0] for each in found(console(tmp_path / "b.log", memory(0.05)))
    ]


@pytest.mark.parametrize("stamped", [True, False])
def test_what_lies_between_steps_is_in_the_progress_bar_or_the_times_of_the_lines(
    tmp_path, stamped
):
    """75 s after each step; the bar has whole seconds."""
    lines, at_s = [], 0.0
    for step, values in steps(12):
        at_s += values["timing_s/step"] + 75
        metrics = " - ".join(f"{name}:{value}" for name, value in values.items())
        second = int(at_s)
        clock = f"{second // 3600}:{second // 60 % 60:02d}:{second % 60:02d}"
        prefix = f"[2026-03-12 0{clock}] " if stamped else ""
        lines.append(f"{prefix}(TaskRunner pid=7) step:{step} - {metrics}")
        if not stamped:
            lines.append(
                f"(TaskRunner pid=7) Training Progress:   1%|1   | {step}/624 [{clock}<9:21:21, 600.32s/it]"
            )
    log = tmp_path / "train.log"
    log.write_text("\n".join(lines) + "\n")

    (run,) = logged_runs([log], [])
    (row,) = [row for row in log_findings(run) if row["finding"] == "between_steps"]
    assert 75 == pytest.approx(row["recoverable_s"], rel=0.02)
    lengths = {
        name: [row["value"] for row in logged_metrics(run) if row["name"] == name]
        for name in ("step", "step_to_step")
    }
    assert [12, 12] == [len(each) for each in lengths.values()]
    assert 75 * 12 == pytest.approx(sum(lengths["step_to_step"]) - sum(lengths["step"]), rel=0.02)


def test_times_that_are_none_and_of_several_clocks_are_no_gaps(tmp_path):
    """No such day, fractions of any length, and a progress bar after some lines only."""
    stamps = [
        "[2026-02-30 25:61:00,5] ",
        "[2026-03-12 01:00:00,5] ",
        "[2026-03-12 01:10:00.12345678] ",
    ]
    lines = []
    for step, values in steps(12):
        metrics = " - ".join(f"{name}:{value}" for name, value in values.items())
        prefix = stamps[step % 3] if step % 4 else ""
        lines.append(f"{prefix}(TaskRunner pid=7) step:{step} - {metrics}")
        lines.append(
            f"Training Progress:   1%|1   | {step}/624 [0:10:{step:02d}<9:21:21, 600.32s/it]"
        )
    log = tmp_path / "train.log"
    log.write_text("\n".join(lines) + "\n")

    (run,) = logged_runs([log], [])
    assert [] == [row for row in log_findings(run) if row["finding"] == "between_steps"]


def test_some_steps_that_take_longer_with_equal_tokens_are_named(tmp_path):
    """As every eighth one may, for garbage collection."""
    rows = steps(40, update_actor=lambda step: UPDATE + (400 if step % 8 == 0 else 0))
    first = first_of(console(tmp_path / "a.log", rows))

    assert ("uneven_times", "update_actor") == (first["finding"], next(iter(first["accounts"])))
    assert 400 * 5 / 39 == pytest.approx(first["recoverable_s"], rel=0.05)
    assert "every 8 steps" in first["where"]


def test_the_parts_of_slime_s_waiting_are_named(tmp_path):
    times = "{'perf/update_weights_time': 239.0, 'perf/train_wait_time': 430.0, 'perf/train_time': 115.0, 'perf/step_time': 545.0}"
    log = tmp_path / "slime.log"
    log.write_text("".join(f"(Actor pid=3) x.py:44 - perf {n}: {times}\n" for n in range(1, 7)))

    assert "update_weights 3 min 59 s" in first_of(log)["message"]


def test_slime_s_rollout_and_the_parts_of_its_training_are_named(tmp_path, capsys):
    """https://github.com/THUDM/slime/issues/1072: half of the step is waiting."""
    rollout = "{'rollout/response_len/mean': 1003.2, 'perf/rollout_time': 318.4, 'perf/tokens_per_gpu_per_sec': 402.1}"
    train = (
        "{'perf/log_probs_time': 21.9, 'perf/actor_train_time': 240.0, 'perf/train_time': 300.2, "
        "'perf/train_wait_time': 318.9, 'perf/step_time': 619.1, 'perf/wait_time_ratio': 0.515}"
    )
    log = tmp_path / "slime.log"
    log.write_text(
        "".join(
            f"(RolloutManager pid=2) x.py:268 - perf {n}: {rollout}\n(Actor pid=3) x.py:401 - perf {n}: {train}\n"
            for n in range(6)
        )
    )
    # Its first step is 0.
    assert 0 == main(["diff", str(log), str(log)])
    assert "5 steps, 1 to 5; step 0 left out as warm-up" in capsys.readouterr().out
    (run,) = logged_runs([log], [])
    waits, trains = (row["message"] for row in log_findings(run))

    assert (
        "train_wait bounds the step: 5 min 19 s per step (52 %); in it rollout 5 min 18 s" in waits
    )
    assert "in it log_probs 21.9 s, actor_train 4 min 0 s" in trains


def test_lines_of_a_process_that_logs_no_step_resume_nothing(tmp_path):
    one = console(tmp_path / "a", steps(6)).read_text().splitlines()
    lines = [
        line
        for step, each in enumerate(one, 1)
        for line in (each, f"(Rollouter pid=9) step:{step} - fully_async/rollouter/idle_ratio:0.1")
    ]
    log = tmp_path / "train.log"
    log.write_text("\n".join(lines) + "\n")

    (run,) = logged_runs([log], problems := [])
    assert ([1], []) == (list(run.begins), problems)


def test_how_often_validation_runs_is_not_claimed_from_one_step(tmp_path):
    """A pasted line of one step; of two, one of which validates, it is a mean."""
    path = tmp_path / "train.log"
    step = "step:{} - timing_s/gen:100.0 - timing_s/step:100.0 - timing_s/testing:{} - timing_s/save_checkpoint:20.0\n"

    def messages(*lines):
        path.write_text("".join(step.format(*each) for each in lines))
        (run,) = logged_runs([path], [])
        return {row["finding"]: row["message"] for row in log_findings(run)}

    one, two = messages((60, 80.0)), messages((60, 80.0), (61, 0.0))

    assert (
        "80.0 s (40 %) in the one step of this log; how often it runs is not known"
        in one["validation"]
    )
    assert (
        "20.0 s (10 %) in the one step of this log; how often it runs is not known"
        in one["checkpoint"]
    )
    assert "40.0 s per step" in two["validation"]
