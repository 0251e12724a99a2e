"""Drivers under `ray job submit` on a cluster of two raylets; prints what their actors found, by job.

python jobs.py FOLDER            submits the same with a third word, without and with a hook of the job
python jobs.py FOLDER NAME run   is such a driver
"""

import json
import os
import sys
import time
from pathlib import Path

import ray
from omegaconf import OmegaConf
from ray_nodes import at, until

import verl_profiler
from verl_profiler.launch import prepare


@ray.remote(num_cpus=0)
class AgentLoopWorker:
    """Named as verl's, so that the plugin detects its role; it never imports verl."""

    def arrived(self):
        """Return what of the driver's settings is here, and of the job's own hook."""
        from verl_profiler.recording import recorder

        return {
            "settings": "VERL_PROFILER_SETTINGS" in os.environ,
            "recording": recorder.active() is not None,
            "users_hook": os.environ.get("USERS_HOOK_RAN"),
        }


def drive(folder, name):
    """Be a driver like verl's."""
    config = OmegaConf.create(
        {
            "profiler": {"output_dir": f"{folder}/{name}"},
            "ray_kwargs": {"ray_init": {"address": "auto", "log_to_driver": False}},
        }
    )
    verl_profiler.prepare(config)
    ray.init(**OmegaConf.to_container(config.ray_kwargs.ray_init))
    # Both have the name of this host.
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    actors = [
        AgentLoopWorker.options(name=f"agent_loop_worker_{number}_ab", **at(node)).remote()
        for number, node in enumerate(nodes)
    ]
    print("FOUND " + json.dumps(ray.get([actor.arrived.remote() for actor in actors])), flush=True)
    # As verl's command ends: Ray may exit a process of which a thread calls it while it shuts down.
    prepare.end(failed=False)
    ray.shutdown()


def submit(folder, name, dashboard, **runtime_env):
    """Run a driver as a job; return what it printed."""
    from ray.job_submission import JobStatus, JobSubmissionClient

    client = JobSubmissionClient(f"http://{dashboard}")
    runtime_env["env_vars"] = {"PYTHONPATH": os.environ["PYTHONPATH"]}
    words = f"{sys.executable} {__file__} {folder} {name} run"
    for attempt in range(120):
        try:
            job = client.submit_job(entrypoint=words, runtime_env=runtime_env)
            break
        except RuntimeError as error:
            # The dashboard answers before its agents do.
            if attempt == 119 or "No available agent" not in str(error):
                raise
            time.sleep(1)
    until(lambda: client.get_job_status(job).is_terminal(), 300)
    if client.get_job_status(job) is not JobStatus.SUCCEEDED:
        raise RuntimeError(client.get_job_info(job).message + client.get_job_logs(job)[-3000:])
    # The status arrives before the last lines of the log do where the machine is busy.
    logs = until(lambda: "FOUND " in (text := client.get_job_logs(job)) and text, 30)
    return json.loads(next(line for line in logs.splitlines() if "FOUND " in line)[6:])


def main(folder):
    """Start the cluster, run the jobs, stop the cluster."""
    from ray.cluster_utils import Cluster

    port = int(os.environ.get("JOBS_DASHBOARD_PORT", "28265"))
    head = {"num_cpus": 4, "include_dashboard": True, "dashboard_port": port}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=4)
    cluster.wait_for_nodes()
    dashboard = cluster.head_node.webui_url
    found = {
        "plain": submit(folder, "plain", dashboard),
        "hook": submit(folder, "hook", dashboard, worker_process_setup_hook="users_hook.hook"),
    }
    cluster.shutdown()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        drive(*sys.argv[1:3])
    else:
        main(Path(sys.argv[1]))
