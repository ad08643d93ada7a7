# SPDX-License-Identifier: Apache-2.0
"""The KV connector: blocks go to host memory and come back, and nobody sees a difference but in time."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import conftest
import pytest
import gpu_path
from conftest import long_on_gpu_path, result_of
from connector_served import BLOCKS, CONVERSATIONS, ENGINE, GROUP_BLOCKS, params, prompts
from grouped_models import MODELS
from tiny_model import make_model
from vllm import LLM
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.request import RequestStatus

from torpor import _core
from torpor.errors import InvalidArgument
from torpor.vllm.connector_options import ConnectorOptions
from torpor.vllm.described import size
from torpor.vllm.connector_sleep import free_for_others, let_those_with_blocks_go_first
from torpor.vllm.options import Options

PROCESS = Path(__file__).parent / "connector_process.py"


@pytest.fixture(scope="module", params=["eager", pytest.param("lazy", marks=pytest.mark.long)])
def served(request, zygote, tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("connector")
    return result_of(zygote.run([PROCESS, request.param, tiny_model, folder])) | {"mode": request.param}


@long_on_gpu_path
@pytest.mark.gpu_path
@pytest.mark.slow
def test_tokens_are_the_same_and_most_prompts_come_from_host_memory(served):
    result = served["identical"]
    assert result["tokens"][0] == result["tokens"][1] == result["tokens"][2]
    cold, *warm = result["cached"]
    assert all(cached > cold + CONVERSATIONS * 32 for cached in warm)
    counted, tiers = result["counted"]
    assert counted == sum(result["cached"]) == tiers["device"] + tiers["host"] and tiers["host"] > 32
    assert result["stats"]["onboard_transferred"] > CONVERSATIONS and result["stats"]["host_blocks"] > BLOCKS
    assert result["stats"]["held_blocks"] == result["stats"]["loading_requests"] == 0


@pytest.mark.slow
def test_get_metrics_has_blocks_bytes_and_seconds_of_each_way(served):
    """As LLM.get_metrics() gives vLLM's own; every number is what the scheduler counted."""
    result = served["measured"]
    published, sizes, block = result["published"], result["sizes"], result["published"]["block_bytes"]
    assert result["vllm"] > 10 and block == sizes["block_bytes"]
    values = {
        (metric["name"], *(metric["labels"].get(name) for name in ("way", "outcome", "store"))): metric
        for metric in result["torpor"]
    }
    for way in ("onboard", "offload"):
        blocks = values["torpor_offload_blocks", way, "transferred", None]["value"]
        assert blocks == published[f"{way}_transferred"] > CONVERSATIONS
        assert values["torpor_offload_bytes", way, None, None]["value"] == blocks * block
        seconds = values["torpor_offload_seconds", way, None, None]
        assert 0 < seconds["count"] <= blocks and seconds["sum"] > 0
        assert seconds["buckets"]["+Inf"] == seconds["count"]
    cached = [metric for metric in result["torpor"] if metric["name"] == "torpor_offload_cached_tokens"]
    assert sum(metric["value"] for metric in cached) == result["cached"] > 0
    assert {m["labels"]["tier"]: m["value"] for m in cached} == {
        tier: published.get(f"cached_{tier}_tokens", 0) for tier in ("device", "host", "disk", "kv_store", "other")
    }
    loads = values["torpor_offload_load_seconds", None, None, None]
    assert loads["count"] > CONVERSATIONS and loads["sum"] > 0
    assert values["torpor_offload_host_capacity_blocks", None, None, None]["value"] == sizes["host_slots"]
    assert values["torpor_offload_host_blocks", None, None, None]["value"] == published["host_blocks"] > BLOCKS


@pytest.mark.slow
def test_packed_blocks_leave_room_for_more_in_as_many_bytes(served):
    if served["mode"] == "lazy":  # see connector_process.py
        assert 1.2 < served["room"] < 4 / 3
        assert served["identical"]["stats"].get("offload_failed", 0) == 0
    else:
        assert 0.95 < served["room"] <= 1


