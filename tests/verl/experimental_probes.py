"""Drive the real classes of verl's experimental trainers with all probes on; report their events as JSON.

    python experimental_probes.py

Without Ray: actors are called directly.  `test_experimental_probes.py` reads the report.
"""

import asyncio
import contextlib
import sys
from concurrent.futures import Future
from types import SimpleNamespace

import probes_report
import ray
import torch
from omegaconf import OmegaConf
from probes_report import nothing

from verl_profiler.instrumentation import wrapping
from verl_profiler.recording import context, open_calls

# Before verl is imported, as in its processes: modules take functions from each other by name.
DIRECTORY = probes_report.begin("trainer")

from verl import DataProto  # noqa: E402
from verl.experimental.fully_async_policy import (  # noqa: E402
    detach_utils,
    fully_async_rollouter,
    fully_async_trainer,
    message_queue,
)
from verl.experimental.fully_async_policy.dynamic_schedule import (  # noqa: E402
    dynamic_resource_controller,
)
from verl.experimental.separation.engine_workers import DetachActorWorker  # noqa: E402
from verl.workers.engine_workers import ActorRolloutRefWorker  # noqa: E402


def unmade(actor_class):
    """Return an object of an actor's class, without its constructor."""
    metadata = getattr(actor_class, "__ray_metadata__", None)
    cls = actor_class if metadata is None else metadata.modified_class
    return cls.__new__(cls)


class Remote:
    """A method of an actor that runs at once; its result is a coroutine with `future`, as Ray's."""

    def __init__(self, function):
        self.function = function

    def remote(self, *args, **kwargs):
        return _Answer(self.function(*args, **kwargs))


class _Answer:
    def __init__(self, coroutine):
        self.coroutine = coroutine

    def __await__(self):
        return self.coroutine.__await__()

    def future(self):
        done = Future()

        async def run():
            try:
                done.set_result(await self.coroutine)
            except Exception as error:
                done.set_exception(error)

        self.task = asyncio.ensure_future(run())
        return done


async def answered(prompts):
    return prompts


async def fully_async(report):
    """Two versions: samples are dispatched and queued, one is lost in the full queue."""
    queue = unmade(message_queue.MessageQueue)
    queue.__init__(None, 2)
    client = message_queue.MessageQueueClient(
        SimpleNamespace(
            **{
                name: Remote(getattr(queue, name))
                for name in ("put_sample", "get_statistics", "get_queue_size")
            }
        )
    )
    rollouter = unmade(fully_async_rollouter.FullyAsyncRollouter)
    config = OmegaConf.create(
        {
            "trainer": {"resume_mode": "disable"},
            "async_training": {"trigger_parameter_sync_step": 2},
        }
    )
    rollouter.__dict__.update(
        config=config,
        required_samples=2,
        global_steps=1,
        message_queue_client=client,
        active_tasks=set(),
        pending_queue=asyncio.Queue(),
        max_required_samples=3,
        max_concurrent_samples=2,
        max_queue_size=2,
        paused=False,
        staleness_samples=0,
        staleness_threshold=0.5,
        step_start_time=0.0,
        idle_start_time=0.0,
        _step_generated_samples=0,
        _completed_steps=1,
        _active_count_history=[],
        _STEP_HISTORY_SIZE=10,
        _step_samples_history=[],
        total_generated_samples=0,
        dropped_stale_samples=0,
        processed_sample_count=0,
        async_rollout_manager=SimpleNamespace(generate_sequences_single=answered),
    )
    # It wants more than this.
    with contextlib.suppress(AttributeError):
        await rollouter.init_workers()
    rollouter._init_async_objects()
    report["expects_progress"] = [open_calls.idle_ns is not None]

    def expects_progress():
        report["expects_progress"].append(open_calls.idle_ns is not None)

    report["before"] = [rollouter.load_checkpoint(), context.process.current_step()]
    await rollouter.reset_staleness()
    rollouter.global_steps = 17
    for number in (1, 2):
        await rollouter._process_single_sample_streaming(sample(number))
    # Also where verl does not count those that run, as 0.8.
    expects_progress()
    rollouter._record_active_count()
    rollouter._record_active_count()
    rollouter.staleness_samples = 3
    report["paused"] = [await rollouter._should_pause_generation() for _ in range(2)]
    expects_progress()
    rollouter._record_active_count()
    expects_progress()
    report["in_flight"] = []

    def in_flight():
        report["in_flight"].append([open_calls.idle_ns is not None, open_calls.in_flight])

    rollouter.active_tasks.add("a task")
    await rollouter._should_pause_generation()
    in_flight()
    rollouter.active_tasks.clear()
    rollouter._record_active_count()
    in_flight()
    rollouter.active_tasks.add("a task")
    rollouter._record_active_count()
    in_flight()
    rollouter.active_tasks.clear()
    await rollouter._should_pause_generation()
    await rollouter.reset_staleness()
    rollouter.max_queue_size = 9
    report["paused"].append(await rollouter._should_pause_generation())
    expects_progress()
    await rollouter._process_single_sample_streaming(sample(3))
    report["rollouter_step"] = context.process.current_step()


