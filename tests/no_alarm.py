"""A run that was never stuck has announced no hang and gathered no evidence."""

import subprocess

ALARM = "(phase-stuck)"


def assert_no_alarm(run):
    """Check a run directory: its console log, where there is one, and its folder of evidence."""
    log = run / "console.log"
    text = log.read_text(errors="replace") if log.exists() else ""
    alarms = [line for line in text.splitlines() if ALARM in line]
    assert [] == alarms
    assert not (run / "evidence").exists()


def ended(command, environment, run):
    """Run a rehearsal to its end, which nothing is wrong with; return what it printed."""
    done = subprocess.run(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=840,
    )
    assert 0 == done.returncode, done.stdout[-6000:]
    assert_no_alarm(run)
    return done.stdout
