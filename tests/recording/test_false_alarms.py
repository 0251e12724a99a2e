"""What takes long by nature is not announced: recorded and simulated runs on a simulated clock.

The watcher looks every 15 s, as in a run with the default of `profiler.stuck.after`.
"""

import json
import random
import shutil
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from no_alarm import assert_no_alarm
from recording.children import until

from verl_profiler.recording import open_calls, open_state, recorder
from verl_profiler.recording.call import Call

DATA = Path(__file__).parents[1] / "data"
RUNS = sorted(each.name.removesuffix("_run.tar.gz") for each in DATA.glob("*_run.tar.gz"))
# Names of verl's timers in the runs that were recorded.
TIMERS = {
    *("step", "gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic"),
    *("update_actor", "update_weights", "param_sync", "sync_rollout_weights", "testing"),
    *("save_checkpoint", "start_profile", "stop_profile", "generate_async"),
}
LOOK_S = 15.0


@pytest.fixture
def trainer(recording, monkeypatch, capfd):
    """Give a function that plays phases to a watcher, and returns what it announced."""
    active = recorder.active()
    until(lambda: active.name is not None)
    clock = SimpleNamespace(s=0.0)
    monkeypatch.setattr(open_state, "now", lambda: round(clock.s * 1e9))
    open_calls.forget()
    watcher = open_state._Watcher(active, 60.0)
    # Its files are another test's.
    monkeypatch.setattr(watcher, "write", lambda content: None)

    def play(phases):
        moments = []
        for place, (event, begin_s, end_s, step) in enumerate(phases):
            # Of a phase and the one inside it that begin at once, the outer one begins first.
            moments.append((begin_s, 1, -end_s, place, event, step))
            moments.append((end_s, 0, -begin_s, place, event, step))
        moments.sort()
        calls = {}
        look_s = moments[0][0]
        for at_s, begins, _, place, event, step in moments:
            while look_s < at_s:
                clock.s = look_s
                watcher.look()
                look_s += LOOK_S
            if begins:
                calls[place] = Call(event, round(at_s * 1e9), step=step)
                open_calls.begin_phase(calls[place])
            else:
                calls[place].end_ns = round(at_s * 1e9)
                open_calls.end_phase(calls[place])
        lines = capfd.readouterr().err.splitlines()
        return [line for line in lines if "(phase-stuck)" in line]

    yield play
    open_calls.forget()


def phases_of(folder, scale):
    """Return verl's phases of a recorded run, its time stretched."""
    phases = []
    for path in folder.rglob("trainer_0.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            if line["event"] in TIMERS and line.get("duration_sec") is not None:
                end_s = datetime.fromisoformat(line["timestamp"]).timestamp() * scale
                begin_s = end_s - line["duration_sec"] * scale
                phases.append((line["event"], begin_s, end_s, line["step"]))
    first_s = min(begin_s for _, begin_s, _, _ in phases)
    return [(event, b - first_s, e - first_s, step) for event, b, e, step in phases]


@pytest.mark.parametrize("name", RUNS)
def test_recorded_runs_raise_no_alarm(trainer, tmp_path, name):
    """Real phases of each trainer, 20 times as long as they were: steps of one to ten minutes."""
    shutil.unpack_archive(DATA / f"{name}_run.tar.gz", tmp_path)
    phases = phases_of(tmp_path, 20)

    assert {"step", "gen", "update_actor"} <= {event for event, *_ in phases}
    assert [] == trainer(phases)
    assert_no_alarm(next(tmp_path.iterdir()))


def training(seed, *, steps=120, slow=None):
    """Make phases of a training that is slow at times, as such trainings are; seconds.

    The first two steps compile. Every tenth step validates for eight minutes, every twentieth writes a
    checkpoint for nine. Lengths of `gen` have a long tail: up to 5 times the median.
    """
    chance = random.Random(seed)
    at_s, phases = 0.0, []
    for step in range(1, steps + 1):
        begin_s = at_s
        gen_s = 60 * min(chance.lognormvariate(0, 0.5), 5.0)
        lengths = [("gen", 540 if step <= 2 else gen_s), ("old_log_prob", 8), ("ref", 8)]
        lengths += [("adv", 0.1), ("update_actor", 400 if step <= 2 else 30)]
        if step % 10 == 0:
            lengths.append(("testing", 480 * chance.uniform(0.8, 1.2)))
        if step % 20 == 0:
            lengths.append(("save_checkpoint", 540))
        lengths.append(("update_weights", 5))
        for event, usual_s in lengths:
            length_s = 7 * 60.0 if slow == (step, event) else usual_s
            phases.append((event, at_s, at_s + length_s, step))
            at_s += length_s
        phases.append(("step", begin_s, at_s, step))
    return phases


def test_compilation_validation_and_checkpoints_raise_no_alarm(trainer):
    """Nor do generations with a long tail."""
    assert [] == trainer(training(0))


def test_a_phase_of_seven_times_its_usual_length_does(trainer):
    """So the tests above can fail."""
    (line,) = trainer(training(0, slow=(50, "update_actor")))

    assert "update_actor of step 50 has taken" in line
