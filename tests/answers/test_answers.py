"""The answers to the recorded runs are the kept ones; see answers.py."""

import pytest
from answers import answers


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_answers_are_the_kept_ones():
    """Each value of each command; a change that is truer is kept with `answers.py --write`."""
    lines = list(answers.differing())

    assert [] == lines[:40], f"{len(lines)} values differ"
