"""A run that was never stuck has announced no hang and gathered no evidence."""

ALARM = "(phase-stuck)"


def assert_no_alarm(run):
    """Check a run directory: its console log, where there is one, and its folder of evidence."""
    log = run / "console.log"
    text = log.read_text(errors="replace") if log.exists() else ""
    alarms = [line for line in text.splitlines() if ALARM in line]
    assert [] == alarms
    assert not (run / "evidence").exists()
