"""A Ray cluster of two raylets that ran before the driver, and drivers of three kinds on it.

    python injection_cluster.py FOLDER KIND

The kind is `attached`, with what the doctor finds and a job; or `hook`, a job with a hook of its own.
Prints one line of JSON: what the actors of each driver found.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from ray.cluster_utils import Cluster
from ray.job_submission import JobStatus, JobSubmissionClient

DRIVER = str(Path(__file__).parent / "injection_driver.py")


def found_in(text):
    """Return what a driver printed."""
    lines = [line for line in text.splitlines() if line.startswith("FOUND ")]
    return json.loads(lines[0].removeprefix("FOUND ")) if lines else text[-3000:]


def attach(folder, address):
    """Run a driver beside the cluster."""
    done = subprocess.run(
        [sys.executable, DRIVER, f"{folder}/attached", address],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return found_in(done.stdout + done.stderr)


def submit(folder, dashboard, runtime_env):
    """Run a driver under `ray job submit`."""
    client = JobSubmissionClient(f"http://{dashboard}")
    name = "job_with_hook" if "worker_process_setup_hook" in runtime_env else "job"
    entrypoint = f"{sys.executable} {DRIVER} {folder}/{name} auto"
    for attempt in range(120):
        try:
            job = client.submit_job(entrypoint=entrypoint, runtime_env=runtime_env)
            break
        except RuntimeError as error:
            # The dashboard answers before its agents do.
            if attempt == 119 or "No available agent" not in str(error):
                raise
            time.sleep(1)
    for _ in range(1500):
        status = client.get_job_status(job)
        if status.is_terminal():
            break
        time.sleep(0.2)
    logs = client.get_job_logs(job)
    # The status arrives before the last lines of the log do where the machine is busy.
    for _ in range(150):
        if status is not JobStatus.SUCCEEDED or "FOUND " in logs:
            break
        time.sleep(0.2)
        logs = client.get_job_logs(job)
    message = client.get_job_info(job).message
    return found_in(logs) if "FOUND " in logs else f"{status}: {message}: {logs[-3000:]}"


def main():
    """Start the cluster, run the drivers, stop the cluster."""
    folder = sys.argv[1]
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 4,
            "include_dashboard": True,
            "dashboard_port": int(os.environ.get("INJECTION_DASHBOARD_PORT", "28265")),
        },
    )
    try:
        cluster.add_node(num_cpus=4)
        cluster.wait_for_nodes()
        dashboard = cluster.head_node.webui_url
        runtime_env = {"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}}
        if sys.argv[2] == "hook":
            runtime_env["worker_process_setup_hook"] = "injection_hook.hook"
            results = {"job_with_hook": submit(folder, dashboard, runtime_env)}
        else:
            results = {
                "attached": attach(folder, cluster.address),
                "job": submit(folder, dashboard, runtime_env),
            }
        print("RESULTS " + json.dumps(results), flush=True)
    finally:
        cluster.shutdown()


main()