@long_on_gpu_path
@pytest.mark.gpu_path
@pytest.mark.slow
def test_a_loaded_block_has_what_prefill_would_have_written(served):
    result = served["loaded_is_what_prefill_writes"]
    assert result["cached"] > 0 and result["blocks"] >= 2
    assert result["difference"] <= 1e-5 * result["largest"]


@long_on_gpu_path
@pytest.mark.gpu_path
@pytest.mark.slow
def test_a_block_is_stored_when_the_step_is_over_that_writes_it(served):
    if served["mode"] == "eager":
        queued, *others = served["only_what_is_written"]["before"]
        assert queued > 0 and others == [0, 0, 0]
        assert served["only_what_is_written"]["after"] == [0, 0, 0, queued]


@long_on_gpu_path
@pytest.mark.gpu_path
@pytest.mark.slow
def test_aborts_preemptions_and_resets_in_the_middle_change_no_token(served):
    result = served["disturbed"]
    assert result["differing"] == [] and result["aborted"] > 0 and (result["resets"] > 0 or gpu_path.active())
    assert result["free"] == BLOCKS - 1 and result["stats"]["held_blocks"] == 0


@long_on_gpu_path
@pytest.mark.gpu_path
@pytest.mark.slow
def test_a_request_that_is_aborted_while_it_loads_leaves_nothing_behind(served):
    result = served["aborted_while_loading"]
    assert result["loading"] == result["held"] > 0 and result["loaded"] > 0
    assert result["requests"] == result["still"] == 0 and result["free"] == BLOCKS - 1


@long_on_gpu_path
@pytest.mark.gpu_path
@pytest.mark.slow
@pytest.mark.parametrize("way", ["preserve_state", "recompute"])
def test_a_sleep_waits_for_what_moves_and_keeps_what_is_in_host_memory(served, way):
    result = served["slept"]
    assert result[way]["loading"] > 0 and result[way]["moving"] == 0
    assert result[way]["differing"] == [] and result[way]["finished"] == CONVERSATIONS
    assert result[way]["kept"] and result["cached"] > CONVERSATIONS * 32
    assert result[way]["reserved_in_vain"] == []
    assert way == "recompute" or result[way]["recomputed"] == 0


@long_on_gpu_path
@pytest.mark.gpu_path
@pytest.mark.slow
@pytest.mark.parametrize("way", ["preserve_state", "recompute"])
def test_first_schedule_after_wake(served, way):
    """A connector whose memory was taken away must not end the engine in the next step: it serves, and loads."""
    result = served["slept"][way]
    scheduled, loading = result["first_schedule"]
    assert scheduled > 0 or loading > 0
    assert result["differing"] == [] and result["finished"] == CONVERSATIONS


@long_on_gpu_path
@pytest.mark.gpu_path
@pytest.mark.slow
def test_kv_events_name_the_same_blocks_in_host_memory_as_on_the_device(served):
    published = served["published"]
    assert published["cleared"] > 0 and set(published["CPU"]) <= set(published["GPU"])
    assert published["STORAGE"] == []  # there is no disk
    if served["mode"] == "eager":
        assert (
            len(published["CPU"]) >= 6 and published["parents"] and set(published["parents"]) <= set(published["CPU"])
        )
    else:
        assert published["parents"] == []  # of what is given up nobody knows what was before it


@long_on_gpu_path
@pytest.mark.gpu_path
@pytest.mark.slow
def test_a_reset_forgets_what_is_in_host_memory(served):
    result = served["forgotten"]
    assert result["reset"] is True
    assert result["cached"][0] < result["cached"][1]


@pytest.mark.gpu_path
@pytest.mark.slow
def test_with_steps_in_flight_and_a_sleep_in_the_middle(zygote, tiny_model, tmp_path):
    result = result_of(zygote.run([PROCESS, "brief", tiny_model, tmp_path]))
    assert result["in_flight"] == gpu_path.active() and result["at_once"] > 0
    assert result["tokens"] == result["warm"] == result["slept"]
    assert result["cached"][1] > result["cached"][0] + 4 * 32 and result["moving"] == 0
    assert result["taken_over"] > 0 and result["taken_over"].is_integer()  # blocks that the sleep did not copy
    assert result["stats"]["onboard_transferred"] > 4
    assert result["of_an_answer"] == 3
    is_published(result["published"], result["stats"])
    is_operated(result["operated"])
    assert result["types"] == sorted(
        (
            "cached candidate control copy dropped ended engine hit key memory operation phase planned registered "
            "request slot step stop tier"
        ).split()
    )


