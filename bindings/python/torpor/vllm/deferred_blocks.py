# SPDX-License-Identifier: Apache-2.0
"""After a post-copy wake: KV blocks of the prefix cache whose content still comes back, while the engine runs.

vLLM decides as without a sleep which requests a step has, which blocks a prompt hits and which blocks it gives out. A
step that reads a deferred block waits for it first. If vLLM gives a deferred block out for other content, the copy into
it is cancelled or ended first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from torpor.errors import WrongState

_LOOK_SECONDS = 0.01  # at least between looks at what has arrived,
_LOOK_SHARE = 50  # and so many times what the last one took: ranks in other processes answer after their step


class DeferredBlocks:
    """The deferred blocks of one scheduler, from its wake until the last of them has arrived."""

    def __init__(self, scheduler, blocks: list[int], advance: Callable[[str, list[int], list[int]], dict]):
        """`advance`: the controller's continue_wake()."""
        self._scheduler = scheduler
        self._pool = scheduler.kv_cache_manager.block_pool
        self._advance = advance
        self._deferred = set(blocks)
        self._lost: set[int] = set()
        self._next_look = 0.0
        self.arrived = self.skipped = 0
        self.recomputed: list[str] = []  # requests that wanted a lost one
        if any(self._pool.blocks[block].ref_cnt > 0 for block in blocks):
            raise WrongState("a block that is to be deferred belongs to a request", "wake without early")
        self._manager = scheduler.kv_cache_manager
        self._stand_in_front()

    def _stand_in_front(self) -> None:
        """Route allocations of blocks and look-ups of prefixes through this object until all blocks have arrived."""
        self._give, self._find = self._pool.get_new_blocks, self._manager.get_computed_blocks
        self._pool.get_new_blocks = self.get_new_blocks
        self._manager.get_computed_blocks = self.get_computed_blocks
        self._scheduler.torpor_deferred = self

    def get_new_blocks(self, num_blocks: int) -> list:
        """Replace BlockPool.get_new_blocks() until then."""
        self.give_out(num_blocks)
        return self._give(num_blocks)

    def get_computed_blocks(self, request, *args, **kwargs) -> tuple:
        """Replace KVCacheManager.get_computed_blocks() until then. vLLM 0.33 passes one argument more."""
        return self.found(request, lambda: self._find(request, *args, **kwargs))

    def _step_aside(self) -> None:
        if self._scheduler.torpor_deferred is self:
            del self._pool.get_new_blocks, self._manager.get_computed_blocks
            self._scheduler.torpor_deferred = None

    def to_value(self) -> dict:
        return {
            "arrived": self.arrived,
            "unreadable": len(self._lost),
            "skipped": self.skipped,
            "pending": len(self._deferred),
            "recomputed": self.recomputed,
        }

    def release(self, arrived: list[int], lost: list[int], skipped: list[int], unproven: list[int]) -> None:
        """They have ended, in one way or the other."""
        self.arrived += self._end(arrived)
        self.skipped += self._end(skipped)
        for block in self._deferred.intersection(unproven):  # a copy may still write there: nobody may ever have it
            self._pool.free_block_queue.remove(self._pool.blocks[block])
            self._pool.blocks[block].ref_cnt += 1
            self._scheduler.torpor_unproven += 1
        gone = self._deferred.intersection([*lost, *unproven])
        self._lost |= gone
        self._end(gone)
        for block in (*gone, *skipped):
            self._pool._maybe_evict_cached_block(self._pool.blocks[block])
        if not self._deferred:
            self._step_aside()

    def _end(self, blocks: Iterable[int]) -> int:
        ended = self._deferred.intersection(blocks)
        self._deferred -= ended
        return len(ended)

    def poll(self) -> None:
        """Before a step is scheduled."""
        if (now := time.monotonic()) < self._next_look:
            return
        self._advance("none", [], [])
        self._next_look = now + max(_LOOK_SECONDS, _LOOK_SHARE * (time.monotonic() - now))

    def found(self, request, look: Callable[[], tuple]) -> tuple:
        """What `look`, vLLM's search for a request's prefix, finds; its content is there."""
        while True:
            result = look()
            wanted = self._deferred.intersection(block.block_id for group in result[0].blocks for block in group)
            if not wanted:
                return result
            while still := self._deferred & wanted:
                self._advance("some", sorted(still), [])
            if wanted & self._lost and request.request_id not in self.recomputed:
                self.recomputed.append(request.request_id)  # it looks again, and finds less

    def give_out(self, count: int) -> None:
        """Before the pool gives out its first `count` free blocks."""
        wait = "none"
        while given := self._deferred.intersection(self._first_free(count)):
            self._advance(wait, [], sorted(given))
            wait = "some"  # the others are being copied

    def _first_free(self, count: int) -> Iterable[int]:
        block = self._pool.free_block_queue.fake_free_list_head.next_free_block
        for _ in range(min(count, self._pool.get_num_free_blocks())):
            yield block.block_id
            block = block.next_free_block
