# SPDX-License-Identifier: Apache-2.0
"""Starts processes that use vLLM in a fraction of a second: they are forked from one that has imported it, the zygote.

    zygote = Zygote()                                      # starts `python zygote.py FD`, which imports vLLM once
    process = zygote.popen(["script.py", "an argument"], env=…, stdout=file, stderr=file)
    process = zygote.popen(["-m", "torpor.vllm.serve", …], …)

The zygote has one thread and has made nothing but imports (prepared.py): no engine, no event loop, no memory of torpor.
A process that it forks gets its own environment, directory, files and arguments, and runs its script as `__main__`.
Where such a process starts further ones with multiprocessing's "spawn", as vLLM does for engine cores and workers,
those are forked too, from a sibling of the zygote that stays beside it; multiprocessing hands them their work as to a
new interpreter.

A forked process becomes a child of the one that asked for it: the zygote forks twice, and who asks is a subreaper
(prctl(2)) and so inherits the orphan. It can be waited for and killed like any child.

A lane of tests ("-m pytest …") can be forked too: it has vLLM from its start, and shared() is its sibling. What is
spawned in it is a real new interpreter, but within Zygote.spawning().

What an interpreter reads once, at its start, is the zygote's: the module path (what PYTHONPATH has more of comes before
it, and a `sitecustomize` there is imported), the hash seed, and the variables of ENVIRONMENT that libraries look at
when they are loaded.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import functools
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from multiprocessing import util
from pathlib import Path

# Of all tests, before vLLM is imported.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING",
    "PYTHONHASHSEED": "0", "VLLM_NO_USAGE_STATS": "1",
    "TORPOR_CHECK_FILE_CALLS": "1",  # of a thread that holds the interpreter's lock: none (bindings/module_files.h)
    "TORPOR_CHECK_CAPTURE": "1",  # what is kept of requests is what is read anew (bindings/python/torpor/vllm/kept.py)
    "TORCH_COMPILE_DISABLE": "1",  # vLLM compiles small functions of its sampler when they are first used: seconds each
}  # fmt: skip

FORKED = "TORPOR_TEST_FORKED"  # the variable
_SIBLING = "TORPOR_TEST_SIBLING"  # in a forked lane: the file descriptor on which its sibling takes orders

_LOGGING_LEVEL = os.environ.get("VLLM_LOGGING_LEVEL")  # by which vLLM set up its logger when it was imported

_PR_SET_CHILD_SUBREAPER = 36
_MAX_ORDER_BYTES = 1 << 17
MOST_SECONDS = 600  # that something may take that a correct program does: it ends a test that hangs, and no slow one
_asking = threading.Lock()


class Process:
    """A forked process; has what the tests use of subprocess.Popen."""

    def __init__(self, pid: int):
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        if timeout is None:
            return self._reap(0)
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(0.005)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _reap(self, flags: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, flags)
            if pid == self.pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class Zygote:
    """Of the process that starts it, and of its threads."""

    def __init__(
        self,
        python: Path | str = sys.executable,
        env: dict | None = None,
        *,
        sibling: int | None = None,
        with_torpor: bool = False,
    ):
        """`with_torpor`: it has imported torpor too. Not where processes have one of their own."""
        _adopt_orphans()
        self._process: subprocess.Popen | None = None
        if sibling is not None:
            self._orders = socket.socket(fileno=sibling)
            return
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [python, __file__, str(theirs.fileno()), *(["torpor"] if with_torpor else [])]
            self._process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])

    def popen(
        self, words: list, *, env: dict | None = None, cwd: Path | None = None, stdout=None, stderr=None
    ) -> Process:
        """`words` is what follows `python` on a command line; None stands for what this process has."""
        environment = dict(os.environ if env is None else env)
        order = {"words": [str(word) for word in words], "env": environment, "cwd": str(cwd or Path.cwd())}
        files = [file if isinstance(file, int) else file.fileno() for file in (stdout or 1, stderr or 2)]
        return Process(_ask(self._orders, order, dict(zip((1, 2), files, strict=True))))

    def run(
        self, words: list, *, timeout: float = MOST_SECONDS, env: dict | None = None, cwd: Path | None = None
    ) -> subprocess.CompletedProcess:
        """As subprocess.run() with its output captured as text."""
        text = {"mode": "w+", "errors": "replace"}
        with tempfile.TemporaryFile(**text) as out, tempfile.TemporaryFile(**text) as err:
            process = self.popen(words, env=env, cwd=cwd, stdout=out, stderr=err)
            try:
                process.wait(timeout)
            except BaseException:
                process.kill()
                process.wait()
                raise
            for file in (out, err):
                file.seek(0)
            return subprocess.CompletedProcess(words, process.returncode, out.read(), err.read())

    @contextlib.contextmanager
    def spawning(self):
        """Meanwhile what this process starts by multiprocessing's "spawn" is forked from the zygote."""
        stock = util.spawnv_passfds
        _fork_what_is_spawned(self._orders)
        try:
            yield
        finally:
            util.spawnv_passfds = stock

    def close(self) -> None:
        self._orders.close()
        if self._process is not None:
            self._process.wait(timeout=MOST_SECONDS)


