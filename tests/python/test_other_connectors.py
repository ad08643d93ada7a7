# SPDX-License-Identifier: Apache-2.0
"""A sleep beside a KV connector that is not torpor's: vLLM 0.33 has hooks for it, before that torpor refuses it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import scenarios
import vllm
from conftest import result_of
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request

from torpor import errors
from torpor.vllm import configuration, other_connectors, sessions
from torpor.vllm.connector_options import CLASS, MODULE

PROCESS = Path(__file__).parent / "other_connectors_process.py"
SCRIPTED = {"kv_connector": "ScriptedConnector", "kv_connector_module_path": "scripted_connector", "kv_role": "kv_both"}
TORPORS = {
    "kv_connector": CLASS, "kv_connector_module_path": MODULE, "kv_role": "kv_both",
    "kv_connector_extra_config": {"host_bytes": "64MiB"},
}  # fmt: skip
FOLLOWS = hasattr(KVConnectorBase_V1, "unregister_kv_caches")
since_0_33 = pytest.mark.skipif(not FOLLOWS, reason=f"vLLM {vllm.__version__} has no hooks for a sleep; 0.33 has")
ENDED = ["send", "load", "unregister"]  # in any order but for the last


def both(*connectors: dict) -> dict:
    return {
        "kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }  # fmt: skip


def played(zygote, model, folder, transfer: dict, *names: str) -> dict:
    result = result_of(zygote.run([PROCESS, model, folder, json.dumps(transfer), *names]))
    scenarios.check(result)
    return result


# --- engines ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone(zygote, tiny_model, tmp_path_factory) -> dict:
    names = (
        "keeps_requests", "is_refused_while_transfers_do_not_end", "fails_to_unregister", "fails_to_restore",
        "wakes_by_tags", "computes_requests_again", "pauses", "keeps_nothing_for_a_new_process", "aborts_requests",
        "puts_weights_alone_to_sleep", "fails_when_requests_have_ended",
    )  # fmt: skip
    return played(zygote, tiny_model, tmp_path_factory.mktemp("alone"), SCRIPTED, *names)


@pytest.fixture(scope="module")
def beside_torpors(zygote, tiny_model, tmp_path_factory) -> dict:
    names = (
        "keeps_requests", "is_refused_while_transfers_do_not_end", "computes_requests_again", "aborts_requests",
        "has_torpors_inside", "is_reset_asleep",
    )  # fmt: skip
    return played(zygote, tiny_model, tmp_path_factory.mktemp("both"), both(SCRIPTED, TORPORS), *names)


@pytest.fixture(params=["alone", "beside_torpors"])
def result(request) -> dict:
    return request.getfixturevalue(request.param)


@pytest.mark.slow
@pytest.mark.core
@pytest.mark.gpu_path
@since_0_33
def test_transfers_end_before_a_sleep_and_requests_go_on_after_it(result):
    of = result["keeps_requests"]
    assert sorted(of["slept"][:-1]) == sorted(ENDED[:-1]) and of["slept"][-1] == "unregister", of
    assert of["woken"] == ["restore"] and of["awake"] and of["kept"] > 0
    assert of["same"] and of["recomputed"] == 0


@pytest.mark.slow
@pytest.mark.core
@pytest.mark.gpu_path
@since_0_33
def test_a_sleep_whose_transfers_do_not_end_is_refused_by_name(result):
    of = result["is_refused_while_transfers_do_not_end"]
    assert of["kind"] == "TimedOut" and not of["changed"] and not of["asleep"] and of["events"] == [], of
    assert "Connector still has requests that wait for KV (1), ended requests whose KV it holds (1)" in of["what"]
    assert of["same"]


@pytest.mark.slow
@pytest.mark.core
@pytest.mark.gpu_path
@since_0_33
def test_requests_that_are_computed_again_or_aborted_leave_no_transfer_behind(result):
    of = result["computes_requests_again"]
    assert sorted(of["slept"]) == sorted(ENDED) and of["slept"][-1] == "unregister", of
    assert of["woken"] == ["restore"] and of["same"]
    of = result["aborts_requests"]
    assert of["slept"].count("send") >= 2 and of["slept"][-1] == "unregister", of  # at least one was aborted
    assert of["woken"] == ["restore"] and of["same"]


@pytest.mark.slow
@pytest.mark.core
@pytest.mark.gpu_path
@since_0_33
def test_what_fails_in_the_middle_is_undone(alone):
    of = alone["fails_to_unregister"]
    assert "unregister_kv_caches() of rank 0: RuntimeError: scripted failure" in of["what"] and not of["changed"], of
    assert not of["asleep"] and of["events"][-2:] == ["unregister fails", "restore"]
    assert of["again"] == ["unregister"] and of["same"]
    of = alone["fails_to_restore"]
    assert "restore_kv_caches() of rank 0" in of["what"] and not of["changed"] and of["asleep"], of
    assert of["events"] == ["restore fails", "unregister"] and of["again"] == ["restore"]
    assert of["awake"] and of["same"]


@pytest.mark.slow
@pytest.mark.core
@pytest.mark.gpu_path
@since_0_33
def test_after_a_sleep_that_failed_the_front_end_has_no_request_that_ended(alone):
    of = alone["fails_when_requests_have_ended"]
    assert "scripted failure" in of["what"] and of["changed"] and not of["asleep"], of
    assert of["in_core"] == 0 and not of["unfinished"] and of["same"], of


@pytest.mark.slow
@pytest.mark.core
@pytest.mark.gpu_path
@since_0_33
def test_a_sleep_of_the_weights_waits_for_transfers_and_unregisters_nothing(alone):
    of = alone["puts_weights_alone_to_sleep"]
    assert of["slept"] and sorted(of["events"]) == sorted(ENDED[:-1]), of
    assert of["woken"] == [] and of["same"], of


@pytest.mark.slow
@pytest.mark.core
@pytest.mark.gpu_path
def test_a_sleep_that_keeps_no_requests_ends_transfers_first(zygote, tiny_model, tmp_path):
    """The connector has no hooks for a sleep."""
    of = played(zygote, tiny_model, tmp_path, SCRIPTED | {"kv_connector": "Inherits"}, "ends_requests")["ends_requests"]
    assert of["kind"] == "TimedOut" and not of["changed"] and not of["asleep"] and of["same"], of
    assert of["abort"] == of["keep"] == {"slept": True, "same": True}, of


@pytest.mark.slow
@pytest.mark.core
@pytest.mark.gpu_path
@since_0_33
def test_it_is_registered_whenever_the_kv_cache_is_there_and_the_engine_runs(alone):
    of = alone["wakes_by_tags"]
    assert of["weights"] == [] and of["kv"] == ["restore"], of
    assert of["only_weights"] == [] and of["deeper"] == ["unregister"] and of["all"] == ["restore"]
    assert of["same"]


@pytest.mark.slow
@pytest.mark.core
@pytest.mark.gpu_path
@since_0_33
def test_a_pause_needs_nothing_of_it(alone):
    of = alone["pauses"]
    assert of["slept"] == of["woken"] == [] and of["same"], of
    assert of["kind"] == "TimedOut" and "still has requests that wait for KV (1)" in of["what"]
    assert sorted(of["deeper"][:-1]) == sorted(ENDED[:-1]) and of["deeper"][-1] == "unregister", of
    assert of["same_after_deeper"]
    assert sorted(of["keeps"][:-1]) == sorted(ENDED[:-1]) and of["keeps"][-1] == "unregister", of
    assert of["same_after_keeping"]


@pytest.mark.slow
@pytest.mark.core
@pytest.mark.gpu_path
@since_0_33
def test_nothing_goes_to_a_new_process(alone):
    of = alone["keeps_nothing_for_a_new_process"]
    for call in ("disk", "checkpoint", "from_checkpoint"):
        assert "a KV connector, whose own state a new process would lose" in of[call], of
    assert "a post-copy wake beside a KV connector" in of["early"] and of["same"]


@pytest.mark.slow
@pytest.mark.core
@pytest.mark.gpu_path
@since_0_33
def test_torpors_connector_works_inside_multi_connector(beside_torpors):
    of = beside_torpors["has_torpors_inside"]
    first, second, of_new_weights = of["cached"]
    assert of["stored"] > 0 and second > first, of
    assert of_new_weights == second


@pytest.mark.slow
@pytest.mark.core
@pytest.mark.gpu_path
@pytest.mark.parametrize("transfer", [SCRIPTED | {"kv_connector": "Inherits"}, both(SCRIPTED, TORPORS)])
def test_no_kv_of_old_weights_is_found_in_it(zygote, tiny_model, tmp_path, transfer):
    of = played(zygote, tiny_model, tmp_path, transfer, "forgets_kv_of_old_weights")["forgets_kv_of_old_weights"]
    same = {f"{kv}, same": True for kv in ("keep", "recompute", "abort")}
    assert of == {"updating_weights": 0, "keep": 0, "recompute": 0, "abort": 0} | same


@pytest.mark.slow
@pytest.mark.core
@pytest.mark.gpu_path
@since_0_33
def test_a_reset_in_a_sleep_takes_no_step(beside_torpors):
    of = beside_torpors["is_reset_asleep"]
    assert of == {"steps": 0, "same": True}


@pytest.mark.slow
@pytest.mark.core
@pytest.mark.skipif(FOLLOWS, reason="this vLLM has the hooks")
def test_an_older_vllm_refuses_it_by_name(zygote, tiny_model, tmp_path):
    of = played(zygote, tiny_model, tmp_path, SCRIPTED, "is_refused")["is_refused"]
    assert of["kind"] == "Unsupported" and "a KV connector: vLLM has the hooks" in of["what"], of
    assert not of["changed"] and not of["asleep"] and of["same"]


@pytest.mark.slow
@pytest.mark.core
@since_0_33
def test_two_ranks_in_processes_of_their_own_follow_together(zygote, tiny_model, tmp_path):
    """One fails to unregister, so that both are restored."""
    (logs := tmp_path / "logs").mkdir()
    transfer = SCRIPTED | {"kv_connector_extra_config": {"log": str(logs), "failing_rank": 1}}
    words = [PROCESS.with_name("other_connectors_ranks_process.py"), tiny_model, tmp_path, json.dumps(transfer)]
    of = result_of(zygote.run(words))
    assert "unregister_kv_caches() of rank 1" in of["refused"] and not of["asleep_after_it"] and of["asleep"], of
    assert of["same"]
    slept_and_woke = ["unregister", "restore"]
    calls = [(logs / rank).read_text().split("\n") for rank in ("0", "1")]
    assert [each for each in calls[0] if each in slept_and_woke] == slept_and_woke * 2
    assert [each for each in calls[1] if each.split(" ")[0] in slept_and_woke] == [
        "unregister fails", "restore", *slept_and_woke,
    ]  # fmt: skip
    assert all(rank.index("send") < rank.index("restore") for rank in calls)


@pytest.mark.slow
@pytest.mark.core
@since_0_33
def test_two_engines_that_nixl_connects_sleep_and_wake(zygote, tiny_model, tmp_path):
    """With NIXL itself, over UCX in host memory. A load that failed would end its request with an error."""
    names = ("consumer_sleeps", "producer_is_refused", "producer_sleeps", "sleeps_longer_than_the_lease")
    words = [PROCESS.with_name("nixl_process.py"), tiny_model, tmp_path, *names]
    result = result_of(zygote.run(words))
    of = result["consumer_sleeps"]
    assert of["waiting"] == 1 and of["kept"] > 0 and of["same"] and of["after"] and of["recomputed"] == 0, of
    of = result["producer_is_refused"]
    assert "TimedOut: the KV connector NixlConnector still has ended requests whose KV it holds (1)" in of["why"], of
    assert of["same"]
    of = result["producer_sleeps"]
    assert of["kept"] > 0 and of["same"], of
    assert result["sleeps_longer_than_the_lease"]["same"], result


def test_a_step_that_fails_leaves_no_pause_behind():
    """A connector fails in each step of the wait, also in those that end what is in flight."""

    def step():
        raise RuntimeError("a worker's connector failed")

    scheduler = SimpleNamespace(
        pause_state=PauseState.UNPAUSED, torpor_collects=False, requests={}, deferred_frees=[1], kv_holding_waiting=[]
    )
    scheduler.connector = SimpleNamespace(has_pending_block_frees=lambda: True, has_pending_push_work=lambda: False)
    scheduler.set_pause_state = lambda state: setattr(scheduler, "pause_state", state)
    beside = other_connectors.OtherConnector.__new__(other_connectors.OtherConnector)
    beside._core = SimpleNamespace(scheduler=scheduler, batch_queue=[1], step_fn=step)
    beside.follows, beside._name = True, "Scripted"
    with pytest.raises(RuntimeError, match="connector failed"):
        beside.finish_transfers(1)
    assert scheduler.pause_state is PauseState.UNPAUSED and not scheduler.torpor_collects


# --- configurations ---------------------------------------------------------------------------------------------------


def refusals(transfer: dict | None, ranks: int = 1, stages: int = 1) -> list[str]:
    parallel = SimpleNamespace(data_parallel_size=ranks, pipeline_parallel_size=stages)
    config = None if transfer is None else KVTransferConfig(**transfer)
    return other_connectors.refusals(SimpleNamespace(kv_transfer_config=config, parallel_config=parallel))


def test_the_rust_front_end_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    configuration.refuse_rust_front_end()  # of this process, which is no server
    monkeypatch.setattr("sys.argv", ["vllm", "serve", "model"])
    with pytest.raises(errors.Unsupported, match="Rust front end"):
        configuration.refuse_rust_front_end()
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "0")
    configuration.refuse_rust_front_end()


def test_none_and_torpors_are_not_refused():
    assert refusals(None) == [] and refusals(TORPORS) == []


@pytest.mark.core
@since_0_33
@pytest.mark.parametrize("inside", [False, True])
def test_what_does_not_follow_a_sleep_is_refused_by_name(inside):
    def named(transfer: dict, **parallel) -> list[str]:
        return refusals(both(TORPORS, transfer) if inside else transfer, **parallel)

    assert named(SCRIPTED) == []
    inherits = SCRIPTED | {"kv_connector": "Inherits"}
    assert named(inherits) == ["a KV connector: Inherits does not implement unregister_kv_caches and restore_kv_caches"]
    says_no = SCRIPTED | {"kv_connector_extra_config": {"sleeps": False}}
    [why] = named(says_no)
    assert "says that it does not support sleep mode" in why
    assert named(SCRIPTED | {"kv_connector": "Nowhere"}) == ["a KV connector"]
    example = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    assert "ExampleConnector does not implement" in named(example)[0]
    assert "of data parallel ranks" in named(SCRIPTED, ranks=2)[0]
    assert "in a pipeline" in named(SCRIPTED, stages=2)[0]


@pytest.mark.core
@since_0_33
def test_what_is_inside_a_connector_derived_from_multi_connector_is_asked_too():
    derived = {"kv_connector": "Derived", "kv_connector_module_path": "scripted_connector"}
    inherits = SCRIPTED | {"kv_connector": "Inherits"}
    assert refusals(both(SCRIPTED, TORPORS) | derived) == []
    assert "Inherits does not implement" in refusals(both(SCRIPTED, inherits) | derived)[0]
    assert refusals(both(both(SCRIPTED, TORPORS))) == ["a KV connector: MultiConnector inside MultiConnector"]
    assert refusals(both(both(SCRIPTED) | derived)) == ["a KV connector: Derived inside MultiConnector"]


def a_request(**transfer) -> Request:
    parameters = SamplingParams(max_tokens=2, extra_args={"kv_transfer_params": transfer})
    return Request("a", [1, 2, 3], parameters, pooling_params=None)


def test_a_prompt_that_another_engine_has_is_computed_after_a_sleep():
    of_decoder = {"do_remote_decode": True, "do_remote_prefill": False}
    elsewhere = [a_request(do_remote_prefill=True), a_request(**of_decoder, remote_block_ids=[[7]])]
    here = [a_request(**of_decoder, remote_block_ids=None), a_request(do_remote_prefill=False, remote_block_ids=[[7]])]
    begun = a_request(do_remote_prefill=True)
    begun.num_computed_tokens = 2
    requests = [*elsewhere, *here, begun, Request("b", [1], SamplingParams(max_tokens=2), pooling_params=None)]
    assert [other_connectors.has_remote_prompt(each) for each in requests] == [True, True, *[False] * 4]
    for each in elsewhere:
        assert "KV of its prompt that another engine still has" in sessions.unsupported(each)
    beside = other_connectors.OtherConnector.__new__(other_connectors.OtherConnector)
    beside._core = SimpleNamespace(scheduler=SimpleNamespace(requests=dict(enumerate(requests))))
    beside.is_there = True
    beside.compute_remote_prompts()
    assert not any(map(other_connectors.has_remote_prompt, requests))
    assert sessions.unsupported(elsewhere[0]) == []


@pytest.mark.core
@since_0_33
@pytest.mark.parametrize("failing", [0, 1])
def test_where_one_of_two_ranks_fails_both_are_restored(failing):
    """Made up ranks: the failure of one does not keep the other from its turn."""
    called, fails, published = [], ["unregister_kv_caches"], []

    def collective_rpc(method, args):
        assert method == "torpor_call_connector"
        called.append(args[0])
        return [f"rank {rank}" if args[0] in fails and rank == failing else None for rank in (0, 1)]

    connector = SimpleNamespace(has_pending_block_frees=lambda: False, has_pending_push_work=lambda: False)
    scheduler = SimpleNamespace(connector=connector, requests={}, deferred_frees=())
    parallel = SimpleNamespace(data_parallel_size=1, pipeline_parallel_size=1)
    config = SimpleNamespace(kv_transfer_config=KVTransferConfig(**SCRIPTED), parallel_config=parallel)

    def publish() -> None:
        if "metadata" in fails:
            raise RuntimeError("no answer")
        published.append(len(called))

    core = SimpleNamespace(vllm_config=config, scheduler=scheduler, collective_rpc=collective_rpc)
    core._set_kv_connector_handshake_metadata = publish
    other = other_connectors.OtherConnector(core)
    assert other.follows
    with pytest.raises(errors.DeviceError, match=f"ScriptedConnector: rank {failing}"):
        other.unregister()
    other.restore(undoing=True)
    other.restore(undoing=True)
    assert called == ["unregister_kv_caches", "restore_kv_caches"] and published == [2]
    fails[:] = ["restore_kv_caches"]
    other.unregister()
    for _ in range(2):
        with pytest.raises(errors.DeviceError):
            other.restore(undoing=False)
    other.restore(undoing=True)  # the engine serves on; what fails is logged
    assert published == [2]
    fails[:] = ["metadata"]
    with pytest.raises(errors.DeviceError, match="its metadata for peers: RuntimeError: no answer"):
        other.restore(undoing=False)
    fails.clear()
    other.restore(undoing=False)
    other.restore(undoing=False)
    assert called.count("restore_kv_caches") == 1 + 2 + 2 + 2 and published == [2, len(called)]
    called.clear()
    connector.has_pending_push_work = lambda: True
    with pytest.raises(errors.Unsupported, match="ScriptedConnector has transfers that no request waits for"):
        other.unregister()
    assert called == []