async def dynamic(report):
    """Lend a trainer's hybrid replicas to the rollout and take them back; then validate with them."""
    hybrid = {"hybrid_0": probes_report.Replica(0)}
    workers = SimpleNamespace(world_size=2, update_weights=lambda **_: [])
    trainer = unmade(fully_async_trainer.FullyAsyncTrainer)
    engine = {"_target_": "verl.workers.config.CheckpointEngineConfig", "backend": "nccl"}
    trainer.__dict__.update(
        global_steps=3,
        current_param_version=2,
        local_trigger_step=1,
        actor_rollout_wg=workers,
        rollouter=SimpleNamespace(
            get_all_hybrid_replicas=SimpleNamespace(remote=lambda: hybrid),
            **{
                name: Remote(nothing)
                for name in ("add_replicas", "remove_replicas", "do_validate", "rebalance_requests")
            },
        ),
        config=OmegaConf.create(
            {
                "actor_rollout_ref": {"rollout": {"checkpoint_engine": engine}},
                "trainer": {"test_freq": 2},
                "async_training": {
                    "use_dynamic_resource_scheduling": True,
                    "use_trainer_do_validate": False,
                },
            }
        ),
    )
    context.process.reset()
    context.process.hold_trainer(trainer, counts_steps=False)
    context.process.step = 3
    await trainer._setup_hybrid_checkpoint_manager()
    controller = dynamic_resource_controller.DynamicResourceController(
        trainer.rollouter, trainer.hybrid_checkpoint_manager, 1, 1
    )
    await controller.sync_hybrid_weights(2)
    await controller.activate_hybrid_replicas(2)
    await controller.deactivate_hybrid_replicas(2)
    trainer.checkpoint_manager = trainer.hybrid_checkpoint_manager
    trainer.logger = SimpleNamespace(log=lambda **_: None)

    async def replicas():
        return hybrid

    trainer.rollouter.get_all_hybrid_replicas = Remote(replicas)
    await trainer._trainer_side_validate()
    trainer.rollouter.do_validate = Remote(nothing)
    for trainer.current_param_version in (2, 3):
        await trainer._fit_validate()
    report["hybrid"] = [controller.activate_count, controller.deactivate_count]


def sample(number):
    return detach_utils.RolloutSample(
        full_batch=DataProto.from_dict({"x": torch.zeros(2, 1)}),
        sample_id=f"sample_0_{number}",
        epoch=0,
        rollout_status={},
    )


def syncs():
    """Return the steps of the work after each sync, of a rank that is synced before its work, and after."""
    worker = DetachActorWorker.__new__(DetachActorWorker)
    found = {}
    for name, versions in (
        ("before", (0, 1, "work", 2, "work")),
        ("after", (0, "work", 1, "work")),
    ):
        context.process.reset()
        found[name] = []
        for version in versions:
            if version == "work":
                context.process.begin_work()
                found[name].append(context.process.current_step())
                continue
            with contextlib.suppress(AttributeError):
                asyncio.run(ActorRolloutRefWorker.update_weights(worker, global_steps=version))
    return found


def main():
    ray.get = lambda value: value
    report = {}
    asyncio.run(fully_async(report))
    asyncio.run(dynamic(report))
    report["syncs"] = syncs()
    report["errors"] = dict(wrapping.status.errors)
    probes_report.end(DIRECTORY, report)


if __name__ == "__main__":
    sys.exit(main())
