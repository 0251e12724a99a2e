"""The diff command: tables, conditions and exit status."""

import json
import re
import shutil

import numpy as np
import pytest
from cached_runs import REHEARSED, SMALL
from commands import command
from event_files import ended, phases, write_lines
from picked import picked

from verl_profiler.analysis.compare.comparison import Metric
from verl_profiler.analysis.compare.differences import condition
from verl_profiler.cli import diff
from verl_profiler.errors import ReadingError
from verl_profiler.views.diff_text import diff_text

run = command(diff)


def make_run(
    folder, steps, *, gen=4.0, tool=0.5, every=40.0, update=lambda _: 1.0, tokens=lambda _: 100
):
    """Write a run whose steps take `gen` and an update, with one request each, one step `every` so many s."""
    for step in range(1, steps + 1):
        # Steps differ, in every run in the same way.
        spread = 1 + 0.1 * (step * 7 % 5)
        length, took, begin = gen * spread, tool * spread, step * every
        ids = {"step": step, "request_id": f"q{step}"}
        figures = {"generated_tokens": tokens(step), "turns": 1}
        write_lines(
            folder,
            trainer_0=phases(step, length, length + update(step), begin_s=begin),
            worker_0=[
                ended("tool_call", begin + took, took, tool="search", turn=0, **ids),
                ended("request", begin + length, length, **figures, **ids),
            ],
        )
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run, the same again, and one whose generation takes 20 % longer."""
    folder = tmp_path_factory.mktemp("runs")
    return (
        make_run(folder / "base", 12),
        make_run(folder / "again", 12),
        make_run(folder / "slow", 12, gen=4.8),
    )


def metrics_of(capsys, *arguments):
    run(*arguments, "--json")
    document = json.loads(capsys.readouterr().out)
    return document, {row["metric"]: row for row in document["metrics"]}


def test_the_same_run_twice_differs_by_nothing(capsys, runs):
    """No metric, and the sentence says so."""
    document, metrics = metrics_of(capsys, *runs[:2])

    assert {0} == {row["difference"] for row in document["metrics"]}
    assert {False} == {row["significant"] for row in document["metrics"]}
    assert 0 == run(*runs[:2], "--fail-if", "step.p50 > +1%")
    printed = capsys.readouterr().out
    assert "not significant" in printed
    assert "No other metric changed significantly" in printed
    assert "passed: step.p50 within +1 %" in printed


def test_a_slower_generation_is_found(capsys, runs):
    """In the figures that it is in, and no others; the first step is left out."""
    document, metrics = metrics_of(capsys, runs[0], runs[2])

    assert [list(range(2, 13))] * 2 == [each["steps"] for each in document["runs"]]
    assert pytest.approx(0.2) == metrics["gen.mean"]["share"]
    assert metrics["gen.mean"]["significant"]
    assert metrics["step.mean"]["significant"]
    assert metrics["request.p50"]["significant"]
    assert not metrics["update_actor.mean"]["significant"]
    assert not metrics["tool_call:search.mean"]["significant"]
    assert metrics["gen.mean"]["low"] <= 0.8 * 1.2 <= metrics["gen.mean"]["high"]


# Of the slower generation, and whether it fails.
CONDITIONS = {
    "step.p50 > +5%": True,
    "step.p50 > +30%": False,
    "gen > +0.5s": True,
    "gen.p90 > +600ms": True,
    "gen.max > 50s": False,
    "generated_tokens_per_s.mean < -5%": True,
    "tool_call:search.p50 > +1%": False,
    "request.count > 0.5": True,
}


def test_conditions_set_the_status(capsys, runs):
    """A change has to be beyond the limit; a limit is of B alone; each is reported, and one is enough."""
    asked = [word for condition in CONDITIONS for word in ("--fail-if", condition)]

    assert 1 == run(runs[0], runs[2], *asked)
    reported = re.findall("^(passed|FAILED)", capsys.readouterr().out, re.MULTILINE)
    assert [*CONDITIONS.values()] == [each == "FAILED" for each in reported]
    assert 0 == run(runs[0], runs[2], "--fail-if", "step.p50 > +30%")


def test_a_limit_is_tested_not_the_change(capsys, runs):
    """Steps are 15 % longer, significantly; whether that is more than 14 % is not."""
    _, metrics = metrics_of(capsys, runs[0], runs[2])
    share = metrics["step.mean"]["share"]

    assert 0 == run(runs[0], runs[2], "--fail-if", f"step > +{share * 100 - 0.05:.2f}%")
    assert "but not significantly" in capsys.readouterr().out
    assert 1 == run(runs[0], runs[2], "--fail-if", f"step > +{share * 50:.2f}%")


@pytest.mark.parametrize(("rise", "highest"), [(0.04, 0.02), (0.05, 0.05)])
def test_a_change_below_the_limit_rarely_fails(rise, highest):
    """300 pairs of 10 steps that vary by 3 %, and two standard errors."""
    source, gate, failed = np.random.default_rng(6), condition("step > +5%"), 0
    for _ in range(300):
        a, b = source.normal(10, 0.3, 10), source.normal(10 * (1 + rise), 0.3, 10)
        failed += (
            gate.p(Metric("step.mean", "s", dict(enumerate(a)), dict(enumerate(b, 99)))) <= 0.05
        )

    assert failed <= 300 * highest + 2 * (300 * highest * (1 - highest)) ** 0.5


@pytest.mark.parametrize(
    ("asked", "words", "slug"),
    [
        ("step.p50 = 3", "is not a condition", "bad-condition"),
        ("step.p50 > +5 minutes", "is not a condition", "bad-condition"),
        ("step.p50 > 5%", r"Write \+5% or -5%", "bad-condition"),
        ("generation.p50 > +5%", "no metric generation", "no-such-metric"),
        ("update_actr.p50 > +5%", "did you mean update_actor", "no-such-metric"),
        ("step.total > +5%", "occurs once per step", "no-such-metric"),
        # The maximum of any number of steps has no interval.
        ("gen.max > +1%", "max has no interval", "too-few-steps"),
        # One request per step has no 95th percentile: it would be its maximum.
        ("request.p95 > 1s", "p95 20", "too-few-steps"),
    ],
)
def test_a_condition_that_cannot_be_judged_is_refused(runs, asked, words, slug):
    """With a line that can be copied; a misspelt condition must not pass for ever."""
    with pytest.raises(ReadingError, match=words) as raised:
        run(runs[0], runs[2], "--fail-if", asked)
    assert slug == raised.value.slug


def test_few_steps_have_no_test(capsys, runs):
    """Two against two: a condition on a change cannot be judged, and does not pass quietly."""
    sides = (f"{runs[0]}@2:3", f"{runs[2]}@2:3")

    assert 0 == run(*sides)
    printed = capsys.readouterr().out
    assert "too few steps to distinguish a change from noise" in printed
    assert re.search(r"Metrics not shown: .*\d+ not testable; --all shows them", printed)
    assert "without a significant change" not in printed
    for change in ("step.p50 > +5%", "gen.max > +1%", "gen.p95 > +1%", "step < -90%"):
        with pytest.raises(ReadingError, match="too few to tell") as raised:
            run(*sides, "--fail-if", change)
        assert "too-few-steps" == raised.value.slug
    assert 1 == run(*sides, "--fail-if", "step.p50 > 1s")


def test_three_noisy_steps_are_not_testable(tmp_path, capsys):
    """Seven times as long, with steps of 3 to 30 s: neither "no significant change" nor passed."""
    a = make_run(tmp_path / "a", 4, gen=2.0)
    b = make_run(tmp_path / "b", 4, gen=2.0, update=lambda step: (1.0, 1.0, 8.0, 60.0)[step - 1])
    document, metrics = metrics_of(capsys, a, b)
    assert metrics["step.mean"]["share"] > 6
    assert (False, False) == picked(metrics["step.mean"], "significant testable")
    run(a, b, "--all")
    printed = capsys.readouterr().out
    assert "not testable: too few steps, a doubling could be missed" in printed
    assert "update_actor.mean" not in printed.partition("Not testable")[0].partition("No sig")[2]
    assert "No other metric changed significantly" not in printed
    with pytest.raises(ReadingError, match="would be noticed") as raised:
        run(a, b, "--fail-if", "step > +5%")
    assert "too-few-steps" == raised.value.slug


def test_the_time_between_steps_is_compared(tmp_path, capsys):
    """A dump of 38 s after each step is in no step: 8 steps, one every 40 s and one every 78 s."""
    a, b = make_run(tmp_path / "a", 8), make_run(tmp_path / "b", 8, every=78.0)
    _, metrics = metrics_of(capsys, a, b)

    assert pytest.approx(0.0, abs=1e-6) == metrics["step.mean"]["difference"]
    assert pytest.approx(38.0) == metrics["step_to_step.mean"]["difference"]
    assert metrics["step_to_step.mean"]["significant"]
    assert 1 == run(a, b, "--fail-if", "step_to_step > +5%")
    printed = capsys.readouterr().out
    assert "From the start of a step to the start of the next one it is +38.0 s" in printed
    assert "+38.0 s of that is between steps" in printed
    # Of the last step, the next start is unknown: longer steps are no time between steps.
    run(a, make_run(tmp_path / "c", 8, update=lambda step: 1.0 + 30 * (step == 8)))
    assert "between steps" not in capsys.readouterr().out


def test_console_logs_are_compared_by_their_timers(tmp_path, capsys):
    """Gen of 74 s becomes 41 s, the update keeps its 260 s."""
    for name, gen in (("before", 74.0), ("after", 41.0)):
        lines = [
            f"(TaskRunner pid=1) step:{step} - training/global_step:{step} - "
            f"timing_s/gen:{gen + step * 7 % 5} - timing_s/update_actor:{260 + step * 3 % 4} - "
            f"timing_s/step:{gen + step * 7 % 5 + 260 + step * 3 % 4} - "
            f"perf/total_num_tokens:{3_000_000 + step * 11 % 7}"
            for step in range(1, 13)
        ]
        (tmp_path / f"{name}.log").write_text("\n".join(lines) + "\n")
    document, metrics = metrics_of(capsys, tmp_path / "before.log", tmp_path / "after.log")

    assert list(range(2, 13)) == document["runs"][0]["steps"]
    for name in ("step.mean", "gen.mean"):
        assert pytest.approx(-33.0, abs=0.5) == metrics[name]["difference"]
        assert metrics[name]["significant"]
    assert not metrics["update_actor.mean"]["significant"]
    sides = (f"{tmp_path}/before.log@1:5", f"{tmp_path}/after.log@6:12")
    document, metrics = metrics_of(capsys, *sides)
    # Of steps that were asked for, none is left out.
    assert [[*range(1, 6)], [*range(6, 13)]] == [each["steps"] for each in document["runs"]]
    assert metrics["gen.mean"]["significant"]
    (tmp_path / "other.log").write_text("no steps here\n")
    with pytest.raises(ReadingError, match="holds 0 runs"):
        run(tmp_path / "before.log", tmp_path / "other.log")


def test_what_differs_between_launches_is_not_a_change(tmp_path, capsys):
    """Launches of the same take 4, 6 and 5 s per generation: B is in between, until it takes 12 s."""
    a = [make_run(tmp_path / f"a{gen}", 8, gen=gen) for gen in (4.0, 6.0)]
    b = [make_run(tmp_path / f"b{gen}", 8, gen=gen) for gen in (6.2, 5.0)]
    slow = [make_run(tmp_path / f"slow{gen}", 8, gen=gen) for gen in (24.0, 26.0)]
    sides = [",".join(map(str, each)) for each in (a, b, slow)]
    _, alone = metrics_of(capsys, a[0], b[0])
    document, together = metrics_of(capsys, *sides[:2])
    _, slower = metrics_of(capsys, sides[0], sides[2])

    assert alone["step.mean"]["significant"]
    assert [2, 2] == [each["launches"] for each in document["runs"]]
    assert not together["step.mean"]["significant"]
    # By hand: means of 5 x 1.2286 and 5.6 x 1.2286 s, since steps are spread by 1.2286 on average.
    spread = sum(1 + 0.1 * (step * 7 % 5) for step in range(2, 9)) / 7
    assert pytest.approx(0.6 * spread) == together["step.mean"]["difference"]
    assert slower["step.mean"]["significant"]
    with pytest.raises(ReadingError, match="names a run twice"):
        diff.sides(f"{a[0]},{a[0]}")
    # Launches that are the same by chance are no proof that nothing varies: their steps do.
    again = [make_run(tmp_path / name, 8, gen=4.0) for name in ("again", "more")]
    other = make_run(tmp_path / "other", 8, gen=4.01)
    _, close = metrics_of(capsys, ",".join(map(str, again)), other)
    assert not close["step.mean"]["significant"]
    assert 1 == run(sides[0], sides[2], "--fail-if", "step > +5%")
    assert "The unit is a launch (2 of A, 2 of B)" in capsys.readouterr().out


def test_a_drift_names_its_phase(tmp_path, capsys):
    """The update grows by 0.5 s per step, the generation stays."""
    grown = make_run(tmp_path / "grown", 16, update=lambda step: 1 + step / 2)
    run(f"{grown}@1:8", f"{grown}@9:16")

    printed = capsys.readouterr().out
    assert "The step grows by 482 ms per step; most of it is update_actor (500 ms)." in printed


def test_steps_are_compared_at_equal_tokens(tmp_path, capsys):
    """Steps as long as their responses, with 20 % longer responses: slower, but not per token."""
    a = make_run(tmp_path / "a", 9, tokens=lambda step: 100 + 10 * (step * 7 % 5))
    b = make_run(tmp_path / "b", 9, gen=4.8, tokens=lambda step: 120 + 12 * (step * 7 % 5))
    document, metrics = metrics_of(capsys, a, b)
    run(a, b)

    assert metrics["step.mean"]["difference"] > 0.9
    assert "generated_tokens" == document["equal_tokens"]["tokens"]
    assert pytest.approx(0.0, abs=1e-6) == document["equal_tokens"]["difference"]
    assert "At equal generated_tokens it is" in capsys.readouterr().out
    document, _ = metrics_of(capsys, make_run(tmp_path / "c", 9), a)
    assert {} == document["equal_tokens"]


def test_an_at_sign_in_a_path_is_part_of_the_path(tmp_path, runs):
    """When the path exists."""
    folder = tmp_path / "run@3"
    shutil.copytree(runs[0], folder)

    with_comma = tmp_path / "run,4"
    shutil.copytree(runs[0], with_comma)
    assert [with_comma] == [each.path for each in diff.sides(str(with_comma))]
    assert [folder, runs[0]] == [each.path for each in diff.sides(f"{folder},{runs[0]}")]
    assert (folder, None) == (diff.side(str(folder)).path, diff.side(str(folder)).steps)
    assert (2, 4) == diff.side(f"{folder}@2:4").steps
    assert folder == diff.side(f"{folder}@2:4").path


def test_no_step_left_is_an_error(runs, tmp_path):
    """A run of one step keeps it."""
    one = make_run(tmp_path / "one", 1)
    write_lines(tmp_path / "none", worker_0=[ended("request", 5.0, 4.0, step=1, request_id="q1")])

    with pytest.raises(ReadingError, match="no finished training step") as raised:
        run(tmp_path / "none", runs[0])
    assert "too-few-steps" == raised.value.slug
    assert 0 == run(one, runs[0])
    with pytest.raises(ReadingError, match="no-such-step"):
        run(f"{runs[0]}@20:30", runs[0])


def test_a_real_run_is_compared(capsys):
    """Engine parts are compared by the step that asked; a rank's update is told from the phase."""
    _, metrics = metrics_of(capsys, f"{REHEARSED}@1:1", f"{REHEARSED}@2:2")

    assert {"queue.mean", "decode.mean", "gen.mean", "tail_p95.mean"} <= set(metrics)
    assert {"update_actor.mean", "workers:update_actor.mean"} <= set(metrics)