def is_operated(operated: dict) -> None:
    """Through its console: who is held waits alone, what is cancelled does not go, what is dropped is not there."""
    assert operated["first"] and operated["tokens"] == operated["expected"]
    [stop] = operated["stops"]
    assert (stop["cause"], stop["held"]) == ("hold", 1)
    assert operated["held_down"] == ["hold", 0]
    assert operated["cancelled"]["blocks"] == operated["cancelled"]["of"] > 0
    assert operated["absent"]["dropped"] == 0 < operated["absent"]["absent"]
    assert operated["dropped"]["dropped"] == operated["fewer"] > 0


def is_published(published: dict, stats: dict) -> None:
    """As events: each request's way, where its blocks were found, every transfer with its end, tiers and memory."""
    counts = published["counts"]
    for way in published["ways"]:
        assert all(before[1] == after[0] for before, after in itertools.pairwise(way)), way
    loaded = [way for way in published["ways"] if any(state == "onboarding" for _, state, _ in way)]
    assert len(loaded) >= 4
    for way in loaded:
        states = [state for _, state, _ in way]
        assert states[states.index("onboarding") - 1] == "onboard staged"
        assert states[states.index("onboarding") + 1] == "prefilling"
        assert max(staged for _, _, staged in way) > 1
    assert published["found"] >= stats["onboard_transferred"] > 0
    assert counts["candidate promoted"] == counts["candidate completed"] > 10
    assert counts["ended transferred"] >= 10 and counts["planned"] > 5
    assert counts["copy begin"] == counts["copy end"] > 5
    assert published["tiers"]["host"] > 10 and "device" in published["tiers"]
    assert {tag["tag"] for tag in published["memory"][0]["tags"]} >= {"weights", "kv_cache"}
    assert published["left"][1] == [0] * len(published["left"][1]) and published["unknown"] == 0
    # By the model of the same requests: all of host memory's hits need host memory.
    assert published["none"]["models"][1]["found"]["host"] == 0 < published["none"]["models"][0]["found"]["host"]
    assert published["twice"]["models"][1]["found"]["host"] >= published["twice"]["models"][0]["found"]["host"]


