# SPDX-License-Identifier: Apache-2.0
"""verl's replay buffers, which look for complete groups every 20 ms: verl's 2 s exceed a step of verl_bench.py."""

from verl.trainer.ppo.v1 import replay_buffer

SECONDS = 0.02


class Sync(replay_buffer.ReplayBuffer):
    def __init__(self, **options):
        super().__init__(**options, poll_interval=SECONDS)


class Async(replay_buffer.ReplayBufferAsync):
    def __init__(self, **options):
        super().__init__(**options, poll_interval=SECONDS)
