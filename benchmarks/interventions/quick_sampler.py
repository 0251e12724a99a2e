"""verl's replay buffer, looking for finished samples ten times as often.

For `trainer.v1.sampler.custom_sampler.path` and `.name`; docs/what-if.md compares what it saves with
what the replay said it would.
"""

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

__all__ = ["QuickReplayBuffer"]


class QuickReplayBuffer(ReplayBuffer):
    """Sleeps 0.2 s between two looks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"poll_interval": 0.2, **kwargs})