@pytest.mark.long
@pytest.mark.slow
def test_two_ranks_find_what_both_have_after_a_sleep_and_in_a_new_engine(zygote, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    torpor = {"checkpoint_dir": str(tmp_path), "offload": "eager", "host_bytes": "64MiB", "disk_bytes": "64MiB"}
    texts = prompts()
    seen = []
    for _ in range(2):
        with zygote.spawning():
            llm = LLM(
                str(tiny_model),
                additional_config={"torpor": torpor},
                tensor_parallel_size=2,
                **(conftest.ENGINE | ENGINE),
            )
        try:
            for slept in (False, True):
                outputs = llm.generate(texts, [params(number) for number in range(len(texts))], use_tqdm=False)
                tokens = [list(output.outputs[0].token_ids) for output in outputs]
                seen.append((tokens, sum(output.num_cached_tokens for output in outputs)))
                if not slept:
                    assert llm.sleep(level=1, preserve_state=True).changed
                    assert llm.wake_up()
        finally:
            llm.llm_engine.engine_core.shutdown()
    (first, cold), *others = seen
    assert all(tokens == first and cached > cold + CONVERSATIONS * 32 for tokens, cached in others)


@long_on_gpu_path
@pytest.mark.gpu_path
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [("windows", {}), ("chunks", {}), ("sizes", {}), ("convolutions", {}), ("convolutions", {"prefix_match_unit": 16})],
)
@pytest.mark.long
def test_blocks_of_several_groups_come_back_from_host_memory_and_disk(kind, options, zygote, tmp_path):
    model = MODELS[kind](tmp_path / "model")

    def serve():
        result = result_of(zygote.run([PROCESS, "groups", model, tmp_path, json.dumps(options)]))
        assert result["tokens"][0] == result["tokens"][1]
        assert result["bytes"][0] == result["bytes"][1]
        assert (
            result["left"]["held_blocks"] == result["left"]["loading_requests"] == result["left"]["queued_blocks"] == 0
        )
        return result

    first = serve()
    cold, warm = first["cached"]
    assert sum(first["by_tier"].values()) == cold + warm
    assert warm > cold + CONVERSATIONS * 32 and first["stats"]["demote_transferred"] > CONVERSATIONS
    for way in ("preserve_state", "recompute"):
        slept = first["slept"][way]
        assert (
            slept["loading"] > 0 and slept["differing"] == [] and slept["finished"] == CONVERSATIONS and slept["kept"]
        )
    assert first["slept"]["preserve_state"]["recomputed"] == 0
    assert first["disturbed"]["differing"] == [] and first["disturbed"]["aborted"] > 0
    word = _core.cache_epoch(str(tmp_path / "checkpoints/offload"))
    assert word or gpu_path.active()  # it was reset: what came since is found all the same
    assert first["aborted_while_loading"]["free"] == GROUP_BLOCKS - 1 and first["aborted_while_loading"]["loaded"] > 0
    after = serve()
    assert after["stats"]["recovered_blocks"] > CONVERSATIONS and after["cached"][0] > cold + CONVERSATIONS * 32
    assert damage(tmp_path, every=20) > 1
    beside = serve()
    assert found_damaged(beside["stats"]) > 0 and beside["stats"]["onboard_transferred"] > 0
    assert first["tokens"] == after["tokens"] == beside["tokens"]


class Waiting:
    def __init__(self, status: RequestStatus, computed: int):
        self.status, self.num_computed_tokens = status, computed


def test_a_request_whose_load_failed_does_not_keep_back_those_that_hold_blocks():
    """vLLM looks at none of them while it finds no room for the first, and they hold the room."""
    failed = [Waiting(RequestStatus.WAITING, 0), Waiting(RequestStatus.PREEMPTED, 0)]
    loading, loaded = Waiting(RequestStatus.WAITING_FOR_REMOTE_KVS, 48), Waiting(RequestStatus.WAITING, 48)
    others = [Waiting(RequestStatus.WAITING, 0)]
    new, prefilling = Waiting(RequestStatus.RUNNING, 0), Waiting(RequestStatus.RUNNING, 32)
    for before, behind in (([], [loading, loaded]), ([loading], [loaded]), ([loaded, loading], []), ([], [])):
        scheduler = SimpleNamespace(
            waiting=create_request_queue(SchedulingPolicy.FCFS),
            kv_holding_waiting=create_request_queue(SchedulingPolicy.FCFS),
            _inflight_prefills={*failed, *others, loading, loaded, new, prefilling},
        )
        scheduler.waiting.extend(others)
        scheduler.kv_holding_waiting.extend(before + failed + behind)
        let_those_with_blocks_go_first(scheduler)
        assert list(scheduler.kv_holding_waiting) == before + behind and list(scheduler.waiting) == failed + others
        assert scheduler._inflight_prefills == {loading, loaded, new, prefilling}  # vLLM keeps room for these


class Loaded(Waiting):
    num_preemptions = 0

    def __init__(self, name: str, status: RequestStatus, computed: int):
        super().__init__(status, computed)
        self.request_id = name


