# SPDX-License-Identifier: Apache-2.0
"""Calls of vLLM's workers beside torpor, and what an engine core does to its process. One test has an engine."""

from collections import deque
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest
from vllm.lora.request import LoRARequest
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc

from torpor import errors
from torpor.vllm import engine_core, plugin, weight_updates, worker_answers
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
    assert len(core.model_executor.calls) == 1 and weight_updates.take_weights_maybe_written(core)


def test_kv_for_an_engine_that_is_only_paused_is_refused(core):
    from vllm.v1.core.sched.interface import PauseState

    asked = []
    side = engine_core.EngineSide.__new__(engine_core.EngineSide)
    side.updates = SimpleNamespace(check_wake=lambda options: None)
    side.controller = SimpleNamespace(is_sleeping=lambda: False, wake_up=lambda options: asked.append(options))
    side.hooks = VllmHooks.__new__(VllmHooks)
    side.hooks.scheduler = SimpleNamespace(pause_state=PauseState.PAUSED_ALL, requests={"a": 1})
    for kv in ("keep", "recompute", "abort"):
        with pytest.raises(errors.WrongState, match=f"paused, and does not sleep: kv='{kv}'") as refused:
            side.wake_up({"kv": kv})
        assert "sleep(level=0)" in refused.value.next_step and not refused.value.state_changed
    assert asked == []


class Channel:
    """Between processes, as far as it can be seen in one. Who reads what is not there has no time."""

    def __init__(self):
        self._out, self._in = Pipe(duplex=False)

    def enqueue(self, message) -> None:
        self._in.send(message)

    def dequeue(self, timeout=None):
        if not self.has_unread():
            raise TimeoutError
        return self._out.recv()

    def has_unread(self) -> bool:
        return self._out.poll()


class OfRank:
    """A worker of one of two processes. Which ranks refuse stands in `refusing`."""

    def __init__(self, rank: int):
        self.rank, self.refusing = rank, (0, 1)

    def _answer(self, what: str, problem: Exception) -> str:
        if self.rank in self.refusing:
            raise problem
        return f"{what} by rank {self.rank}"

    def reload_weights(self, weights_path=None):
        return self._answer("reloaded", errors.WrongState("the weights are detached", "wake them first"))

    def add_lora(self, request) -> bool:
        return bool(self._answer("loaded", ValueError("No adapter found")))

    def torpor_rank(self, order: bytes, maybe_written: bool):
        return self._answer(order.decode(), errors.DeviceError("the device is lost", native=7))

    def torpor_settle(self):
        return f"settled by rank {self.rank}"

    def execute_model(self, step):
        return f"{step} by rank {self.rank}"


@pytest.fixture
def of_two(core):
    """The engine core over two such workers: vLLM's executor and its loop of workers, without their processes."""
    workers = []
    for rank in range(2):
        worker = WorkerProc.__new__(WorkerProc)
        worker.worker, worker.rank, worker.use_async_scheduling = OfRank(rank), rank, False
        worker.worker_response_mq = Channel()
        workers.append(worker)

    calls = Channel()

    def enqueue(call) -> None:
        for worker in workers:
            calls.enqueue(call)
            worker._execute_worker_rpc(calls.dequeue())

    executor = core.model_executor = MultiprocExecutor.__new__(MultiprocExecutor)
    executor.is_failed, executor.futures_queue = False, deque()
    executor.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(enable_fault_tolerance=False))  # since 0.33
    executor.rpc_broadcast_mq = SimpleNamespace(enqueue=enqueue)
    executor.response_mqs = [worker.worker_response_mq for worker in workers]
    engine_core.adopt(core)
    core.workers = [worker.worker for worker in workers]
    yield core
    assert type(executor) is not MultiprocExecutor and type(executor).__name__ == "MultiprocExecutor"
    executor.shutting_down, executor.rpc_broadcast_mq, executor.response_mqs = True, None, []


def settle(core) -> None:
    assert not any(answers.has_unread() for answers in core.model_executor.response_mqs)
    assert VllmHooks(core)._rpc("torpor_settle") == ["settled by rank 0", "settled by rank 1"]


@pytest.mark.parametrize("refusing", [(0,), (1,), (0, 1)])
def test_a_call_that_workers_refuse_leaves_no_answer_to_the_next(of_two, refusing):
    for worker in of_two.workers:
        worker.refusing = refusing
    with pytest.raises(errors.WrongState, match="the weights are detached") as refused:
        of_two.collective_rpc("reload_weights", kwargs={"weights_path": "new"})
    assert refused.value.next_step == "wake them first"
    settle(of_two)
    with pytest.raises(RuntimeError, match="Worker failed with error 'No adapter found', please check") as refused:
        of_two.add_lora(LoRARequest("a", 1, "/nowhere"))
    assert type(refused.value) is RuntimeError
    settle(of_two)
    with pytest.raises(errors.DeviceError, match="the device is lost") as refused:
        VllmHooks(of_two).call_ranks(b"order")
    assert refused.value.native == 7
    settle(of_two)
    later = VllmHooks(of_two)._send("torpor_rank", b"order", False)
    after = VllmHooks(of_two)._send("torpor_settle")
    assert after.result() == ["settled by rank 0", "settled by rank 1"]  # it reads the answers before its own
    with pytest.raises(errors.DeviceError, match="the device is lost"):
        later.result()
    settle(of_two)
    for worker in of_two.workers:
        worker.refusing = ()
    assert VllmHooks(of_two).call_ranks(b"order") == ["order by rank 0", "order by rank 1"]