def add(folder, step, event, *, count=1, **extra):
    """Add tool calls or other events to a step of a made run."""
    extra = {"request_id": f"q{step}", **extra}
    ends = (step * 40 + 1 + number / 1000 for number in range(count))
    write_lines(folder, worker_0=[ended(event, end, 0.1, step=step, **extra) for end in ends])


def test_steps_without_calls_count_as_zero(tmp_path, capsys):
    """40 calls in ten steps against 4, all of them in one step."""
    a, b = (make_run(tmp_path / name, 10) for name in "ab")
    for step in range(1, 11):
        add(a, step, "tool_call", count=4, tool="sandbox", turn=1)
    add(b, 5, "tool_call", count=4, tool="sandbox", turn=1)
    _, metrics = metrics_of(capsys, f"{a}@1:10", f"{b}@1:10")

    # Each step of a made run has a call of its own.
    assert (5.0, 1.4) == (metrics["tool_call.count"]["a"], metrics["tool_call.count"]["b"])
    assert metrics["tool_call.count"]["high"] < 0
    assert 0 == run(f"{a}@1:10", f"{b}@1:10", "--fail-if", "tool_call.count > 1.5")
    assert 1 == run(f"{a}@1:10", f"{b}@1:10", "--fail-if", "tool_call.count < -50%")