def test_of_requests_that_have_loaded_the_last_gives_its_blocks_back_where_none_can_go_on():
    """vLLM began more loads than there is room for, and waits for blocks that nobody will free."""
    waits = RequestStatus.WAITING_FOR_REMOTE_KVS

    def after(*, busy=False, running=(), over=("second", "third"), paused=PauseState.UNPAUSED, loaded=3) -> tuple:
        requests = [
            Loaded("first", RequestStatus.WAITING, 320),
            Loaded("second", waits, 320),
            Loaded("third", waits, 64),
        ]
        freed = []
        scheduler = SimpleNamespace(
            connector=type("TorporConnector", (), {"scheduler": SimpleNamespace(busy=lambda: busy)})(),
            running=list(running),
            pause_state=paused,
            waiting=create_request_queue(SchedulingPolicy.FCFS),
            kv_holding_waiting=create_request_queue(SchedulingPolicy.FCFS),
            finished_recving_kv_req_ids=set(over),
            failed_recving_kv_req_ids=set(),
            kv_cache_manager=SimpleNamespace(free=freed.append),
            _inflight_prefills=set(requests),
        )
        scheduler.kv_holding_waiting.extend(requests[:loaded])
        free_for_others(scheduler)
        assert freed == list(scheduler.waiting) and all(r.num_computed_tokens == 0 for r in freed)
        assert all(r.status is RequestStatus.WAITING and r not in scheduler._inflight_prefills for r in freed)
        names = [request.request_id for request in freed]
        assert not scheduler.finished_recving_kv_req_ids & set(names)
        return names, [request.request_id for request in scheduler.kv_holding_waiting]

    assert after() == (["third"], ["first", "second"])
    everything = ["first", "second", "third"]
    assert after(busy=True) == after(running=[1]) == after(paused=PauseState.PAUSED_ALL) == ([], everything)
    assert after(over=("third",)) == ([], everything)  # the second one's load may free it, if it fails
    assert after(loaded=1) == ([], ["first"])


def found_damaged(stats: dict) -> int:
    """Return how many blocks were found to be damaged: by loads, and on the way into host memory for requests that
    waited."""
    return stats.get("onboard_damaged", 0) + stats.get("prefetch_damaged", 0)


def damage(folder: Path, every: int) -> int:
    """Damages one of `every` pages of records: behind a damaged batch page nothing is found. Returns how many."""
    damaged = 0
    for segment in sorted((folder / "checkpoints/offload/store/r0").glob("seg-*")):
        content = bytearray(segment.read_bytes())
        for place in range(3 * 4096, len(content) - 4096, every * 4096 + 16384):
            place += 4096 if content[place : place + 8] == b"TORPBATC" else 0
            content[place] ^= 1
            damaged += 1
        segment.write_bytes(content)
    return damaged


def is_published_block_by_block(published: dict, stats: dict) -> None:
    """Which blocks are in host memory and on disk; some go from host memory, which is small, and come again."""
    assert published["host"] == stats["host_blocks"] > 0 and published["unknown"] == 0
    assert published["recovered"] == stats["recovered_blocks"]
    assert published["disk"] + published["recovered"] == stats["disk_blocks"] > 50
    assert ("ping-pong" in published["lints"]) == published["thrice_in_a_minute"]
    assert published["most_times"] >= 2 or published["recovered"]


@pytest.mark.slow
def test_what_is_on_disk_is_found_after_a_kill_and_recomputed_where_it_is_damaged(zygote, real_model, tmp_path):
    """And not at all with other weights."""
    first, other = make_model(tmp_path / "first", real_model), make_model(tmp_path / "other", real_model, seed=8)

    def serve(model, *checkpoint):
        result = result_of(zygote.run([PROCESS, "disk", model, tmp_path, *checkpoint]))
        assert sum(result["by_tier"].values()) == result["of_all"] > 0
        return result

    before = serve(first)
    published = before["published"]
    assert (
        published["cleared"] > 0
        and len(published["STORAGE"]) >= 6
        and set(published["STORAGE"]) <= set(published["CPU"])
    )
    assert _core.cache_epoch(str(tmp_path / "checkpoints/offload")) != ""  # of the namespace since that reset
    assert before["stats"]["demote_transferred"] > 50 and before["stats"]["recovered_blocks"] == 0
    assert before["tokens"] == before["again"]
    is_published_block_by_block(before["blocks"], before["stats"])
    after = serve(first, before["asleep"]["checkpoint"])
    assert after["woken"]["failed"] == [] and after["woken"]["recomputed"] == 0
    given, answers = before["asleep"]["given"], after["woken"]["answers"]
    assert [answers.get(i) or given[i] for i in given] == before["asleep"]["expected"] and len(answers) > 0
    assert after["stats"]["recovered_blocks"] >= before["stats"]["disk_blocks"] > 50
    is_published_block_by_block(after["blocks"], after["stats"])
    assert after["tokens"] == before["tokens"] and after["cached"] > before["cached"] + CONVERSATIONS * 32
    assert after["by_tier"]["disk"] > CONVERSATIONS * 32
    assert after["new"]["after"] == after["new"]["before"] + 1
    assert damage(tmp_path, every=108) > 5
    beside = serve(first)
    assert found_damaged(beside["stats"]) > 0
    assert beside["stats"]["onboard_transferred"] > 0 and beside["stats"]["recovered_blocks"] > 0
    assert beside["tokens"] == beside["again"] == before["tokens"]
    elsewhere = serve(other)
    assert elsewhere["stats"]["recovered_blocks"] == 0 and elsewhere["tokens"] != before["tokens"]


