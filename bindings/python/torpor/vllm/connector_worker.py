# SPDX-License-Identifier: Apache-2.0
"""The connector in a worker: orders of the scheduler to the rank's memory, and what became of them."""

from __future__ import annotations

import logging

from torpor import _core
from torpor.errors import Error, NotEnoughRoom, Unsupported
from torpor.vllm import adapters, connector_groups, worker
from torpor.vllm.connector_begin_again import GeneratorStates
from torpor.vllm.connector_messages import Orders, RankIsReady, Report
from torpor.vllm.connector_options import ConnectorOptions, keys_have_adapters, storage_options
from torpor.vllm.fingerprint import kv_namespace
from torpor.vllm.options import Options
from torpor.vllm.support import rank_of
from torpor.vllm.worker_memory import WorkerMemory

logger = logging.getLogger("vllm.torpor")

_FIRST_SPACE = 1


class Adapters:
    """The LoRA adapters of a worker, and those that it has reported."""

    def __init__(self) -> None:
        self._reported: dict[int, str] = {}
        self._read = 0
        self._asked: int | None = None

    def read(self, adapter: dict) -> None:
        self._asked = adapter["lora_int_id"]
        if (mine := worker.of_this_process()) is None:
            return
        try:
            adapters.read(mine.model_runner, adapter)
        except Exception as problem:  # vLLM says so to whom it concerns
            logger.warning("LoRA adapter %s cannot be read: %s", adapter["lora_name"], problem)

    def take_news(self) -> dict[int, str] | None:
        """Return the adapters by digest if one changed, was read, is gone or was asked for; else None."""
        if (mine := worker.of_this_process()) is None:
            return None
        now = {each["id"]: each["digest"] or "" for each in adapters.loaded(mine.model_runner)}
        read, asked = adapters.times_read(mine.model_runner), self._asked
        if asked is None and read == self._read and now == self._reported:
            return None
        self._reported, self._read, self._asked = now, read, None
        return now if asked is None else {asked: ""} | now