def test_a_log_names_a_step_that_stalled_and_what_a_phase_of_few_steps_costs(tmp_path, capsys):
    """Not the number of steps, and not one validation per step: two of 40 s in twelve steps, without the first."""
    for name, extra in (
        ("before", {}),
        ("after", {7: ("gen", 900)} | dict.fromkeys((4, 8), ("testing", 40))),
    ):
        lines: list[str] = []
        for step in range(1, 14):
            phase, more = extra.get(step, ("gen", 0))
            gen = 10 + step % 3 / 10 + more * (phase == "gen")
            tested = more * (phase == "testing")
            timers = f" - timing_s/testing:{tested}" if extra else ""
            lines.append(f"step:{step} - timing_s/gen:{gen}{timers} - timing_s/step:{gen + tested}")
        (tmp_path / f"{name}.log").write_text("\n".join(lines) + "\n")

    document, _ = metrics_of(capsys, tmp_path / "before.log", tmp_path / "after.log")
    run(tmp_path / "before.log", tmp_path / "after.log")
    text = capsys.readouterr().out

    assert [7] == [each["step"] for each in document["runs"][1]["stalled"] if each["step_s"] > 900]
    assert "not testable: step 4 of B takes" in text
    assert "step 7 of B takes 90 times the median" in text
    assert "too few steps" not in text.splitlines()[0]
    assert "Only in B: testing (0.167 per step, 6.67 s)" in text


