# SPDX-License-Identifier: Apache-2.0
"""What verl_bench.py counts in the process of vLLM's scheduler."""

import json

from verl_counts import FOLDER, replace
from vllm.v1.core.sched.async_scheduler import AsyncScheduler


class CountingScheduler(AsyncScheduler):
    """Counts positions that are scheduled, and those that were scheduled before, by rollout (`NAME.LEG-…`)."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._reached: dict[str, int] = {}
        self._counts = {"computed": 0, "computed_twice": 0}

    def schedule(self, *args, **kwargs):
        output = super().schedule(*args, **kwargs)
        for request_id, count in output.num_scheduled_tokens.items():
            name, end = request_id.partition(".")[0], self.requests[request_id].num_computed_tokens
            self._counts["computed"] += count
            self._counts["computed_twice"] += max(0, min(end, self._reached.get(name, 0)) - (end - count))
            self._reached[name] = max(end, self._reached.get(name, 0))
        if output.num_scheduled_tokens:
            replace(FOLDER / "counts.json", json.dumps(self._counts))
        return output
