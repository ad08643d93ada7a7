# SPDX-License-Identifier: Apache-2.0
"""torch_memory_saver's interface over torpor.memory, without a GPU."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torpor import _core, errors

os.environ["TORPOR_MEMORY_DEVICE"] = "host"

from torpor import memory


@pytest.fixture
def tag(request):
    return request.node.name


def bytes_at(address: int, size: int):
    return (ctypes.c_ubyte * size).from_address(address)


def states(*tags: str) -> list[str]:
    held = memory.ledger()[0]["tags"]
    return [held[tag if tag in held else f"{tag} (not kept)"]["state"] for tag in tags]


def test_torch_memory_saver_pauses_and_resumes_as_the_original_does(tag):
    from torpor.torch_memory_saver import torch_memory_saver

    first, second = f"{tag} 1", f"{tag} 2"
    with memory.scope(first):
        one = memory.allocate(5000)
    with memory.scope(second, keep=False):
        two = memory.allocate(5000)
    bytes_at(one, 5000)[:] = b"1" * 5000
    torch_memory_saver.pause()  # all
    assert states(first, second) == ["detached", "detached"]
    torch_memory_saver.pause()  # nothing is left to pause
    torch_memory_saver.resume()
    assert states(first, second) == ["attached", "attached"] and bytes(bytes_at(one, 5000)) == b"1" * 5000
    torch_memory_saver.resume()
    torch_memory_saver.pause("nobody ever used this tag")
    torch_memory_saver.resume("nobody ever used this tag")
    assert states(first, second) == ["attached", "attached"]
    torch_memory_saver.pause(first)
    assert states(first, second) == ["detached", "attached"]
    with pytest.raises(errors.WrongState):  # the original ends the process
        torch_memory_saver.pause(first)
    torch_memory_saver.pause(tag=None)  # the rest
    assert states(first, second) == ["detached", "detached"]
    torch_memory_saver.resume(second)
    assert states(first, second) == ["detached", "attached"]
    torch_memory_saver.resume("")  # the original takes the empty tag for none
    assert states(first, second) == ["attached", "attached"]
    memory.free(one)
    memory.free(two)


def test_regions_of_torch_memory_saver_take_the_originals_arguments(tag, monkeypatch):
    """As far as it goes without a GPU: which scope and which pool, with pools that are only names."""
    from contextlib import contextmanager

    import torch

    from torpor.torch_memory_saver import TorchMemorySaver

    made, used = [], []

    @contextmanager
    def use_mem_pool(pool):
        used.append(pool)
        yield

    monkeypatch.setattr(memory, "new_pool", lambda: made.append(len(made)) or made[-1])
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use_mem_pool)
    saver = TorchMemorySaver()
    with saver.region(tag, enable_cpu_backup=True, cpu_backup_backend="pinned"):
        kept = memory.allocate(5000)
        with saver.region(tag=tag):
            dropped = memory.allocate(5000)
        inside_again = memory.allocate(5000)
    with saver.region(tag, True):
        pass
    assert used == [0, 1, 0]  # one pool for a tag and a kind of backup
    for address in (kept, dropped, inside_again):
        bytes_at(address, 5000)[:] = b"x" * 5000
    saver.pause(tag)
    saver.resume(tag)
    assert [bytes(bytes_at(address, 1)) for address in (kept, dropped, inside_again)] == [b"x", b"\0", b"x"]
    for address in (kept, dropped, inside_again):
        memory.free(address)


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ({"enable_cpu_backup": True, "enable_disk_backup": True}, ValueError, "mutually exclusive"),
        ({"cpu_backup_backend": "pinned"}, ValueError, "enable_cpu_backup=True"),
        ({"enable_cpu_backup": True, "cpu_backup_backend": "mmap"}, errors.Unsupported, "mmap"),
        ({"enable_disk_backup": True}, errors.Unsupported, "on disk"),
    ],
)
def test_what_torch_memory_saver_refuses_or_torpor_does_not_offer_is_named(arguments, error, named):
    from torpor.torch_memory_saver import torch_memory_saver

    with pytest.raises(error, match=named), torch_memory_saver.region("t", **arguments):
        pass


def test_a_backup_of_torch_memory_saver_can_be_read_while_its_memory_is_paused(tag):
    """A tensor inside a region of several pieces, as torch's pool cuts them; without a GPU, so its address is given."""
    from types import SimpleNamespace

    import torch

    from torpor.torch_memory_saver import torch_memory_saver

    size = 9 << 20
    with memory.scope(tag):
        kept = memory.allocate(size)
    with memory.scope(tag, keep=False):
        dropped = memory.allocate(5000)
    expected = torch.arange(size // 4, dtype=torch.int32)
    ctypes.memmove(kept, expected.data_ptr(), size)

    def tensor(address, first, count):
        return SimpleNamespace(
            data_ptr=lambda: address + 4 * first,
            is_contiguous=lambda: True,
            nbytes=4 * count,
            dtype=torch.int32,
            shape=(2, count // 2),
        )

    across = tensor(kept, (4 << 20) // 4 - 10, (4 << 20) // 4 + 20)  # over two borders between pieces
    assert torch_memory_saver.get_cpu_backup(across) is None  # it is awake
    torch_memory_saver.pause(tag)
    read = torch_memory_saver.get_cpu_backup(across, zero_copy=True)
    first = (4 << 20) // 4 - 10
    assert torch.equal(read, expected[first : first + (4 << 20) // 4 + 20].view(2, -1))
    assert torch_memory_saver.get_cpu_backup(tensor(dropped, 0, 100)) is None
    assert torch_memory_saver.get_cpu_backup(tensor(kept, size // 4 - 10, 20)) is None  # beyond its end
    library = ctypes.CDLL(_core.__file__)
    library.tms_get_cpu_backup_pointer.restype = ctypes.c_void_p
    pointer = library.tms_get_cpu_backup_pointer(ctypes.c_void_p(kept + 400), ctypes.c_uint64(8))
    assert ctypes.string_at(pointer, 8) == bytes(expected[100:102].numpy())
    assert library.tms_get_cpu_backup_pointer(ctypes.c_void_p(dropped), ctypes.c_uint64(8)) is None
    torch_memory_saver.resume(tag)
    assert torch_memory_saver.get_cpu_backup(across) is None
    memory.free(kept)
    memory.free(dropped)


def test_the_c_names_of_torch_memory_saver_are_all_there_and_refuse_what_is_not_offered(tag):
    library = ctypes.CDLL(_core.__file__)
    library.torpor_last_error.restype = library.tms_get_cpu_backup_backend.restype = ctypes.c_char_p
    library.tms_torch_malloc.restype = ctypes.c_void_p
    library.tms_get_retain_cpu_backup.restype = library.tms_get_enable_disk_backup.restype = ctypes.c_bool
    library.tms_set_cpu_backup_backend(b"mmap")
    assert b"mmap" in library.torpor_last_error() and library.tms_get_cpu_backup_backend() == b"pinned"
    library.tms_set_disk_backup_dir(b"/tmp")
    assert b"on disk" in library.torpor_last_error()
    library.tms_set_current_tag(tag.encode())
    library.tms_set_interesting_region(True)
    library.tms_set_enable_disk_backup(True)
    assert library.tms_get_enable_disk_backup()
    assert library.tms_torch_malloc(ctypes.c_ssize_t(5000), 0, None) is None
    assert b"on disk" in library.torpor_last_error()
    assert library.torpor_region_end() == 0
    memory.free(memory.allocate(1))  # there is memory now
    assert not library.tms_get_retain_cpu_backup()
    library.tms_set_retain_cpu_backup(True)
    assert b"before the first region" in library.torpor_last_error() and not library.tms_get_retain_cpu_backup()
    library.set_memory_margin_bytes(ctypes.c_uint64(0))


def test_graphs_of_torch_memory_saver_are_captured_into_a_pool_of_the_tag(tag, monkeypatch):
    from contextlib import contextmanager
    from types import SimpleNamespace

    import torch

    from torpor.torch_memory_saver import TorchMemorySaver

    asked, addresses = [], []

    @contextmanager
    def graph(*arguments, **options):
        asked.append((arguments, options))
        addresses.append(memory.allocate(5000))
        yield

    monkeypatch.setattr(memory, "new_pool", lambda: SimpleNamespace(id=(7, 1)))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    saver = TorchMemorySaver()
    with saver.cuda_graph("g", tag=tag, enable_cpu_backup=True):
        pass
    assert asked == [(("g",), {"pool": (7, 1), "stream": None, "capture_error_mode": "global"})]
    saver.pause(tag)
    saver.resume(tag)
    memory.free(addresses[0])
    with pytest.raises(errors.Unsupported, match="pool"), saver.cuda_graph("g", pool=(1, 1), tag=tag):
        pass


def test_the_rest_of_torch_memory_saver_is_there_and_says_what_is_not_offered():
    """None is taken and ignored: whoever sets it would rely on it."""
    from torpor import torch_memory_saver as module

    saver = module.TorchMemorySaver()
    saver.hook_mode = "torch"
    assert saver.hook_mode == "torch"
    for refused in (
        lambda: setattr(saver, "hook_mode", "preload"),
        lambda: saver.set_disk_backup_dir("/tmp"),
        lambda: saver.disable(dispose_mem_pool_after_use=False).__enter__(),
        lambda: module.configure_subprocess().__enter__(),  # the package is not installed here
    ):
        with pytest.raises(errors.Unsupported):
            refused()
    with pytest.raises(NotImplementedError):
        _ = saver.memory_margin_bytes


PACKAGE = """
import ctypes, subprocess, sys
from torch_memory_saver import TorchMemorySaver, configure_subprocess, torch_memory_saver as saver
from torpor import errors, memory
import torch_memory_saver
assert torch_memory_saver.__file__.startswith(sys.argv[1]), torch_memory_saver.__file__
with configure_subprocess():
    if len(sys.argv) == 2:
        subprocess.run([sys.executable, "-c", sys.stdin.read(), sys.argv[1], "child"], check=True)
saver.retain_cpu_backup = True  # before the first region
with memory.scope("weights"):                      # a sleep trusts the backup of this tag, unless asked to check
    address = memory.allocate(1000)
saver.pause("weights")
saver.resume("weights")
assert memory.saved(address, 1000) == bytes(1000)  # retained
ctypes.memset(address, 7, 1000)                    # nobody says so
saver.pause()
assert memory.saved(address, 1000) == bytes([7]) * 1000
saver.resume()
assert ctypes.string_at(address, 1000) == bytes([7]) * 1000
try:
    saver.retain_cpu_backup = False
    raise SystemExit("not refused")
except errors.WrongState:
    pass
"""


def test_a_package_of_that_name_works_in_the_processes_that_it_starts(tmp_path):
    root = Path(__file__).resolve().parents[2]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"]
    pip += ["--no-build-isolation", "--target", tmp_path, root / "bindings/torch_memory_saver"]
    subprocess.run(pip, check=True, timeout=600)
    done = subprocess.run(
        [sys.executable, "-c", PACKAGE, tmp_path],
        env=os.environ
        | {"TORPOR_MEMORY_DEVICE": "host", "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
        input=PACKAGE,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
