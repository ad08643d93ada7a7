# SPDX-License-Identifier: Apache-2.0
"""Regions by tag without an engine: torpor.memory, its C ABI, and vLLM's sleep-mode backend over it. Without a GPU."""

import ctypes
import json
import os
import subprocess
import sys
import tempfile

import pytest
from inspector import BINARY, look

from torpor import _core, errors

os.environ["TORPOR_MEMORY_DEVICE"] = "host"

from torpor import memory


@pytest.fixture
def tag(request):
    return request.node.name


def bytes_at(address: int, size: int):
    return (ctypes.c_ubyte * size).from_address(address)


def test_kept_bytes_come_back_under_the_same_address_and_the_others_as_zeros(tag):
    with memory.scope(tag):
        kept = memory.allocate(300_000)
    with memory.scope(tag, keep=False):
        dropped = memory.allocate(100)
    bytes_at(kept, 300_000)[:] = bytes(range(250)) * 1200
    bytes_at(dropped, 100)[:] = b"x" * 100
    plan = memory.plan_sleep(tag)
    moved = memory.sleep(tag)
    assert (
        moved["copied_bytes"] == plan["copied_bytes"] == 300_000
        and moved["dropped_bytes"] == plan["dropped_bytes"] == 100
    )
    assert plan["obstacle"] == "" and [phase for phase, _ in moved["seconds"]] == ["save", "detach"]
    assert memory.ledger()[0]["tags"][tag]["physical_bytes"] == 0
    assert memory.plan_wake(tag)["copied_bytes"] == memory.wake(tag)["copied_bytes"] == 300_000
    assert bytes(bytes_at(kept, 300_000)) == bytes(range(250)) * 1200
    assert bytes(bytes_at(dropped, 100)) == bytes(100)
    memory.free(kept)
    memory.free(dropped)


def test_memory_that_is_freed_while_it_sleeps_does_not_come_back(tag):
    with memory.scope(tag):
        first, second, third = (memory.allocate(5_000_000) for _ in range(3))
    bytes_at(third, 5_000_000)[:] = b"3" * 5_000_000
    memory.sleep(tag)
    memory.free(second)
    moved = memory.wake(tag)
    assert moved["copied_bytes"] == 10_000_000 and bytes(bytes_at(third, 5_000_000)) == b"3" * 5_000_000
    with memory.scope(tag):
        second = memory.allocate(100)  # after a wake, with a backup that may have been kept
    bytes_at(second, 100)[:] = b"2" * 100
    memory.sleep(tag)
    memory.wake(tag)
    assert bytes(bytes_at(second, 100)) == b"2" * 100
    for address in (first, second, third):
        memory.free(address)
    assert tag not in memory.ledger()[0]["tags"]


EVENTS = """
from torpor import memory
with memory.scope("weights"):
    address = memory.allocate(3_000_000)
memory.sleep("weights"); memory.wake("weights"); memory.sleep("weights")
print("done", flush=True)
input()
"""


