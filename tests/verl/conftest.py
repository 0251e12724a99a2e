"""These tests use the real verl, on a CPU, with the rehearsal's import stubs for CUDA wheels."""

import importlib.util
import os
from pathlib import Path

import pytest

IMPORT_PATH = Path(__file__).parents[2] / "verl_profiler" / "rehearsal" / "import_path"


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.verl)
            item.add_marker(pytest.mark.timeout(420))
            if importlib.util.find_spec("verl") is None:
                item.add_marker(pytest.mark.skip(reason="verl is not installed"))


@pytest.fixture(scope="session")
def verl_environment():
    """Return the environment of a child that imports verl here."""
    folders = [str(IMPORT_PATH), str(Path(__file__).parent)]
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith("VERL_")},
        "PYTHONPATH": ":".join(folders),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "RAY_DEDUP_LOGS": "0",
    }