def test_a_length_that_one_step_does_not_have_is_not_listed(capsys):
    """The last step of a run has no next one."""
    document, _ = metrics_of(capsys, f"{SMALL}@2", f"{SMALL}@1:2")

    assert ["tool_call:sandbox"] == [each["name"] for each in document["only_in_one"]]


def test_what_only_one_run_has_is_listed(tmp_path, capsys, runs):
    """With how often; and a condition may ask for its count."""
    other = make_run(tmp_path / "other", 12)
    for step in range(1, 13):
        add(other, step, "retry", count=3)
    document, _ = metrics_of(capsys, runs[0], other)

    (only,) = document["only_in_one"]
    assert ("B", "retry", 3.0) == (only["run"], only["name"], only["count"])
    assert 0 == document["only_in_one_left_out"]
    run(runs[0], other)
    assert "Only in B: retry (3 per step" in capsys.readouterr().out
    assert 1 == run(runs[0], other, "--fail-if", "retry.count > 2")
    assert 0 == run(other, runs[0], "--fail-if", "retry.count > 2")


def test_changes_of_work_and_configuration_come_first(tmp_path, capsys):
    """Eight times the requests; and what the two run.json differ in."""
    a, b = (make_run(tmp_path / name, 6) for name in "ab")
    for step in range(1, 7):
        for number in range(1, 8):
            add(b, step, "request", request_id=f"q{step}-{number}", generated_tokens=100, turns=1)
    for folder, samples in ((a, 1), (b, 8)):
        content = {
            "format": 1,
            "experiment": folder.name,
            "command": ["main_ppo", f"actor_rollout_ref.rollout.n={samples}", "--x"],
            "training": {"rollout_n": samples, "experiment_name": folder.name},
            "settings": {"output_dir": str(folder), "events": {"engine_timing": True}},
            "versions": {"verl": "0.9.1"},
        }
        (folder / "run.json").write_text(json.dumps(content))
    document, _ = metrics_of(capsys, a, b)
    run(a, b)
    printed = capsys.readouterr().out
    first = printed.partition("\n\n")[0]

    assert "requests.mean" in document["workload"]
    assert "requests 1 to 8 (+700 %)" in first
    assert "step times are not comparable" in first
    assert ["training.rollout_n", "actor_rollout_ref.rollout.n"] == [
        each["name"] for each in document["configuration"]
    ]
    assert "The configuration differs in 2 settings, listed below." in first
    assert "\n  training.rollout_n 1 to 8\n" in printed


