# SPDX-License-Identifier: Apache-2.0
"""Ranks on several hosts: whether all see the directory of checkpoints, asked when a server starts."""

from __future__ import annotations

from vllm.logger import init_logger

from torpor.errors import Busy, WrongState

logger = init_logger("vllm.torpor")  # vLLM sets up only what is below its own name


async def check_directory(life) -> None:
    """Raises where the operator asked for checkpoints: such a server would have none when they are needed. Else it is
    said once, and the server serves: its response log is this host's alone, so a drain loses no request, but time,
    since the next server computes them again."""
    settings = life.settings
    if not life.options.checkpoint_dir or life.engine.vllm_config.parallel_config.world_size == 1:
        return
    try:
        await life.engine.torpor.call("check_directory", {})
    except (Busy, WrongState) as problem:
        if (
            settings.object_store
            or settings.checkpoint_interval_seconds > 0
            or settings.sleep_to_disk_after_seconds > 0
        ):
            raise
        logger.error("torpor: no checkpoint can be written, so after a drain requests are computed again: %s", problem)
