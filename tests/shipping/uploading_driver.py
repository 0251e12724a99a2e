"""A driver that records and uploads, and does what its standard input has: run by test_killed_upload.py.

    python uploading_driver.py URL SPOOL EVENTS

EVENTS is `profiler.events` as JSON.  Each line of input is `write STEP COUNT`, `uploader` or `end`, and
is answered by a line.
"""

import json
import sys
import time

from omegaconf import OmegaConf

import verl_profiler
from verl_profiler import log_manager
from verl_profiler.launch import prepare, remote_output
from verl_profiler.recording import recorder


def answer(**content):
    print(json.dumps(content), flush=True)


def write(step, count):
    """Record events, and wait until they are in the files and the header."""
    for number in range(count):
        log_manager.log(
            None, event="looked", duration=0.001, extra={"number": number, "x": "y" * 99}, step=step
        )
    while recorder.active().waiting():
        time.sleep(0.01)
    time.sleep(0.2)
    answer(events=recorder.active().account()["events"])


def main(url, spool, events):
    profiler = {"output_dir": url, "spool_dir": spool, "events": json.loads(events)}
    verl_profiler.prepare(OmegaConf.create({"profiler": profiler, "ray_kwargs": {"ray_init": {}}}))
    answer(run=str(recorder.active().directory))
    for line in sys.stdin:
        command, *numbers = line.split()
        if command == "write":
            write(*map(int, numbers))
        elif command == "uploader":
            answer(pid=remote_output._uploader._process.pid)
        else:
            prepare.end(failed=False)
            answer(ended=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
