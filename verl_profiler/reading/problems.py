"""What cannot be read, in sentences: the first few of each kind, and how many more there are."""

from __future__ import annotations

from collections import Counter

_LISTED = 5


class Problems:
    """Collects sentences, of which there may be any number."""

    def __init__(self) -> None:
        self._listed: list[str] = []
        self._counts: Counter[str] = Counter()

    def add(self, kind: str, sentence: str) -> None:
        """Note one.

        Args:
            kind: Completes the sentence that counts those that are not listed: `5 more …`.
            sentence: Lists it.
        """
        self._counts[kind] += 1
        if self._counts[kind] <= _LISTED:
            self._listed.append(sentence)

    def sentences(self) -> list[str]:
        """Return them."""
        more = {kind: count - _LISTED for kind, count in self._counts.items()}
        return self._listed + [f"{count} more {kind}" for kind, count in more.items() if count > 0]
