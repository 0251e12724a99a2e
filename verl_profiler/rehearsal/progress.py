"""Reduce the console output of verl to a few progress lines."""

from __future__ import annotations

import re
from pathlib import Path

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_RAY_PREFIX = re.compile(r"^\([^()]*pid=\d+[^()]*\) ")
_UPLOADED = "[verl-profiler] the run was uploaded to "
# Lines of a console that failed.
_TAIL = 40
_NUMBER = r"(?:np\.\w+\()?(-?[\d.]+(?:e-?\d+)?)"
_STEP = re.compile(r"^step:(\d+) - ")
# Fully asynchronous training logs these besides the trainer's own.
_OF_ROLLOUTER = re.compile(r"^step:(\d+ - fully_async/rollouter/|[1-9]\d* - rollouter/)")
_TOTAL = re.compile(r"Total training steps: (\d+)")
_PHASES = (
    *("gen", "old_log_prob", "ref", "values", "update_critic", "update_actor"),
    "update_weights",
)

# Console messages of verl 0.9, Ray and SGLang, and their meaning; each is reported once.
_MILESTONES: tuple[tuple[str, str], ...] = (
    (r"All configuration checks passed", "settings checked; starting Ray"),
    (r"Started a local Ray instance", "Ray runs; starting the task runner"),
    (r"Total training steps:", "prompts loaded; starting the trainer's ranks"),
    (r"actor and ref model engine initialized", "trainer ranks ready; starting the engine"),
    (r"all initialize finished, ready to fit", "engine ready; starting agent-loop workers"),
)


class Progress:
    """Reads console lines one by one, and tracks the stage of the run.

    Attributes:
        stage: What the trainer is doing.
    """

    def __init__(self) -> None:
        self.stage = "starting verl"
        self._total = 0
        self._told: set[str] = set()

    def read(self, line: str) -> str | None:
        """Return the message for a line, or None."""
        text = plain(line)
        if text.startswith("[rehearsal] "):
            return self._now(text.removeprefix("[rehearsal] "))
        if text.startswith("[verl-profiler] WARNING"):
            return text
        if text.startswith(_UPLOADED):
            return text.removeprefix("[verl-profiler] ")
        total = _TOTAL.search(text)
        if total:
            self._total = int(total[1])
        step = _STEP.match(text)
        if step and not _OF_ROLLOUTER.match(text):
            return self._step(int(step[1]), text)
        for pattern, message in _MILESTONES:
            if message not in self._told and re.search(pattern, text):
                self._told.add(message)
                return self._now(message)
        return None

    def _now(self, message: str) -> str:
        self.stage = message
        return message

    def _step(self, number: int, text: str) -> str:
        if number == 0:
            self.stage = "first training step"
            return f"validation before training{_turns(text, 'val-aux/num_turns/mean')}"
        # verl 0.8's main_ppo_sync does not print how many there will be.
        of = f" of {self._total}" if self._total else ""
        self.stage = "ending" if number == self._total else f"step {number + 1}{of}"
        seconds = _metric(text, "timing_s/step")
        parts = [
            f"{phase} {value:.1f}"
            for phase in _PHASES
            if (value := _metric(text, f"timing_s/{phase}")) is not None
        ]
        message = f"step {number}{of}"
        if seconds is not None:
            message += f": {seconds:.1f} s ({', '.join(parts)})"
        # Names in the V1 trainer, and in V0.
        message += _turns(text, "training/num_turns/mean", " - num_turns/mean")
        validation = _metric(text, "timing_s/testing")
        if validation is not None:
            message += f"; then validation, {validation:.1f} s"
        return message


def plain(line: str) -> str:
    """Return a line without colors, carriage returns and Ray's prefix."""
    text = _ANSI.sub("", line).rstrip()
    text = text.rsplit("\r", 1)[-1]
    return _RAY_PREFIX.sub("", text)


def _turns(text: str, *metrics: str) -> str:
    # verl counts the messages of user, assistant and tools: two per turn.
    for metric in metrics:
        messages = _metric(text, metric)
        if messages is not None:
            return f", {messages / 2:.1f} turns per request"
    return ""


def _metric(text: str, name: str) -> float | None:
    found = re.search(rf"{re.escape(name)}:{_NUMBER}", text)
    return float(found[1]) if found else None


def last_lines(console: Path) -> list[str]:
    """Return the end of the console output, from the last traceback on if there is one."""
    lines = map(plain, console.read_text(encoding="utf-8", errors="replace").splitlines())
    texts = [text for text in lines if text and "[repeated " not in text][-400:]
    begins = [at for at, text in enumerate(texts) if text.startswith("Traceback (most recent")]
    return texts[begins[-1] if begins else 0 :][-_TAIL:]