@pytest.mark.parametrize("mode", ["weights", "weights_disk"])
def test_the_first_requests_after_new_weights_find_no_kv_of_the_old(zygote, tiny_model, tmp_path, mode):
    """Whoever wrote them, and also where only a reset of vLLM's own prefix cache says so."""
    found = result_of(zygote.run([PROCESS, mode, tiny_model, tmp_path]))
    updated = found.pop("updating_weights")
    # The hash that the reset makes is enough; without a disk it makes none.
    assert found.pop("proven") == (mode == "weights_disk")
    assert updated["spaces"] == 0 and updated["stored"] > 0  # its first requests are stored already
    assert len(found) == 3
    for way, result in found.items():
        assert set(result["cached"]) == {0} and result["right"], way
        assert result["spaces"] == 1, way


def test_a_reset_after_new_weights_forgets_what_disk_and_store_have(zygote, tiny_model, tmp_path):
    """KV of weights that were written unseen has the name of the right ones."""
    words = [PROCESS, "reset", tiny_model, tmp_path]
    before, after = result_of(zygote.run(words)), result_of(zygote.run(words))
    assert {cached for _, cached in before["first"]} == {0}
    assert after["recovered"] > 0 and all(cached > 0 for _, cached in after["first"])
    assert {cached for _, cached in after["again"]} == {0}
    right = [tokens for tokens, _ in after["again"]]
    assert [tokens for tokens, _ in before["first"]] == [tokens for tokens, _ in after["first"]] == right
    assert [tokens for tokens, _ in before["wrong"]] != right


def test_counters_and_gauges_reach_prometheus():
    from prometheus_client import Counter, Gauge, Histogram, generate_latest

    from torpor.vllm.connector_stats import Metrics, Stats, with_bytes

    config = SimpleNamespace(kv_transfer_config=None)
    kinds = {kind: kind for kind in (Counter, Gauge, Histogram)}
    metrics, counted = Metrics(config, kinds, ["engine"], {0: ["0"]}), {}
    for transferred in (3, 5):
        stats = Stats.since(
            counted,
            with_bytes({"offload_transferred": transferred, "disk_evicted": 1, "host_blocks": transferred}, 64),
            {"offload": [0.002], "load": [0.02] * transferred},
        )
        metrics.observe(stats.data)
    assert stats.data == {
        "counters": {"offload_transferred": 2, "offload_bytes": 128},
        "gauges": {"host_blocks": 5},
        "seconds": {"offload": [0.002], "load": [0.02] * 5},
    }
    assert stats.reduce() == {"offload_transferred": 2, "offload_bytes": 128, "host_blocks": 5, "offload_ms": 2.0,
                              "load_ms": 20.0}  # fmt: skip
    metrics.observe(Stats.since({}, {"cached_disk_tokens": 96}, {}).data)
    text = generate_latest().decode()
    assert 'torpor_offload_cached_tokens_total{engine="0",tier="disk"} 96.0' in text
    assert 'torpor_offload_cached_tokens_total{engine="0",tier="kv_store"} 0.0' in text
    assert 'torpor_offload_blocks_total{engine="0",outcome="transferred",way="offload"} 5.0' in text
    assert 'torpor_offload_evicted_blocks_total{engine="0",store="disk"} 1.0' in text
    assert 'torpor_offload_host_blocks{engine="0"} 5.0' in text
    assert 'torpor_offload_bytes_total{engine="0",way="offload"} 320.0' in text
    assert 'torpor_offload_seconds_bucket{engine="0",le="0.0025",way="offload"} 2.0' in text
    assert 'torpor_offload_load_seconds_count{engine="0"} 8.0' in text


