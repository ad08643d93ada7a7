# SPDX-License-Identifier: Apache-2.0
"""A worker's memory without an engine: what vLLM allocates otherwise than expected is noticed, not used."""

import os
from types import SimpleNamespace

import pytest
import torch
import vllm.model_executor.layers.utils as layer_utils

from torpor import _core, errors
from torpor.vllm import worker
from torpor.vllm.memory import CpuWorkerMemory


@pytest.fixture
def worker_memory() -> CpuWorkerMemory:
    return CpuWorkerMemory(_core.RankMemory({"rank": 0}), 0, "packed")


def runner_with_kv(*tensors) -> SimpleNamespace:
    return SimpleNamespace(kv_cache_config=SimpleNamespace(kv_cache_tensors=list(tensors)))


RUNNER = runner_with_kv(SimpleNamespace(size=1 << 16))


def test_the_kv_cache_comes_from_the_region(worker_memory):
    with worker_memory.allocating_kv(RUNNER):
        cache = torch.zeros(1 << 16, dtype=torch.int8)
    assert cache.data_ptr() == worker_memory.kv_address
    worker_memory.check_kv([cache.view(torch.float32)[256:]], [SimpleNamespace(size=1 << 16)])


def test_a_kv_cache_that_is_allocated_otherwise_is_refused(worker_memory):
    with pytest.raises(errors.Unsupported, match=r"no torch.zeros"), worker_memory.allocating_kv(RUNNER):
        torch.zeros((16, 4096), dtype=torch.int8)


def test_a_model_without_a_kv_cache_allocates_none(worker_memory):
    with worker_memory.allocating_kv(runner_with_kv()):
        pass
    worker_memory.check_kv([], [])
    assert worker_memory.kv_address == 0


def test_kv_outside_of_the_region_is_refused(worker_memory):
    with worker_memory.allocating_kv(RUNNER):
        inside = torch.zeros(1 << 16, dtype=torch.int8)
    with pytest.raises(errors.Unsupported, match="outside of torpor's region"):
        worker_memory.check_kv([inside, torch.zeros(8, dtype=torch.int8)], [])
    with pytest.raises(errors.Unsupported, match="a KV cache of 131072 bytes, allocated were 65536"):
        worker_memory.check_kv([inside], [SimpleNamespace(size=1 << 17)])


def model_of_one_linear() -> torch.nn.Module:
    model = torch.nn.Module()
    model.linear = torch.nn.Linear(64, 64, bias=False)
    return model


def test_linear_weights_are_kept_before_they_are_packed(worker_memory):
    model = model_of_one_linear()
    plain = model.linear.weight.detach().clone()
    with worker_memory.loading_weights(SimpleNamespace(model=model)):
        layer_utils.dispatch_cpu_unquantized_gemm(model.linear, remove_weight=True)
    [linear] = worker_memory._packed
    assert torch.equal(linear.plain, plain)


def packed(worker_memory, model, remove_weight: bool = True):
    with worker_memory.loading_weights(SimpleNamespace(model=model)):
        layer_utils.dispatch_cpu_unquantized_gemm(model.linear, remove_weight=remove_weight)
    return worker_memory._packed[0]


def test_packed_weights_are_kept_over_one_sleep(worker_memory):
    model, given = model_of_one_linear(), torch.randn(3, 64)
    linear = packed(worker_memory, model)
    kernel = model.linear.cpu_linear
    worker_memory.keep_derived()
    worker_memory.release_derived()
    worker_memory.rebuild_derived()
    assert model.linear.cpu_linear is kernel
    assert torch.allclose(kernel(given, None, None), given @ linear.plain.t(), atol=1e-5)
    worker_memory.release_derived()
    assert model.linear.cpu_linear is None, "the sleep after that kept them, too"
    worker_memory.rebuild_derived()
    assert torch.allclose(model.linear.cpu_linear(given, None, None), given @ linear.plain.t(), atol=1e-5)