def test_the_warm_up_and_the_power_are_in_the_output(capsys, runs):
    """Which step is left out, how many independent steps there are, what could have been seen."""
    document, metrics = metrics_of(capsys, runs[0], runs[1])
    run(runs[0], runs[1])
    printed = capsys.readouterr().out

    assert "is in no interval; diff A1,A2 B1,B2 includes it." in printed
    assert [[1], [1]] == [each["warm_up"] for each in document["runs"]]
    assert "step 1 left out as warm-up" in printed
    assert "independent ones" in printed
    assert "would be detected with 80 % power" in printed
    assert metrics["step.mean"]["detectable"] > 0


@pytest.mark.parametrize(("significant", "others", "shown"), [(60, 60, 10), (2, 60, 2), (0, 4, 0)])
def test_a_diff_of_many_metrics_fits_a_terminal(significant, others, shown):
    """Those with a significant change come first; the rest is counted."""
    row = {
        "unit": "s", "headline": False, "a": 1.0, "b": 2.0, "difference": 1.0, "share": 1.0,
        "low": 0.5, "high": 1.5, "p": 0.001, "adjusted_p": 0.001, "detectable": None,
        "effective_steps": [9, 9], "drift": False, "estimated": False, "testable": True,
    }  # fmt: skip
    rows = [
        {**row, "metric": f"tool_call:tool_{number}.mean", "significant": number < significant}
        for number in range(significant + others)
    ]
    rows.append({**row, "metric": "step.mean", "headline": True, "significant": True})
    run = {
        "launches": 1,
        "steps": [1, 2],
        "warm_up": [],
        "asynchronous": False,
        "bound": "",
        "stalled": [],
    }
    document = {
        "runs": [{**run, "name": "a"}, {**run, "name": "b"}],
        "workload": [], "configuration": [], "only_in_one": [], "left_out": 0,
        "one_run": False, "drift": {}, "equal_tokens": {}, "between_steps_s": None,
        "metrics": rows, "conditions": [],
    }  # fmt: skip
    text = diff_text(document)

    assert shown == text.count("\n  tool_call:tool_")
    hidden = significant + others - shown
    assert (hidden > 0) == ("--all shows them." in text)
    assert len(text.splitlines()) < 40
    complete = diff_text(document, everything=True)
    assert significant + others == complete.count("\n  tool_call:tool_")


