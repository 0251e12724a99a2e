"""The entry point never raises, and what it writes holds no credential."""

import json
import sys
from pathlib import Path

import msgspec
import pytest

from verl_profiler import plugin, span
from verl_profiler.environ import SETTINGS
from verl_profiler.instrumentation import placing, ray_init
from verl_profiler.recording import recorder
from verl_profiler.recording.identity import Identity


class Closed:
    """A stderr that the host has closed."""

    def write(self, _text):
        raise ValueError("I/O operation on closed file")

    flush = write


@pytest.mark.parametrize("closed", [False, True])
def test_settings_that_cannot_be_read_record_nothing(closed, monkeypatch, capsys):
    """Ray ends a worker whose hook fails, and verl hides what a plugin raises."""
    if closed:
        monkeypatch.setattr(sys, "stderr", Closed())
    for text in ("{", "null", '{"directory": 5}', "\ud800", "[" * 100_000, "1e999", "\0"):
        monkeypatch.setattr(plugin.os, "environ", {SETTINGS: text})

        assert plugin.activate() is False
        assert recorder.active() is None
        assert closed or "(plugin-failed)" in capsys.readouterr().err


def test_a_failure_after_recording_began_is_told(worker_config, monkeypatch, capsys):
    """The probes are lost, the process is not."""
    monkeypatch.setenv(SETTINGS, worker_config.encode())
    monkeypatch.setattr(placing, "install", lambda *_, **_named: 1 / 0)

    assert plugin.activate() is False
    assert "ZeroDivisionError" in capsys.readouterr().err
    recorder.stop()


@pytest.mark.parametrize(
    "config", ["[]", "null", "5", '{"runtime_env": "x"}', '{"runtime_env": ["a"]}', "[" * 100_000]
)
def test_a_job_config_of_another_form_is_no_failure(config, monkeypatch):
    """It is Ray's own, and may change."""
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", config)
    kwargs = {}
    ray_init.set_up_workers(kwargs)

    assert callable(kwargs["runtime_env"]["worker_process_setup_hook"])


def test_the_hook_survives_a_closed_stderr_and_a_missing_package(monkeypatch):
    """Ray would end each worker of that node as soon as it starts."""
    monkeypatch.setitem(sys.modules, "verl_profiler.plugin", None)
    monkeypatch.setattr(sys, "stderr", Closed())

    ray_init.make_hook(None)()


def test_a_reason_in_the_header_holds_no_credential(capfd):
    """Nor does the console: the text of an exception of the host's is left out."""

    class Failing:
        name, lost = "turn", None

        @property
        def targets(self):
            raise ValueError("https://u:sECRet@host?token=sECRet")

    placing._try_to_place(Failing(), json, "json")
    assert "sECRet" not in capfd.readouterr().err
    header = msgspec.json.encode(plugin._describe(), enc_hook=str).decode()

    assert "sECRet" not in header
    assert "ValueError" in json.loads(header)["probes"]["missed"]["turn"]


def test_the_message_of_an_exception_is_not_recorded(worker_config):
    """It may hold a prompt or a credential; its type is enough."""
    recorder.start(worker_config, lambda: Identity("agent_loop", 0), plugin._describe)
    with pytest.raises(ValueError, match="sECRet"), span("mine"):
        raise ValueError("sECRet")
    recorder.stop()

    files = [path for path in Path(worker_config.directory).rglob("*") if path.is_file()]
    assert [] == [path.name for path in files if b"sECRet" in path.read_bytes()]
    assert any(b'"error":"ValueError"' in path.read_bytes() for path in files)