def test_a_function_that_fails_in_the_workers_leaves_no_answer_to_the_next(of_two):
    assert of_two.collective_rpc(lambda worker, add, to: worker.rank + add + to, args=(1,), kwargs={"to": 2}) == [3, 4]

    def fail(worker):
        raise ValueError(f"no such layer on rank {worker.rank}")

    with pytest.raises(RuntimeError, match="Worker failed with error 'no such layer on rank 0'"):
        of_two.collective_rpc(fail)
    settle(of_two)
    with pytest.raises(RuntimeError, match="Worker failed with error"):
        of_two.collective_rpc("no_such_method")
    settle(of_two)


def test_answers_that_were_not_read_are_not_taken_for_others(of_two):
    first, second = of_two.model_executor.response_mqs
    second.dequeue, stock = first.dequeue, second.dequeue  # where nothing is: the rank has not answered
    with pytest.raises(TimeoutError, match="RPC call to reload_weights timed out"):
        of_two.collective_rpc("reload_weights", 5)
    second.dequeue = stock
    with pytest.raises(errors.WrongState, match=r"collective_rpc\('reload_weights'\) timed out") as refused:
        VllmHooks(of_two).call_ranks(b"order")
    assert refused.value.next_step == "restart the engine"


def test_a_call_whose_answers_cannot_be_read_makes_no_other_call(of_two):
    with pytest.raises(RuntimeError, match="Worker failed with error"):
        of_two.collective_rpc(lambda worker: lambda: worker)  # no worker can send this
    with pytest.raises(errors.WrongState, match=r"collective_rpc\('<lambda>'\) did not get all answers"):
        VllmHooks(of_two)._send("torpor_settle")


def test_a_call_of_workers_that_is_interrupted_makes_no_other_call(of_two, monkeypatch):
    def interrupt(timeout=None):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(of_two.model_executor.response_mqs[0], "dequeue", interrupt)
        of_two.collective_rpc("reload_weights")
    with pytest.raises(errors.WrongState, match=r"collective_rpc\('reload_weights'\) did not get all answers"):
        VllmHooks(of_two).call_ranks(b"order")


def test_a_call_of_workers_that_cannot_be_sent_leaves_the_others_alone(of_two):
    with pytest.raises(Exception, match="pickle"):
        of_two.collective_rpc("reload_weights", args=(lambda: None,))
    settle(of_two)


def test_steps_are_vllms_own_calls(of_two, monkeypatch):
    monkeypatch.setattr(worker_answers, "answer", None)
    for non_block in (False, True):
        found = of_two.model_executor.collective_rpc(
            "execute_model", args=("step",), unique_reply_rank=1, non_block=non_block, timeout=9,
            kv_output_aggregator=None,
        )  # fmt: skip
        assert (found.result() if non_block else found) == "step by rank 1"


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
    assert core.model_executor.calls == [("my_method", None, ())] and weight_updates.take_weights_maybe_written(core)


def test_weights_that_are_written_parameter_by_parameter_cost_one_call_each(core):
    core.collective_rpc("sleep_well", args=("a",))
    core.collective_rpc("list_loras")
    core.collective_rpc(lambda worker: worker)
    assert len(core.model_executor.calls) == 3
    hooks = VllmHooks(core)
    for maybe_written in (True, False):
        hooks.call_ranks(b"order")
        assert core.model_executor.calls[-1] == ("torpor_rank", None, (b"order", maybe_written))


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


def test_no_call_of_a_session_waits_for_steps_during_an_update_of_the_weights():
    scheduler = SimpleNamespace(connector=None, requests={})
    hooks = SimpleNamespace(core=SimpleNamespace(scheduler=scheduler), scheduler=scheduler, retire_prefix=lambda: None)
    controller = SimpleNamespace(state=lambda: {"engine": "awake", "tags": {}}, is_sleeping=lambda: False)
    updates = weight_updates.Updates(SimpleNamespace(controller=controller, hooks=hooks))
    side = SimpleNamespace(controller=controller, hooks=hooks, updates=updates, _check_awake=lambda: None)
    updates.begin({"update": "a"})
    with pytest.raises(errors.WrongState, match="is under way"):
        engine_core.EngineSide.session_call(side, {"verb": "demote"})


def test_a_pause_that_aborts_ends_hibernated_requests_by_their_ids(core):
    ended = []

    class Sessions:
        def held(self):
            return {"hibernated": 3}

    def finish_requests(requests, _):
        ended.append(requests)
        return []

    core.scheduler = SimpleNamespace(finish_requests=finish_requests, set_pause_state=lambda _: None)
    hooks = VllmHooks.__new__(VllmHooks)
    hooks.core, hooks.scheduler, hooks.sessions = core, core.scheduler, Sessions()
    hooks.keep_draining = lambda: None
    core.torpor_side, core._finish_pause = SimpleNamespace(hooks=hooks), lambda _: None
    for mode in ("keep", "abort"):
        core.pause_scheduler(mode)
    core.pause_scheduler()  # vLLM's default aborts
    assert ended == [["hibernated"], None] * 2