class WorkerSide:
    def __init__(self, vllm_config, kv_cache_config, options: ConnectorOptions):
        self._config = vllm_config
        self._options = options
        # vLLM takes a part of a load only where a shorter prefix needs no other blocks.
        self._whole_loads = connector_groups.need_whole_hits(kv_cache_config)
        self.core: _core.ConnectorWorker | None = None
        self._step = 0
        self._transfers: list[bytes] = []
        self._finished: set[str] = set()
        self._failed: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._within_step: set[str] = set()  # requests whose loads end within the present step
        self._generators = GeneratorStates()
        self._drafts = vllm_config.speculative_config is not None
        self._wait_seconds = 0.0
        self._memory: WorkerMemory | None = None  # of the rank
        self._space = ""  # what names of namespaces have in common
        self._weights = 0  # as often as they were new, when the namespace began or the last report was made
        self._digest = ""  # of the weights of the namespace; empty: it has no name
        self._adapters = Adapters() if keys_have_adapters(vllm_config, options) else None

    def prepare(self) -> RankIsReady:
        """vLLM has allocated the KV cache, in torpor's memory. Asked again after a wake, the tiers stay as they are."""
        if self.core is not None:
            return RankIsReady(self.core.sizes(), b"")
        mine = worker.of_this_process()
        if mine is None:
            raise Unsupported("torpor's KV connector: torpor does not hold the engine's memory", "see docs/vllm.md")
        self._memory = memory = mine.torpor_memory
        memory.describe_kv(mine.model_runner)
        options, torpor = self._options, Options.of(self._config)
        self.core = core = _core.ConnectorWorker(
            memory.rank_memory,
            {
                "rank": rank_of(mine),
                "host_bytes": options.host_bytes,
                "directory": options.disk_dir,
                "key_file": torpor.key_file,
                "encrypt": torpor.encrypt,
                "durable": options.durable,
                "host_compression": torpor.host_compression if memory.kv_is_bf16 else None,
            }
            | storage_options(options),
        )
        folder = options.disk_folder
        if folder is not None or options.kv_store is not None:
            self._space = kv_namespace(mine)
        self._open_space(core, _FIRST_SPACE, "" if folder is None else _core.cache_epoch(folder), "")
        return RankIsReady(core.sizes(), b"" if folder is None else core.recover(_FIRST_SPACE))

    def _open_space(self, core: _core.ConnectorWorker, number: int, word: str, shared_word: str) -> None:
        """Of the weights as they are now. In memory its number tells it from others, so it needs no name there. The
        words are other ones after a reset: what was stored before is not found."""
        assert self._memory is not None
        self._weights = self._memory.new_weights
        if not self._space:
            core.open_space(number, "")
            return
        self._digest = core.weights_digest()
        name = f"{self._space}\nweights: {self._digest}\nword: "
        core.open_space(number, name + word, name + shared_word)

    def begin(self, orders: Orders) -> None:
        """Begin a step's transfers, and end its loads within the step.

        The blocks to be stored were written in earlier steps. Those to be loaded are read in later ones, except for
        loads within the step: vLLM calls this before the forward pass where there are any.
        """
        self._step = orders.step
        self._wait_seconds = orders.wait_seconds
        if self.core is None:
            return
        if orders.wait_seconds > 0 and self._drafts and (mine := worker.of_this_process()) is not None:
            mine.synchronize_device()  # a step without kernels: its report would not prove that others are over
        if orders.adopted is not None:
            self.core.adopt(orders.adopted)
        if orders.weights_maybe_written and self._memory is not None:
            self._memory.rank_memory.invalidate_digest("weights")
        if orders.space is not None:
            self._open_space(self.core, *orders.space)
        if orders.adapter is not None and self._adapters is not None:
            self._adapters.read(orders.adapter)
        if orders.plan is not None:
            self.core.run(orders.plan)
        if (orders.within_step or self._adapters is not None) and (mine := worker.of_this_process()) is not None:
            self._generators.keep(mine.model_runner, orders.step)
        if orders.within_step:
            self._within_step.update(orders.within_step)
            self.core.finish_loads(orders.within_step)
            self._take()
            if self._within_step:  # nothing is known of their blocks, and the step would compute with them
                raise NotEnoughRoom(
                    f"there is no memory to end loads within a step: {', '.join(sorted(self._within_step))}",
                    "free host memory and start the engine again",
                )

    def look(self) -> None:
        """Take what has ended. In a step that computes nothing, wait for a transfer that ends first."""
        if self.core is None:
            return
        if self._wait_seconds > 0:
            self.core.wait_for_report(self._wait_seconds)
        self._take()

    def _take(self) -> None:
        assert self.core is not None
        transfers, finished = self.core.poll()
        if transfers is not None:
            self._transfers.append(transfers)
        for request_id, bad_blocks in finished.items():
            if request_id in self._within_step:  # it computes already
                self._within_step.discard(request_id)
            else:
                self._finished.add(request_id)
            if bad_blocks and self._whole_loads:
                self._failed.add(request_id)
            else:
                self._bad_blocks.update(bad_blocks)

    def take_finished(self) -> set[str]:
        finished, self._finished = self._finished, set()
        return finished

    def take_failed(self) -> set[str]:
        """Requests, of those that are finished, that have nothing of what was to be loaded."""
        failed, self._failed = self._failed, set()
        return failed

    def take_bad_blocks(self) -> set[int]:
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_report(self) -> Report:
        transfers, self._transfers = self._transfers, []
        before, self._weights = self._weights, self._weights if self._memory is None else self._memory.new_weights
        adapters_now = None if self._adapters is None else self._adapters.take_news()
        return Report(self._step, transfers, before != self._weights, adapters_now)

    def weights_changed(self, by_content: bool) -> bool:
        """Return whether other weights were loaded than the namespace began with.

        `by_content`: also whether they were written unseen. Without a digest of theirs that is taken for granted.
        """
        if self.core is None or self._memory is None:
            return False
        if self._memory.new_weights != self._weights:
            return True
        if not by_content:
            return False
        if not self._digest:
            return True
        self._memory.rank_memory.invalidate_digest("weights")
        return self.core.weights_digest() != self._digest

    def draw_again(self, step: int, request_ids: list[str]) -> None:
        """Let these requests draw again what they drew in `step`, and in later ones that have begun."""
        if (mine := worker.of_this_process()) is not None:
            self._generators.put_back(mine.model_runner, step, request_ids)

    def wait(self) -> None:
        """Nothing is under way afterwards, and what is on disk is as safe as was asked for: segments that cannot be
        synced are dropped, and counted."""
        if self.core is not None:
            self.core.wait()
            if self._options.durable:
                try:
                    self.core.sync()
                except Error as problem:
                    logger.error("blocks on disk are dropped: %s", problem)

    def close(self) -> None:
        if self.core is not None:
            self.wait()
            self.core.close()
            self.core = None