def test_where_the_epoch_of_a_namespace_cannot_be_kept_nothing_is_found_again(tmp_path):
    (tmp_path / "file").touch()
    words = [_core.renew_cache_epoch(str(tmp_path / "file")), _core.cache_epoch(str(tmp_path / "file"))]
    assert words[0] != words[1] != ""


def test_sizes_are_numbers_or_text_with_a_unit():
    assert size("host_bytes", 7) == 7
    assert size("host_bytes", "4GiB") == 4 << 30
    for wrong in ("4GB", "4.5GiB", -1, 1.0, True, None, "", "GiB"):
        with pytest.raises(InvalidArgument, match="host_bytes is"):
            size("host_bytes", wrong)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"offlaod": "eager"}, "unknown connector option offlaod"),
        ({"offload": "false"}, "offload is 'false'"),
        ({"offload": "eager"}, "no room"),
        ({"host_bytes": 1 << 20, "disk": "through"}, "disk is 'through' and disk_bytes is 0"),
        ({"disk_bytes": "1GiB"}, "disk_dir"),
        ({"host_bytes": 1 << 20, "durable": "perhaps"}, "durable is 'perhaps'"),
        ({"host_bytes": 1 << 20, "min_uses": 1.5}, "min_uses is 1.5"),
        ({"host_bytes": 1 << 20, "max_batch_size": 8}, 'give {"advanced": {"max_batch_size": …}}'),
        ({"host_bytes": 1 << 20, "advanced": {"max_batch_size": 0}}, "max_batch_size is 0"),
        ({"host_bytes": 1 << 20, "advanced": {"durable": True}}, "unknown advanced connector option durable"),
        ({"host_bytes": 1 << 20, "advanced": 8}, "advanced is 8"),
        ({"host_bytes": 1 << 20, "min_uses": 0}, "min_uses is 0"),
        ({"host_bytes": 1 << 20, "min_prefix_tokens": True}, "min_prefix_tokens is True"),
    ],
)
def test_a_wrong_option_is_named(given, named):
    with pytest.raises(InvalidArgument) as raised:
        ConnectorOptions.of(given)
    assert named in str(raised.value)


def test_a_tilde_in_a_path_is_the_home_of_its_user(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("TORPOR_SPILL_DIR", "~/spill")
    given = {"checkpoint_dir": "~/checkpoints", "key_file": "/keys/~"}
    options = Options.of(SimpleNamespace(additional_config={"torpor": given}))
    assert options.checkpoint_dir == "/home/somebody/checkpoints" and options.spill_dir == "/home/somebody/spill"
    assert options.key_file == "/keys/~"
    connector = ConnectorOptions.of({"host_bytes": 1 << 20, "disk_bytes": "1GiB", "disk_dir": "~/kv"})
    assert connector.disk_dir == "/home/somebody/kv"
    with pytest.raises(InvalidArgument, match="~nobody-has-this-name/x"):
        Options.of(SimpleNamespace(additional_config={"torpor": {"checkpoint_dir": "~nobody-has-this-name/x"}}))


def test_the_queue_has_the_defaults_of_the_documents():
    assert ConnectorOptions.of({"host_bytes": 1 << 20}).queue() == {
        "max_batch_size": 64, "min_batch_size": 8, "flush_interval_ms": 10, "policy_timeout_ms": 100,
        "sweep_interval_ms": 10, "max_concurrent_transfers": 1, "on_deck_batches": 4, "loading_batches": 64,
        "queue_blocks": 65536, "presence": True,
    }  # fmt: skip
