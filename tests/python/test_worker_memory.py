"""A worker's memory without an engine: what vLLM allocates otherwise than expected is noticed, not used."""

from types import SimpleNamespace

import pytest
import torch
import vllm.model_executor.layers.utils as layer_utils

from torpor import _core, errors
from torpor.vllm.memory import CpuWorkerMemory


@pytest.fixture
def worker_memory() -> CpuWorkerMemory:
    return CpuWorkerMemory(_core.RankMemory({"rank": 0}), 0, "packed")


def test_the_kv_cache_comes_from_the_region(worker_memory):
    with worker_memory.allocating_kv():
        cache = torch.zeros(1 << 16, dtype=torch.int8)
    assert cache.data_ptr() == worker_memory.kv_address
    worker_memory.check_kv([cache.view(torch.float32)[256:]], [SimpleNamespace(size=1 << 16)])


def test_a_kv_cache_that_is_allocated_otherwise_is_refused(worker_memory):
    with pytest.raises(errors.Unsupported, match=r"no torch.zeros"), worker_memory.allocating_kv():
        torch.zeros((16, 4096), dtype=torch.int8)


def test_kv_outside_of_the_region_is_refused(worker_memory):
    with worker_memory.allocating_kv():
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


def test_weights_that_were_packed_by_other_code_are_refused(worker_memory):
    model = model_of_one_linear()
    stock = layer_utils.dispatch_cpu_unquantized_gemm  # as a module would have it that imported the name at its start
    refused = pytest.raises(errors.Unsupported, match="the weights of linear were packed")
    with refused, worker_memory.loading_weights(SimpleNamespace(model=model)):
        stock(model.linear, remove_weight=True)


def test_buffers_outlive_a_sleep_on_a_gpu_but_not_those_that_show_weights():
    from torpor.vllm.gpu_memory import GpuWorkerMemory

    model = torch.nn.Linear(4, 4)
    model.register_buffer("table", torch.arange(4.0))
    model.register_buffer("shown", model.weight.data[0])
    one = object.__new__(GpuWorkerMemory)
    one._model = model
    one.release_derived()
    model.table.zero_()
    model.weight.data.fill_(2)  # the weights that came meanwhile
    one.rebuild_derived()
    assert model.table.tolist() == [0, 1, 2, 3] and model.shown.tolist() == [2, 2, 2, 2]
