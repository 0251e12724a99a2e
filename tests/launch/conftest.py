import pytest

from verl_profiler.instrumentation import placing


@pytest.fixture(autouse=True)
def no_probes():
    """Another test of the same process may have imported verl, whose probes are then installed at once."""
    yield
    placing.uninstall()