@functools.cache
def shared() -> Zygote:
    """One for all tests of this process; ends with it."""
    sibling = os.environ.pop(_SIBLING, None)
    return Zygote(env=os.environ | ENVIRONMENT, with_torpor=True) if sibling is None else Zygote(sibling=int(sibling))


_ended: set = set()  # of psutil.Process: children that had ended at the last call of wait_for_orphans()


def wait_for_orphans() -> None:
    """Wait for children that had ended at the last call already. The tests call this after each file.

    They are what the processes of tests had started, and no test waits for them. Otherwise more than a thousand pile
    up, and who looks through all processes, as vLLM does to end an engine, takes ever longer.
    """
    import psutil

    now = set()
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.status() == psutil.STATUS_ZOMBIE:
                now.add(child)
    for child in now & _ended:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child.pid, os.WNOHANG)
    _ended.clear()
    _ended.update(now)


# --- both sides ---


def _adopt_orphans() -> None:
    """Orphans among this process's descendants become its children."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def _ask(orders: socket.socket, order: dict, files: dict[int, int]) -> int:
    """Has a process forked in which the file descriptors `files` (there: here) are open. Returns its id."""
    content = json.dumps(order | {"fds": list(files)}).encode()
    assert len(content) < _MAX_ORDER_BYTES
    with _asking:
        orders.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MAX_ORDER_BYTES)
        socket.send_fds(orders, [content], list(files.values()))
        answer = orders.recv(100)
    if not answer:
        raise RuntimeError("the zygote has ended; its output says why")
    return int(answer)


def _fork_what_is_spawned(orders: socket.socket) -> None:
    stock = util.spawnv_passfds

    def spawnv_passfds(path, words, passfds):
        words = [os.fsdecode(word) for word in words]
        if "--multiprocessing-fork" not in words:
            return stock(path, words, passfds)  # multiprocessing's resource tracker: it imports next to nothing
        code = words[words.index("-c") + 1]
        files = {fd: fd for fd in (1, 2, *passfds)}
        order = {"words": ["-c", code, "--multiprocessing-fork"], "env": dict(os.environ), "cwd": os.getcwd()}
        return _ask(orders, order, files)

    util.spawnv_passfds = spawnv_passfds


def _fork_what_is_started(orders: socket.socket, times: int) -> None:
    stock = subprocess._fork_exec
    left = times

    def fork_exec(command, executables, close_fds, kept, cwd, env, *files_and_more):
        nonlocal left
        words = [os.fsdecode(word) for word in command]
        if not left or words[0] != sys.executable or (words[1][0] == "-" and words[1] not in ("-c", "-m")):
            return stock(command, executables, close_fds, kept, cwd, env, *files_and_more)
        left -= 1
        stdin, _, _, stdout, _, stderr, _, errors_of_exec, *_ = files_and_more
        files = {there: there if here == -1 else here for there, here in enumerate((stdin, stdout, stderr))}
        files |= {fd: fd for fd in kept if fd != errors_of_exec}
        given = os.environ if env is None else dict(os.fsdecode(each).split("=", 1) for each in env)
        given = {name: value for name, value in given.items() if name != FORKED}
        return _ask(orders, {"words": words[1:], "env": given, "cwd": cwd or os.getcwd()}, files)

    subprocess._fork_exec = fork_exec


# --- the zygote ---


def _serve(orders: socket.socket) -> dict | None:
    """Forks as it is told until the other side is gone. In a forked process it returns that process's order."""
    while True:
        content, fds, _, _ = socket.recv_fds(orders, _MAX_ORDER_BYTES, 64)
        if not content:
            return None
        said, saying = os.pipe()
        middle = os.fork()
        if middle == 0:
            parent = os.getpid()
            child = os.fork()
            if child == 0:
                while os.getppid() == parent:  # soon it is the one that asked
                    time.sleep(0.001)
                order = json.loads(content)
                orders.close()
                os.close(said)
                os.close(saying)
                _open_at(dict(zip(order["fds"], fds, strict=True)))
                return order
            os.write(saying, str(child).encode())
            os._exit(0)
        os.waitpid(middle, 0)  # from here on the child is an orphan, and so the caller's
        orders.send(os.read(said, 100))
        for fd in (said, saying, *fds):
            os.close(fd)