def test_what_sleeps_and_what_it_had_is_published(tmp_path):
    """Of a program without an engine, that is killed: its last words."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        environment = os.environ | {"TORPOR_EVENTS_DIR": directory, "TORPOR_MEMORY_DEVICE": "host"}
        program = subprocess.Popen(
            [sys.executable, "-c", EVENTS], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert program.stdout.readline() == "done\n"
        program.kill()
        program.communicate()
        lines = subprocess.run([BINARY, "events", directory, "--json"], capture_output=True, text=True, check=True)
        [process] = look("console", directory)["processes"]
    events = [json.loads(line) for line in lines.stdout.splitlines()]
    assert {event["type"] for event in events} == {"operation", "copy", "memory"}
    assert [(event["from"], event["to"]) for event in events if event["type"] == "operation"] == [
        (operation, edge) for operation in ("sleep", "wake", "sleep") for edge in ("begin", "end")
    ]
    assert not process["alive"] and [one["operation"] for one in process["operations"]] == ["sleep", "wake", "sleep"]
    [tag] = [tag for tag in process["memory"][0]["tags"] if tag["tag"] == "weights"]
    assert tag["device_bytes"] == 0 and tag["host_bytes"] == 3_000_000


def test_mistakes_are_named(tag):
    with pytest.raises(errors.InvalidArgument, match="0 bytes"), memory.scope(tag):
        memory.allocate(0)
    with pytest.raises(errors.InvalidArgument), memory.scope(tag):
        memory.allocate(1 << 62)
    with pytest.raises(errors.NotFound, match="nowhere"):
        memory.sleep("nowhere")
    with memory.scope(tag):
        address = memory.allocate(1000)
    with pytest.raises(errors.WrongState, match=tag):
        memory.wake(tag)  # it is awake
    memory.sleep(tag)
    with pytest.raises(errors.WrongState, match="wake it first"):
        memory.sleep(tag)
    with memory.scope(tag):
        memory.free(memory.allocate(1000))  # asleep is no hindrance
    memory.free(address)
    for foreign in (address, address + 4096, 4096):
        with pytest.raises(errors.NotFound):
            memory.free(foreign)
    with pytest.raises(errors.NotFound, match="device 7"):
        memory.free(4096, device=7)
    with pytest.raises(errors.WrongState, match="no tag was begun"):
        _core.memory_end()


def test_the_c_abi_reports_failures_by_code_and_text(tag):
    library = ctypes.CDLL(_core.__file__)
    library.torpor_last_error.restype = ctypes.c_char_p
    library.tms_torch_malloc.restype = ctypes.c_void_p
    assert library.torpor_sleep(b"nowhere") != 0 and b"nowhere" in library.torpor_last_error()
    assert library.torpor_region_end() != 0 and b"no region" in library.torpor_last_error()
    assert library.torpor_region_begin(None, 1) != 0
    # As torch_memory_saver's callers do it.
    library.tms_set_current_tag(tag.encode())
    library.tms_set_interesting_region(True)
    library.tms_set_enable_cpu_backup(True)
    address = library.tms_torch_malloc(ctypes.c_ssize_t(5000), 0, None)
    bytes_at(address, 5000)[:] = b"q" * 5000
    assert library.tms_pause(tag.encode()) == 0 and library.tms_resume(tag.encode()) == 0
    assert bytes(bytes_at(address, 5000)) == b"q" * 5000
    library.tms_set_interesting_region(False)
    assert (
        library.tms_torch_malloc(ctypes.c_ssize_t(5000), 0, None) is None
        and b"outside of a region" in library.torpor_last_error()
    )
    library.tms_torch_free(ctypes.c_void_p(address), ctypes.c_ssize_t(5000), 0, None)
    assert library.torpor_region_end() == 0


def test_what_vllm_asks_of_a_sleep_mode_backend():
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

    from torpor.vllm import plugin

    plugin.register()
    backend = SleepModeBackendFactory.get_backend_class("torpor")()
    addresses = {}
    for name in ("weights", "kv_cache", "runtime", "cudagraph", "scratch"):
        with memory.scope(name, engine=True):
            addresses[name] = memory.allocate(70_000)
        bytes_at(addresses[name], 70_000)[:] = name[0].encode() * 70_000

    def has_content(name):
        return bytes(bytes_at(addresses[name], 70_000)) == name[0].encode() * 70_000

    def awake():
        return {
            name
            for name, held in memory.ledger()[0]["tags"].items()
            if name in addresses and held["state"] == "attached"
        }

    backend.suspend(1)
    assert backend.state() == "SUSPENDED" and awake() == set()
    backend.resume(["weights"])  # and all that may not be deferred
    assert awake() == {"weights", "runtime", "cudagraph", "scratch"}
    backend.resume(["kv_cache"])
    assert awake() == set(addresses) and backend.state() == "RUNNING"
    assert [name for name in addresses if has_content(name)] == ["weights", "runtime", "cudagraph"]
    backend.discard(("kv_cache",))
    assert awake() == set(addresses) - {"kv_cache"}
    backend.suspend(2)
    backend.resume()
    assert [name for name in addresses if has_content(name)] == ["runtime", "cudagraph"]
    with pytest.raises(errors.WrongState):
        backend.suspend(7)
    for address in addresses.values():
        memory.free(address)


def test_memory_of_a_program_takes_the_options_of_its_engine(tag):
    with memory.scope(tag):
        address = memory.allocate(70_000)
    _core.memory_of(0, {"arena_budget_bytes": 1 << 40})
    assert memory.ledger()[0]["arena_budget_bytes"] == 1 << 40
    memory.free(address)


def test_an_engine_and_its_program_leave_the_memory_of_the_other_alone(tag):
    from torpor.torch_memory_saver import torch_memory_saver
    from torpor.vllm import gpu_allocator

    allocator = gpu_allocator.TorporAllocator()
    usage = allocator.get_current_usage()
    addresses = []
    for name, of_engine in (("kv_cache", True), (tag, False)):
        with memory.scope(name, engine=of_engine):
            addresses.append(memory.allocate(70_000))

    def states() -> tuple[str, str]:
        tags = memory.ledger()[0]["tags"]
        return tags["kv_cache"]["state"], tags[tag]["state"]

    assert allocator.get_current_usage() == usage + 70_000
    torch_memory_saver.pause()
    assert states() == ("attached", "detached")
    with pytest.raises(errors.WrongState, match="nothing is attached"):
        memory.sleep()
    allocator.sleep()
    torch_memory_saver.resume()
    assert states() == ("detached", "attached")
    with pytest.raises(errors.WrongState, match="nothing is detached"):
        memory.wake()
    allocator.wake_up()
    assert states() == ("attached", "attached")
    memory.sleep(tag, "kv_cache")  # by their names
    memory.wake(tag, "kv_cache")
    for name, of_engine, whose in (("kv_cache", False, "an engine"), (tag, True, "a region of this program")):
        with (
            pytest.raises(errors.WrongState, match=f'"{name}" has memory of {whose}'),
            memory.scope(name, engine=of_engine),
        ):
            pass
    with pytest.raises(errors.Unsupported, match="another engine of this process"):
        gpu_allocator.check_alone(0)
    memory.free(addresses[0])
    with memory.scope("kv_cache"):  # the engine has ended
        addresses[0] = memory.allocate(70_000)
    with pytest.raises(errors.Unsupported, match="has a region with the tag 'kv_cache'"):
        gpu_allocator.check_alone(0)
    memory.sleep()
    assert states() == ("detached", "detached")
    for address in addresses:
        memory.free(address)


def test_what_vllms_graphs_hold_is_of_a_tag_too(monkeypatch):
    """Real here: vLLM's condition and its capture_pool(), torpor's answer to both, and memory of the tag "cudagraph".

    Not real: torch's pool is only an id. That torch takes its memory from it, and that a graph runs after a wake, is
    not shown; both need a GPU.
    """
    from types import SimpleNamespace

    import torch
    from vllm.compilation import cudagraph_pool
    from vllm.config import CUDAGraphMode, VllmConfig
    from vllm.platforms import current_platform

    from torpor.vllm import patches
    from torpor.vllm.patching import Patches
    from torpor.vllm.gpu_allocator import TorporAllocator

    monkeypatch.setattr(
        VllmConfig, "use_cumem_cudagraph_pool", VllmConfig.use_cumem_cudagraph_pool
    )  # put back at the end
    monkeypatch.setattr(cudagraph_pool, "get_mem_allocator_instance", cudagraph_pool.get_mem_allocator_instance)
    monkeypatch.setattr(type(current_platform), "is_cuda_alike", lambda self: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch._C, "_cuda_customAllocator", lambda malloc, free: None, raising=False)

    class MemPool:
        id = (7, 1)

        def __init__(self, allocator):
            pass

        def snapshot(self, include_traces: bool = True) -> list:
            return []

    monkeypatch.setattr(torch.cuda, "MemPool", MemPool)
    monkeypatch.setattr(TorporAllocator, "of_this_process", None)
    patches._graph_pool(Patches())

    def used(**options):
        model = SimpleNamespace(
            **(
                {"sleep_mode_backend": "torpor", "enable_sleep_mode": True, "sleep_mode_offload_cudagraph": True}
                | options
            )
        )
        config = SimpleNamespace(
            model_config=model, compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL)
        )
        return VllmConfig.use_cumem_cudagraph_pool.fget(config)

    from vllm.v1.worker import lora_model_runner_mixin

    assert used() and used(sleep_mode_backend="cumem")
    assert (
        not used(enable_sleep_mode=False)
        and not used(sleep_mode_offload_cudagraph=False)
        and not used(sleep_mode_backend="other")
    )
    TorporAllocator.get_instance()
    if hasattr(lora_model_runner_mixin, "get_mem_allocator_instance"):  # vLLM 0.33
        assert lora_model_runner_mixin.get_mem_allocator_instance() is TorporAllocator.of_this_process
    with cudagraph_pool.capture_pool(None, SimpleNamespace(use_cumem_cudagraph_pool=True)) as pool:
        assert pool == (7, 1)
        address = memory.allocate(5000)
    bytes_at(address, 5000)[:] = b"g" * 5000
    assert memory.ledger()[0]["tags"]["cudagraph"]["state"] == "attached"
    memory.sleep("cudagraph", keep=("cudagraph",))
    memory.wake("cudagraph")
    assert bytes(bytes_at(address, 5000)) == b"g" * 5000
    memory.free(address)


@pytest.mark.parametrize(
    "name",
    [
        "TORPOR_CUDA_GATHER_BELOW_BYTES",
        "TORPOR_ARENA_BUDGET_BYTES",
        "TORPOR_ARENA_PREFAULT_BYTES",
        "TORPOR_ARENA_KEEP_BYTES",
    ],
)
def test_sizes_in_the_environment_must_be_numbers(name):
    code = (
        "from torpor import errors, memory\n"
        "try:\n    memory.allocate(1)\nexcept errors.Error as problem:\n    print(problem)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {name: "32k"}, capture_output=True, text=True, timeout=600
    )
    assert name in done.stdout and "number of bytes" in done.stdout, done.stdout + done.stderr


def test_the_arena_has_a_budget_and_keeps_what_it_may():
    code = """
