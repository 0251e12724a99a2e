"""Browser tests where there is no Chromium: skipped on a developer's machine, failed in CI."""

import pytest
from views.chromium import Chromium


@pytest.mark.parametrize(("ci", "ending"), [("true", pytest.fail), ("", pytest.skip)])
def test_without_a_chromium_only_ci_fails(tmp_path, monkeypatch, ci, ending):
    """With a message that names what to install."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CI", ci)

    with pytest.raises(ending.Exception, match="no Chromium is installed") as raised:
        Chromium()

    assert ("chromium, as .ci/run does" in str(raised.value)) == bool(ci)