def test_kept_packed_weights_are_not_used_with_new_weights(worker_memory):
    model, given = model_of_one_linear(), torch.randn(3, 64)
    linear = packed(worker_memory, model)
    worker_memory.keep_derived()
    worker_memory.release_derived()
    linear.plain.mul_(2.0)
    worker_memory.note_new_weights()
    worker_memory.rebuild_derived()
    assert torch.allclose(model.linear.cpu_linear(given, None, None), given @ linear.plain.t(), atol=1e-5)


def test_weights_that_were_packed_by_other_code_are_refused(worker_memory):
    model = model_of_one_linear()
    stock = layer_utils.dispatch_cpu_unquantized_gemm  # as a module would have it that imported the name at its start
    refused = pytest.raises(errors.Unsupported, match="the weights of linear were packed")
    with refused, worker_memory.loading_weights(SimpleNamespace(model=model)):
        stock(model.linear, remove_weight=True)


class FakeRankMemory:
    """The state of the weights, as an order of the controller leaves it."""

    def __init__(self):
        self.state, self.named, self.prefaults = "attached", None, 0

    def states(self) -> dict:
        return {"weights": self.state}

    def start_prefault(self) -> None:
        self.prefaults += 1


def gpu_memory_of(model, monkeypatch, *preserved):
    from torpor.vllm import gpu_memory

    monkeypatch.setattr(_core, "memory_of", lambda device, options: FakeRankMemory())
    memory = gpu_memory.GpuWorkerMemory(torch.device("cuda", 0), {}, preserved)
    memory._model = model
    return memory


def lose(memory, model) -> None:
    """The controller takes the weights away, and brings back zeros."""
    memory.rank_memory.state = "detached"
    memory.note_order()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    memory.rank_memory.state = "restoring"
    memory.note_order()


def linear_with_buffers() -> torch.nn.Linear:
    model = torch.nn.Linear(4, 4)
    model.register_buffer("table", torch.arange(4.0))
    model.register_buffer("shown", model.weight.data[0])
    return model


def test_buffers_outlive_a_sleep_on_a_gpu_but_not_those_that_show_weights(monkeypatch):
    model = linear_with_buffers()
    memory = gpu_memory_of(model, monkeypatch)
    memory.release_derived()
    lose(memory, model)
    assert model.table.tolist() == [0, 1, 2, 3] and model.shown.tolist() == [0, 0, 0, 0]
    memory.rank_memory.state = "attached"
    model.table.fill_(9)  # a loader has one for it
    memory.note_order()
    memory.rebuild_derived()
    assert model.table.tolist() == [9, 9, 9, 9], "what was loaded is written over"


def test_a_wake_that_fails_loses_no_buffer(monkeypatch):
    model = linear_with_buffers()
    memory = gpu_memory_of(model, monkeypatch)
    memory.release_derived()
    lose(memory, model)
    lose(memory, model)  # the wake was undone
    assert model.table.tolist() == [0, 1, 2, 3]


def test_a_wake_that_fails_after_the_buffers_are_back_loses_none(monkeypatch):
    model = linear_with_buffers()
    memory = gpu_memory_of(model, monkeypatch)
    memory.release_derived()
    lose(memory, model)
    memory.rebuild_derived()
    memory.release_derived()  # it undoes this first
    lose(memory, model)
    assert model.table.tolist() == [0, 1, 2, 3]


def test_a_second_sleep_saves_buffers_only_where_they_have_memory(monkeypatch):
    model = linear_with_buffers()
    memory = gpu_memory_of(model, monkeypatch)
    memory.release_derived()
    lose(memory, model)
    memory.rank_memory.state = "attached"
    memory.note_order()
    model.table.fill_(9)  # new weights have another one
    memory.rank_memory.state = "saving"
    memory.release_derived()
    lose(memory, model)
    assert model.table.tolist() == [9, 9, 9, 9]
    memory.rank_memory.state = "detached"
    memory.note_order()
    model.table.zero_()
    memory.release_derived()
    memory.rank_memory.state = "restoring"
    memory.note_order()
    assert model.table.tolist() == [9, 9, 9, 9]


