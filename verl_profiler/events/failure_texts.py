"""Known reasons of failures in the texts of Ray, torch, the engines and the operating system, from `failure_texts.md`.

Messages of exceptions may hold prompts, so nothing is taken from them but what these write themselves, in
forms that are known.
"""

from __future__ import annotations

import re
from pathlib import Path

from verl_profiler.events.vocabulary import contract

_LIMIT = 300
# Forms, the more specific ones first, and what they mean where they do not state it themselves.
_REASONS = [
    (re.compile(pattern[1:-1]), meaning)
    for rows in contract(Path(__file__).with_suffix(".md")).values()
    for pattern, meaning in rows
]


def reason_in(message: str) -> str | None:
    """Return the known reason that a message has; None if it has none."""
    text, meaning = text_and_meaning(message)
    return f"{text} ({meaning})" if meaning else text or None


def text_and_meaning(message: str) -> tuple[str, str]:
    """Return the text of a message by which its reason is known, and what that means; empty if there is none."""
    for pattern, meaning in _REASONS:
        match = pattern.search(message)
        if match is not None:
            # Lone surrogates cannot be encoded.
            return match[0][:_LIMIT].encode("utf-8", "backslashreplace").decode(), meaning
    return "", ""