from torpor import errors, memory
with memory.scope("a"):
    memory.allocate(20 << 20)
memory.sleep("a"), memory.wake("a")
print("held", memory.ledger()[0]["arena_held_bytes"] >= 20 << 20)
with memory.scope("b"):
    memory.allocate(200 << 20)
try:
    memory.sleep()
except errors.NotEnoughRoom as problem:
    print("refused", "budget" in str(problem), {held["state"] for held in memory.ledger()[0]["tags"].values()})
"""
    environment = {
        "TORPOR_MEMORY_DEVICE": "host",
        "TORPOR_ARENA_KEEP_BYTES": str(1 << 30),
        "TORPOR_ARENA_BUDGET_BYTES": str(128 << 20),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, timeout=600
    )
    assert done.stdout.splitlines() == ["held True", "refused True {'attached'}"], done.stdout + done.stderr


CHILD = """
import os, sys
from torpor import errors, memory
address = memory.allocate(1000)
if os.fork() == 0:
    for work in (lambda: memory.sleep(), lambda: memory.allocate(1000), lambda: memory.free(address)):
        try:
            work()
            os._exit(1)
        except errors.WrongState as problem:
            if "forked" not in str(problem):
                os._exit(2)
    os._exit(0)
_, status = os.wait()
memory.sleep()
memory.wake()
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_is_refused_by_name():
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        env=os.environ | {"TORPOR_MEMORY_DEVICE": "host"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr


def test_a_forked_child_that_has_such_memory_ends_as_any_process():
    code = """
import os, sys
from torpor import _core
memory = _core.RankMemory({})
memory.allocate("weights", "w", 1 << 20)
if os.fork() == 0:
    del memory
    sys.exit(5)
_, status = os.wait()
assert os.waitstatus_to_exitcode(status) == 5, status
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_kept_backups_of_weights_are_not_copied_again_unless_something_changed():
    code = """
import ctypes
from torpor import memory
with memory.scope("weights"):
    address = memory.allocate(1 << 20)
assert memory.sleep("weights")["copied_bytes"] == 1 << 20
memory.wake()
again = memory.sleep("weights")
assert (again["copied_bytes"], again["clean_bytes"]) == (0, 1 << 20), again
memory.wake()
ctypes.memset(address, 7, 100)
memory.mark_dirty("weights")
assert memory.sleep("weights")["copied_bytes"] == 1 << 20
memory.wake()
ctypes.memset(address, 9, 100)
assert memory.sleep("weights", check=True)["copied_bytes"] == 1 << 20  # nobody said so, its digest did
memory.wake()
assert memory.sleep("weights", check=True)["copied_bytes"] == 0
memory.wake()
assert ctypes.string_at(address, 101) == bytes([9]) * 100 + bytes(1)
with memory.scope("other"):
    address = memory.allocate(1 << 20)
for value in (1, 2, 3):
    ctypes.memset(address, value, 100)  # nobody says so
    assert memory.sleep("other")["copied_bytes"] == 1 << 20
    memory.wake("other")
    assert ctypes.string_at(address, 1) == bytes([value])
assert memory.sleep("other", check=True)["copied_bytes"] == 0
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"TORPOR_MEMORY_DEVICE": "host", "TORPOR_KEEP_BACKUPS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr


def test_without_a_gpu_the_gpu_is_refused_with_what_is_missing():
    code = "from torpor import memory; memory.allocate(1000)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={k: v for k, v in os.environ.items() if k != "TORPOR_MEMORY_DEVICE"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    if done.returncode == 0:
        pytest.skip("there is a GPU here")
    assert "Unsupported" in done.stderr and ("NVIDIA driver" in done.stderr or "without CUDA" in done.stderr)


def test_torchs_cache_is_emptied_for_a_sleep_even_if_no_pool_was_ever_retired(monkeypatch):
    """What torch keeps outside of regions is memory that a wake may need."""
    import torch

    emptied = []
    monkeypatch.setattr(memory, "_retired", {})
    for name, call in (
        ("is_available", lambda: True),
        ("is_current_stream_capturing", lambda: bool(emptied)),
        ("empty_cache", lambda: emptied.append(1)),
    ):
        monkeypatch.setattr(torch.cuda, name, call, raising=False)
    memory.release_unused("weights")
    assert emptied == []
    memory.release_unused()
    assert emptied == [1]
    memory.release_unused()  # a capture forbids it
    assert emptied == [1]
