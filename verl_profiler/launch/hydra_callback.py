"""The Hydra callback of `+profiler=multiturn`, set in `configs/profiler/multiturn.yaml`.

Hydra turns an exception of a callback into a warning and continues (hydra-core 1.3), so a setting that
cannot be used ends the process with `SystemExit`, its message and status 2.
"""

from __future__ import annotations

import sys
import traceback
from typing import Any, NoReturn

from hydra.core.utils import JobStatus
from hydra.experimental.callback import Callback

from verl_profiler.errors import ConfigError
from verl_profiler.launch import prepare


class ProfilerCallback(Callback):
    """Prepares the run before `main()` sees the config."""

    def on_run_start(self, config: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Prepare `config` in place; end the command if a setting cannot be used."""
        try:
            prepare.prepare(config)
        except ConfigError as error:
            _end(str(error))
        except Exception as error:  # noqa: BLE001  Hydra would continue without profiling
            traceback.print_exc()
            _end(f"the profiler could not be set up: {error!r} (set-up-failed)")

    def on_multirun_start(self, config: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Reject a sweep: Hydra does not let a callback change the configs of its jobs."""
        _end(
            "+profiler=… does not work with Hydra's multirun (-m): its callbacks cannot prepare "
            "the jobs of a sweep.\nStart the runs one by one. (hydra-multirun)"
        )

    def on_job_end(self, config: Any, job_return: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Gather captures and print where the files are."""
        prepare.end(failed=job_return.status is not JobStatus.COMPLETED)


def _end(message: str) -> NoReturn:
    print(f"verl-profiler: {message}", file=sys.stderr, flush=True)
    raise SystemExit(2)
