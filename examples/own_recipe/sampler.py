"""A custom sampler for verl's V1 trainer: the replay buffer with timed sampling."""

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

from verl_profiler import span


class TimedReplayBuffer(ReplayBuffer):
    """Set trainer.v1.sampler.custom_sampler.path and .name to this file and class."""

    def sample(self, global_steps, partition_id, batch_size):
        """Return what the replay buffer returns."""
        with span("choose_samples", partition=partition_id) as choose:
            batch, metrics = super().sample(global_steps, partition_id, batch_size)
            choose.set(samples=len(batch.keys))
        return batch, metrics
