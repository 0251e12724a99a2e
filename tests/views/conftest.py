"""The events written by hand that the tests of the analyses use, and a report in a browser."""

import shutil

import pytest
from analysis.conftest import conversation, span, tables
from views.chromium import Chromium
from views.opened_report import SMALL

from verl_profiler.cli.report import write_report

__all__ = ["conversation", "span", "tables"]


@pytest.fixture(scope="session")
def browser():
    started = Chromium()
    yield started
    started.close()


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """The report of the small run, in a copy of its directory."""
    folder = tmp_path_factory.mktemp("report") / "small_run"
    shutil.copytree(SMALL, folder)
    return write_report(folder)