def _open_at(files: dict[int, int]) -> None:
    """Moves open files to other numbers, which may be those of one another."""
    above = max([*files, *files.values(), 2]) + 1
    aside = {}
    for there, here in files.items():
        aside[there] = fcntl.fcntl(here, fcntl.F_DUPFD_CLOEXEC, above)
        os.close(here)
    for there, fd in aside.items():
        os.dup2(fd, there, inheritable=there <= 2)
        os.close(fd)
    if 0 not in files:
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)


def _become(order: dict) -> None:
    """What a new interpreter would have from its parent."""
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    paths = filter(None, order["env"].get("PYTHONPATH", "").split(os.pathsep))
    more = [path for path in paths if path not in sys.path]
    sys.path[:0] = more
    if any((Path(path) / "sitecustomize.py").exists() for path in more):
        sys.modules.pop("sitecustomize", None)
        __import__("sitecustomize")
    sys.stdout.reconfigure(line_buffering=True)
    _adopt_orphans()
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:  # the sibling; what this lane was given is not for those that it forks
        mine.close()
        for fd in order["fds"]:
            if fd > 2:
                os.close(fd)
        if (order := _serve(theirs)) is None:
            os._exit(0)
        _become(order)
        _run(order["words"])
    theirs.close()
    if order["words"][:2] == ["-m", "pytest"]:
        os.environ[_SIBLING] = str(mine.detach())
    else:
        _fork_what_is_spawned(mine)
    if FORKED in order["env"]:
        _fork_what_is_started(mine, int(order["env"][FORKED]))
    gc.enable()
    if os.environ.get("VLLM_LOGGING_LEVEL") != _LOGGING_LEVEL:
        from vllm.logger import _configure_vllm_root_logger

        _configure_vllm_root_logger()  # by the environment that has just come


def _run(words: list[str]) -> None:
    """As `python WORDS` would; ends the process."""
    code = 1
    try:
        first, *rest = words
        sys.modules["__main__"] = types.ModuleType("__main__")
        if first == "-c":
            sys.argv = ["-c", *rest[1:]]
            exec(rest[0], vars(sys.modules["__main__"]))
        elif first == "-m":
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(first).parent))
            runpy.run_path(first, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            threading._shutdown()
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def main() -> None:
    import prepared
    import setproctitle  # of vLLM: its processes are known by their titles

    orders = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()
    prepared.import_vllm()
    prepared.prepare(with_torpor="torpor" in sys.argv[2:])
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads: what is forked now could wait for their locks for ever"
    setproctitle.getproctitle()  # looks for the title's place, which is found only while the environment is as it was
    gc.collect()
    gc.freeze()  # what is here now is not looked at again by any forked process,
    gc.unfreeze_all = gc.unfreeze  # for who must see all
    gc.unfreeze = lambda: None  # not even when an engine ends, where vLLM has everything looked at three times
    sys.path.remove(str(Path(__file__).parent))
    with contextlib.suppress(KeyboardInterrupt):
        if (order := _serve(orders)) is not None:
            _become(order)
            _run(order["words"])
    os._exit(0)  # nothing to tidy up; ending all that was imported takes a second


if __name__ == "__main__":
    main()
