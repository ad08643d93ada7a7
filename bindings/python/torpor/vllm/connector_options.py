"""Options of the KV connector: kv_connector_extra_config, or torpor's own in additional_config. Strict: a wrong one is
named, and so is one that does not exist.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

from torpor.errors import InvalidArgument
from torpor.vllm.paths import expanded

MODULE, CLASS = "torpor.vllm.connector", "TorporConnector"
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_CHOICES = {
    "offload": ("eager", "lazy", "off"), "disk": ("through", "off"), "block_compression": ("none", "bf16", "zstd"),
}  # fmt: skip
_SIZES = ("host_bytes", "disk_bytes")
_PATHS = {"directory", "remote_credentials", "remote_ca"}


@dataclass(frozen=True)
class ConnectorOptions:
    # "eager": each full block goes to host memory when it was computed. "lazy": when the device is about to evict it.
    # "off": vLLM runs as without a connector.
    offload: str = "eager"
    # Host memory for KV blocks, per rank: bytes, or text such as "4GiB". torpor's host_compression packs them there.
    host_bytes: int = 0
    # Disk for KV blocks, per rank; it outlives the process.
    disk_bytes: int = 0
    # "through": what is in host memory goes on to disk in the background. "off": nothing does.
    disk: str = "off"
    # Where it lies on disk: one engine at a time.
    directory: str | None = None
    # What is on disk survives the machine's end too: but for the last second, and all of it at a sleep and at the end.
    durable: bool = False
    # Of blocks on disk and where engines share them: "bf16", lossless, of values of that type; "zstd"; "none". Whatever
    # compression a block there has, it is read.
    block_compression: str = "none"
    # Where engines share blocks: redis://HOST:PORT/NAME; rediss:// over TLS; mooncake://HOST:PORT/NAME. What goes to
    # host memory goes there, too.
    remote: str | None = None
    # A file with the password, or the user and the password; and one of certificates that are trusted.
    remote_credentials: str | None = None
    remote_ca: str | None = None
    # Of how many blocks it is remembered that they are there.
    remote_blocks: int = 1 << 18
    # What a transfer may take, and how long a request waits to hear what is there; then it goes on without.
    remote_timeout_ms: int = 2000
    remote_wait_ms: int = 100
    # A block goes to the tiers when so many requests had it.
    min_uses: int = 1
    # What the tiers have already is left out before it is queued. false: when its turn comes.
    presence: bool = True
    # Shorter hits are computed, not loaded.
    min_prefix_tokens: int = 0
    # Blocks of one transfer job: most, and how many it waits for, but no longer than flush_interval_ms.
    max_batch_size: int = 64
    min_batch_size: int = 8
    flush_interval_ms: int = 10
    # Where it takes longer to decide which blocks of a step are stored, none of them is.
    policy_timeout_ms: int = 100
    # How long what was cancelled may stay in the queue.
    sweep_interval_ms: int = 10
    # Store jobs that ranks work at, and that wait there.
    max_concurrent_transfers: int = 1
    on_deck_batches: int = 4
    # The same of loads, together.
    loading_batches: int = 64
    # Most blocks that wait to be stored; more are left out.
    queue_blocks: int = 1 << 16

    @staticmethod
    def of(given: dict, directory: str | None = None) -> ConnectorOptions:
        """`directory`: where there is none in `given`. Raises InvalidArgument."""
        known = {f.name: f for f in fields(ConnectorOptions)}
        if unknown := sorted(set(given) - known.keys()):
            raise InvalidArgument(
                f"unknown connector option {', '.join(map(str, unknown))}", f"the options are {', '.join(known)}"
            )
        values = {name: _value(name, known[name].default, item) for name, item in given.items()}
        if "disk" not in values and values.get("disk_bytes", 0) > 0:
            values["disk"] = "through"
        for name in _PATHS & values.keys():
            values[name] = expanded(values[name])
        if values.get("directory") is None and directory is not None:
            values["directory"] = f"{directory}/offload"
        options = ConnectorOptions(**values)
        options._check()
        return options

    def _check(self) -> None:
        if self.offload == "off":
            return
        if self.host_bytes == 0 and self.disk_bytes == 0:
            raise InvalidArgument("the connector has no room: host_bytes and disk_bytes are 0", "give one of them")
        if (self.disk == "through") != (self.disk_bytes > 0):
            raise InvalidArgument(f"disk is {self.disk!r} and disk_bytes is {self.disk_bytes}", "give both or neither")
        if self.remote is not None and self.host_bytes == 0:
            raise InvalidArgument("remote is given and host_bytes is 0", "give host memory: blocks go out from there")
        if self.remote is None and (self.remote_credentials is not None or self.remote_ca is not None):
            raise InvalidArgument("remote_credentials or remote_ca without remote", "give the URL, or leave them out")
        if self.disk_bytes > 0 and not self.directory:
            raise InvalidArgument("disk_bytes is given and directory is not", "give the directory, or torpor's dir")

    @property
    def disk_folder(self) -> str | None:
        """Of the tier on disk; None: there is no such tier."""
        return self.directory if self.disk_bytes > 0 else None

    def queue(self) -> dict:
        names = (
            "max_batch_size", "min_batch_size", "flush_interval_ms", "policy_timeout_ms", "sweep_interval_ms",
            "max_concurrent_transfers", "on_deck_batches", "loading_batches", "queue_blocks", "presence",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}


NAMES = tuple(f.name for f in fields(ConnectorOptions))


def _value(name: str, default, item):
    if name in _SIZES:
        return size(name, item)
    if name in _CHOICES:
        if item not in _CHOICES[name]:
            raise InvalidArgument(f"{name} is {item!r}", f"use {' or '.join(map(repr, _CHOICES[name]))}")
        return item
    kind: Any = str if default is None else type(default)
    if type(item) is not kind and not (default is None and item is None):
        raise InvalidArgument(f"{name} is {item!r}", f"use {_KINDS[kind]}")
    if kind is int and item < (1 if default > 0 else 0):
        raise InvalidArgument(f"{name} is {item}", f"use {1 if default > 0 else 0} or more")
    return item


_KINDS = {str: "text", int: "a whole number", bool: "true or false"}


def size(name: str, item) -> int:
    """Bytes: a number, or text such as "4GiB"."""
    if type(item) is int and item >= 0:
        return item
    if isinstance(item, str) and (match := re.fullmatch(r"(\d+) ?(|KiB|MiB|GiB|TiB)", item)):
        return int(match[1]) * _UNITS[match[2]]
    raise InvalidArgument(f"{name} is {item!r}", 'use a number of bytes, or one with KiB, MiB, GiB or TiB: "4GiB"')


def is_ours(kv_transfer_config) -> bool:
    """Whether vLLM's KVTransferConfig, or the dict that an argument of its server is, names torpor's connector."""
    if isinstance(kv_transfer_config, dict):
        return kv_transfer_config.get("kv_connector") == CLASS
    return getattr(kv_transfer_config, "kv_connector", None) == CLASS
