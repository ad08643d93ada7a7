# SPDX-License-Identifier: Apache-2.0
"""Calls of vLLM's workers beside torpor, and what an engine core does to its process. One test has an engine."""

from types import SimpleNamespace

import pytest
from vllm.v1.engine.core import EngineCore, EngineCoreProc

from torpor import errors
from torpor.vllm import engine_core, plugin, weight_updates
from torpor.vllm.hooks import VllmHooks
from torpor.vllm.sessions import Sessions

pytestmark = pytest.mark.core


class Workers:
    """An executor that answers what is asked, or has no time."""

    def __init__(self, answer=None):
        self.calls, self._answer = [], answer

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None, **_):
        self.calls.append((method, timeout, args))
        if timeout is not None:
            raise TimeoutError(f"RPC call to {method} timed out.")
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


@pytest.fixture
def core(request):
    plugin.activate()
    core = EngineCore.__new__(EngineCore)
    core.vllm_config = SimpleNamespace(
        additional_config={"torpor": {}}, parallel_config=SimpleNamespace(distributed_executor_backend="mp")
    )
    core.scheduler = SimpleNamespace(vllm_config=None, connector=None)
    core.model_executor = Workers()
    engine_core.adopt(core)
    return core


def test_a_call_of_the_workers_that_times_out_makes_no_other_call(core):
    with pytest.raises(TimeoutError):
        core.collective_rpc("my_method", 5)
    assert core.model_executor.calls == [("my_method", 5, ())]
    with pytest.raises(errors.WrongState, match=r"collective_rpc\('my_method'\) timed out") as refused:
        VllmHooks(core).call_ranks(b"order")
    assert refused.value.next_step == "restart the engine"
    assert len(core.model_executor.calls) == 1 and weight_updates.take_doubt(core)


def test_an_engine_core_that_ends_lets_go_of_its_controller(core, monkeypatch):
    """Nobody sees that the controller holds hooks, and they the engine core: its memory would never be given back."""
    monkeypatch.setattr(EngineCore, "shutdown", lambda self: None)
    hooks = VllmHooks(core)
    core.torpor_side = SimpleNamespace(hooks=hooks, sessions=Sessions(hooks))
    core.shutdown()
    assert not hasattr(core, "torpor_side")


def test_a_time_out_in_this_process_leaves_no_answer_behind(core):
    core.vllm_config.parallel_config.distributed_executor_backend = "uni"
    with pytest.raises(TimeoutError):
        core.collective_rpc("my_method", 5)
    VllmHooks(core).call_ranks(b"order")


def test_a_failed_call_of_the_workers_makes_no_other_call(core):
    core.model_executor = Workers(RuntimeError("worker failed"))
    with pytest.raises(RuntimeError):
        core.collective_rpc("my_method")
    assert core.model_executor.calls == [("my_method", None, ())] and weight_updates.take_doubt(core)


def test_weights_that_are_written_parameter_by_parameter_cost_one_call_each(core):
    core.collective_rpc("sleep_well", args=("a",))
    core.collective_rpc("list_loras")
    core.collective_rpc(lambda worker: worker)
    assert len(core.model_executor.calls) == 3
    hooks = VllmHooks(core)
    for doubted in (True, False):
        hooks.call_ranks(b"order")
        assert core.model_executor.calls[-1] == ("torpor_rank", None, (b"order", doubted))


def test_a_mark_that_did_not_arrive_is_sent_again(core):
    core.collective_rpc("my_method")
    hooks = VllmHooks(core)
    core.model_executor = Workers(RuntimeError("worker failed"))
    with pytest.raises(RuntimeError):
        hooks.call_ranks(b"order")
    core.model_executor = Workers()
    hooks.call_ranks(b"order")
    assert core.model_executor.calls == [("torpor_rank", None, (b"order", True))]


def test_a_rank_with_marked_weights_hashes_them_again():
    from torpor.vllm import worker

    calls = []
    memory = SimpleNamespace(
        invalidate_digest=lambda tag: calls.append(tag), call=lambda order: calls.append(order) or b"answer"
    )
    of_worker = SimpleNamespace(rank_memory=memory, note_order=lambda: None)
    one = SimpleNamespace(torpor_memory=of_worker, model_runner=None)
    call = worker.WorkerMixin.torpor_rank
    assert call(one, b"1") == b"answer" and call(one, b"2", True) == b"answer"
    assert calls == [b"1", "weights", b"2"]


@pytest.mark.parametrize(("kind", "threads"), [(EngineCore, 0), (EngineCoreProc, 1)])
def test_only_an_engine_core_with_a_process_of_its_own_ends_with_its_parent(monkeypatch, kind, threads):
    started = []

    class Thread:
        def __init__(self, **_):
            pass

        def start(self):
            started.append(self)

    monkeypatch.setattr(engine_core.multiprocessing, "parent_process", lambda: object())
    monkeypatch.setattr(engine_core.threading, "Thread", Thread)
    engine_core._end_with_front_end(kind.__new__(kind))
    assert len(started) == threads


def test_a_scheduler_with_fields_of_its_own_is_refused_where_a_new_process_would_lose_them(one, tmp_path):
    scheduler = one.core.scheduler
    answers = one.begin(4)
    plan = {"level": 1, "preserve_state": True, "to": "disk"}
    assert one.llm.torpor.call("plan_sleep", plan)["problems"] == []
    scheduler.quotas = {"alice": 3}
    try:
        [problem] = one.llm.torpor.call("plan_sleep", plan)["problems"]
        assert "the scheduler Scheduler with quotas" in problem or "AsyncScheduler with quotas" in problem
        for refused in (lambda: one.llm.sleep(level=1, preserve_state=True, to="disk"), one.llm.checkpoint):
            with pytest.raises(errors.Unsupported, match="with quotas, whose own state a new process would lose"):
                refused()
        assert not one.llm.is_sleeping()
        one.llm.sleep(level=1, preserve_state=True)
        answers |= one.stopped()
        one.llm.wake_up()
        assert one.finish(answers) == one.expected
    finally:
        del scheduler.quotas


def test_a_logits_processor_of_somebodys_own_is_one_that_a_new_process_would_lose():
    from vllm.v1.sample.logits_processor import MinTokensLogitsProcessor

    from torpor.vllm import runner_v1

    class Penalty:
        pass

    batch = SimpleNamespace(logitsprocs=SimpleNamespace(all=[object.__new__(MinTokensLogitsProcessor), Penalty()]))
    assert runner_v1.lost_in_a_new_process(SimpleNamespace(input_batch=batch)) == ["the logits processor Penalty"]


@pytest.mark.parametrize("mrope", [False, True])
def test_positions_of_a_pruned_video_are_what_a_new_process_would_lose(mrope):
    from torpor.vllm import runner_v1

    batch = SimpleNamespace(logitsprocs=SimpleNamespace(all=[]))
    runner = SimpleNamespace(input_batch=batch, is_multimodal_pruning_enabled=True, uses_mrope=mrope)
    assert runner_v1.lost_in_a_new_process(runner) == ["pruned videos (video_pruning_rate)"] * mrope