def test_the_same_run_twice_kept_nothing(capsys):
    """Two steps are too few for an interval, so nothing is claimed."""
    assert 1 == run("--verify", "polling", SMALL, SMALL)

    text = capsys.readouterr().out
    assert text.startswith("polling (poll interval of the replay buffer): undecided; ")
    assert "measured   0 s per step" in text
    assert "remaining  up to 1.55 s per step" in text

    run("--verify", "polling", SMALL, SMALL, "--json")
    content = json.loads(capsys.readouterr().out)
    assert content["miss_s"] == pytest.approx(-content["predicted_s"])


def test_the_steps_of_each_side_are_verified(capsys):
    """The prediction is of the steps that were named, and so is the measurement."""
    run("--verify", "polling", f"{SMALL}@1", f"{SMALL}@2", "--json")

    content = json.loads(capsys.readouterr().out)
    assert (1, 1) == (content["steps_before"], content["steps_after"])
    assert content["measured_s"] == pytest.approx(content["before_s"] - content["after_s"])
    assert content["measured_s"] != 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("poling", SMALL, SMALL), r"did you mean polling\?\n\S+small_run has polling"),
        (("slow_ranks", REHEARSED, SMALL), "does not have the finding slow_ranks"),
        (("polling", SMALL, "nowhere"), "nowhere does not exist"),
        (("polling", SMALL, SMALL, "--fail-if", "step > 1s"), "cannot be used with --fail-if"),
        (("polling", f"{SMALL}@9", SMALL), "no-such-step"),
    ],
)
def test_what_cannot_be_verified_is_refused(words, message):
    """With what there is."""
    with pytest.raises(ReadingError, match=message):
        run("--verify", *words)