def test_vllms_option_keeps_parameters(monkeypatch):
    model = linear_with_buffers()
    bias = model.bias.tolist()
    memory = gpu_memory_of(model, monkeypatch, "bia*", "draft.*")
    memory.release_derived()
    lose(memory, model)
    assert model.bias.tolist() == bias and not model.weight.any()
    with pytest.raises(errors.InvalidArgument, match="no parameter is 'head'"):
        gpu_memory_of(model, monkeypatch, "head").release_derived()


def test_host_memory_is_prefaulted_when_graphs_were_captured_not_before(monkeypatch):
    from torpor.vllm import worker

    order = []
    memory = gpu_memory_of(linear_with_buffers(), monkeypatch)
    monkeypatch.setattr(memory.rank_memory, "start_prefault", lambda: order.append("prefault"), raising=False)

    class Stock:
        torpor_memory = memory

        def compile_or_warm_up_model(self):
            order.append("captured")
            return 3

    class Both(worker.WorkerMixin, Stock):
        pass

    assert Both.compile_or_warm_up_model(object.__new__(Both)) == 3
    assert order == ["captured", "prefault"]


def test_an_update_of_weights_is_noted_unless_they_are_a_draft_models(monkeypatch):
    memory = gpu_memory_of(linear_with_buffers(), monkeypatch)
    monkeypatch.setattr(memory.rank_memory, "mark_dirty", lambda tag: None, raising=False)

    class Stock:
        torpor_memory, _weight_update_is_draft, done = memory, False, ()

        def start_draft_weight_update(self):
            self.done += ("draft",)

        def update_weights(self, update_info):
            self.done += (update_info,)
            raise RuntimeError("half of them came")

        def finish_weight_update(self):
            self.done += ("finished",)

    class Both(worker.WorkerMixin, Stock):
        pass

    updated = object.__new__(Both)
    with pytest.raises(RuntimeError, match="half"):
        updated.update_weights(1)
    assert memory.new_weights == 1
    updated.finish_weight_update()
    assert memory.new_weights == 2
    updated._weight_update_is_draft = True
    memory.rank_memory.state = "detached"  # a draft model's lie elsewhere
    updated.start_draft_weight_update()
    updated.finish_weight_update()
    assert memory.new_weights == 2 and updated.done == (1, "finished", "draft", "finished")
    monkeypatch.setattr(memory.rank_memory, "states", lambda: {"runtime": "detached"})
    for call in (updated.start_draft_weight_update, updated.finish_weight_update):
        with pytest.raises(errors.WrongState, match=r"weight_update\(\): the weights are detached"):
            call()
    assert len(updated.done) == 4


def test_a_cpus_matrix_unit_is_asked_for_before_any_step(monkeypatch):
    order = []
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: order.append("asked"))

    class Stock:
        def compile_or_warm_up_model(self):
            order.append("warmed up")

    class Both(worker.WorkerMixin, Stock):
        pass

    object.__new__(Both).compile_or_warm_up_model()
    assert order == ["asked", "warmed up"]


def _begun(copy_threads: int | None, alive: list) -> int:
    """Return how many threads a worker's memory has begun. `alive` keeps it: a thread that ends counts for a while."""
    config = SimpleNamespace(
        additional_config={"torpor": {"copy_threads": copy_threads}}, parallel_config=SimpleNamespace(world_size=1)
    )
    before = len(os.listdir("/proc/self/task"))
    alive.append(worker._memory(SimpleNamespace(vllm_config=config, rank=0)))
    return len(os.listdir("/proc/self/task")) - before


def test_an_option_says_how_many_threads_copy_and_how_many_write_files():
    alive: list = []
    # The device without a GPU has a thread for the stream of each.
    assert _begun(5, alive) - _begun(2, alive) == 2 * 2 * (5 - 2)
    cores = min(8, os.cpu_count() or 1)
    assert _begun(None, alive) == _begun(cores, alive)
    with pytest.raises(errors.InvalidArgument, match="threads is 257") as refused:
        _begun(257, alive)
    assert "1 to 256" in refused.value.next_step
