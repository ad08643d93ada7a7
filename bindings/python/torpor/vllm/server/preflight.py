# SPDX-License-Identifier: Apache-2.0
"""The check before the engine starts: what a server would fail on after loading its model, it fails on at once.

check() raises for the port or socket, the file descriptors, the key file and the directory: its owner and mode, whether
it can be written, its lock. It logs in one line what the server will do. Damage of a checkpoint, or another key, it
only logs: the start decides about that (--torpor-on-wake-error), and /torpor/ready has it then. check() holds nothing
when it is over.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from argparse import Namespace

from vllm.logger import init_logger

from torpor import _core
from torpor.errors import Busy, Damaged, Error, Incompatible, InvalidArgument, NotFound, Unauthenticated
from torpor.vllm.options import Options
from torpor.vllm.server import listening, unlogged
from torpor.vllm.server.access import Access, client_keys
from torpor.vllm.server.settings import Settings

logger = init_logger("vllm.torpor")  # vLLM sets up only what is below its own name

# What is in a file, not whether it may be used: the start has an option for that.
_OF_CONTENT = (Damaged, Incompatible, Unauthenticated)


def check(args: Namespace, options: Options, settings: Settings) -> None:
    """Raise what would end the start, and log what the server will do."""
    _check_port(args)
    if settings.listen_fd > 0:
        listening.socket_of(settings.listen_fd).detach()
    if settings.state_fd > 0:
        listening.check_pipe(settings.state_fd)
    keys = _keys(args, settings)
    if options.encrypt and not options.key_file:
        raise InvalidArgument("encrypt without key_file", "name a file with a key: --torpor-key-file")
    if options.wake_latest:
        raise InvalidArgument("wake_latest", "leave it out: a server wakes its newest checkpoint when it starts")
    if not options.checkpoint_dir:
        logger.warning(
            "torpor: no --torpor-checkpoint-dir: nothing outlives this process, and SIGTERM ends the streams of "
            "clients; %s", keys,
        )  # fmt: skip
        return
    if settings.standby_of:  # the directory is its owner's, its lock too
        logger.info(
            "torpor: standby of %s: waits to take over from its owner; %s; %s; %s",
            settings.standby_of, _sealing(options), keys, _drain(settings),
        )  # fmt: skip
        return
    answers = _answers(options.checkpoint_dir, options, settings)
    found = _checkpoint(options.checkpoint_dir, options, settings)
    logger.info(
        "torpor: directory %s: %s, %s; %s; %s; %s",
        options.checkpoint_dir, found, answers, _sealing(options), keys, _drain(settings),
    )  # fmt: skip


def _check_port(args: Namespace) -> None:
    if getattr(args, "uds", None):
        return _free_socket(args.uds)
    host, port = args.host or "", args.port
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as vLLM's
        try:
            trial.bind((host, port))
        except OSError as problem:
            if problem.errno == errno.EADDRINUSE:
                raise Busy(f"port {port} is in use", "end what listens there, or choose another --port") from None
            where = f"{host}:{port}" if host else f"port {port}"
            raise InvalidArgument(f"cannot listen on {where}: {problem.strerror}", "see --host and --port") from None


def _free_socket(path: str) -> None:
    """Remove the socket of a server that has ended, which nobody removes: vLLM could not bind there again."""
    try:
        found = os.lstat(path)
    except OSError:  # there is none, or vLLM says what is wrong with the path
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise InvalidArgument(f"--uds {path}: there is a file that is no socket", "remove it, or choose another path")
    if _is_bound(path):
        raise Busy(f"the socket {path} is in use", "end what listens there, or choose another --uds")
    if found.st_uid != os.geteuid():
        raise InvalidArgument(
            f"--uds {path}: another user has left this socket", "remove it as that user, or choose another path"
        )
    os.unlink(path)


def _is_bound(path: str) -> bool:
    """Return whether a process has the socket, one too that does not listen yet, as while it loads its model."""
    with socket.socket(socket.AF_UNIX) as trial:
        trial.setblocking(False)
        try:
            trial.connect(path)
        except ConnectionRefusedError:
            pass
        except BlockingIOError:  # more clients wait there than it takes
            return True
        except OSError as problem:
            raise InvalidArgument(f"--uds {path}: {problem.strerror}", "choose another path") from None
        else:
            return True
    with open("/proc/net/unix", "rb") as bound:
        return any(line.rstrip(b"\n").split(None, 7)[7:] == [os.fsencode(path)] for line in bound)


def _keys(args: Namespace, settings: Settings) -> str:
    clients, admin = client_keys(args), settings.admin()
    if clients and admin:
        Access.of(args, settings)  # raises if they are the same
        return "keys of clients and of the admin"
    return "keys of clients" if clients else "key of the admin" if admin else "no keys"


def _answers(directory: str, options: Options, settings: Settings) -> str:
    """Return how many answers still run by the response log. Make the directory, and take its lock for a moment."""
    folder = os.path.join(directory, "answers")
    discard = settings.on_wake_error == "discard"
    log: dict = {
        "directory": folder, "engine": {}, "key_file": options.key_file, "encrypt": options.encrypt,
        "other_engine": "set_aside" if discard else "take_up",  # which engine this is, is not known yet
    }  # fmt: skip
    try:
        running = _core.DeliveryLog.count_running(log)
    except _OF_CONTENT as problem:
        _announce("the response log", problem, settings)
        return "a response log that cannot be used"
    if settings.response_log == "off":
        unlogged.refuse_to_lose(running, folder)
        return "no response log"
    return f"{_counted(running, 'running answer')} in the response log"


def _checkpoint(directory: str, options: Options, settings: Settings) -> str:
    """Return which checkpoint the start will wake."""
    try:
        where = settings.wake_from
        if not where:
            checkpoints = _core.list_checkpoints(directory, options.key_file)
            if not checkpoints:
                store = settings.object_store
                return f"no checkpoint but what {store} may have" if store else "no checkpoint"
            where = checkpoints[-1]["path"]
        requests = _core.read_checkpoint(where, options.key_file).to_dict()["scheduler"]["requests"]
    except (*_OF_CONTENT, NotFound) as problem:
        _announce("the checkpoint", problem, settings)
        return "a checkpoint that cannot be used"
    return f"checkpoint {where} with {_counted(len(requests), 'request')}"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _announce(what: str, problem: Error, settings: Settings) -> None:
    then = {
        "fail": "the server will not be ready",
        "recompute": "requests will be computed again",
        "discard": "the server will go on without",
    }[settings.on_wake_error]
    logger.error("torpor: %s cannot be used, so %s: %s", what, then, problem)


def _sealing(options: Options) -> str:
    if not options.key_file:
        return "not sealed"
    return f"{'encrypted' if options.encrypt else 'sealed'} with {options.key_file}"


def _drain(settings: Settings) -> str:
    if settings.on_sigterm == "checkpoint":
        return f"on SIGTERM a checkpoint within {settings.sigterm_seconds:g} s"
    again = "running answers are computed again" if settings.response_log == "on" else "running requests are lost"
    return f"on SIGTERM no checkpoint: {again}"
