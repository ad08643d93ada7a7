# SPDX-License-Identifier: Apache-2.0
"""Options of the KV connector: kv_connector_extra_config, or torpor's own in additional_config. A wrong one is named,
and so is one that does not exist.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from torpor.errors import InvalidArgument
from torpor.vllm.described import BYTES, NUMBER, PATH, SWITCH, TEXT, WHOLE, described, value_of
from torpor.vllm.own_class import check_name

MODULE, CLASS = "torpor.vllm.connector", "TorporConnector"
ADMIT_MODULE, ADMIT_CLASS = "torpor.vllm.portable", "TorporAdmit"  # of the option sessions
_STORAGE = (
    "disk_bytes", "block_compression", "kv_store", "kv_store_credentials", "kv_store_ca", "kv_store_blocks",
    "kv_store_timeout_ms", "kv_store_expire_days",
)  # fmt: skip


def _advanced(default, kind: str, text: str, details: str = ""):
    return described(default, kind, text, least=1, advanced=True, details=details)


@dataclass(frozen=True)
class ConnectorOptions:
    offload: str = described(
        "eager",
        TEXT,
        "when a full block is copied to host memory. eager: once it is computed; lazy: before the device evicts it; "
        "off: vLLM runs as without a connector",
        "eager",
        "lazy",
        "off",
        details=(
            "In `additional_config` the connector is off unless this option is there; in `kv_connector_extra_config` "
            "it may be left out. eager copies a block when the step that filled it has ended. lazy copies it two steps "
            "before vLLM would evict it."
        ),
    )
    host_bytes: int = described(
        0,
        BYTES,
        "host memory for KV blocks, per rank; torpor's host_compression packs them there",
        details=(
            "If there is an `arena_budget_bytes`, it has room for these bytes, too. With `host_compression` it "
            "also has room for staging memory: two pieces of 4 MiB for each copying thread, and two of 8 MiB each "
            "for the disk and for the shared store."
        ),
    )
    disk_bytes: int = described(0, BYTES, "disk for KV blocks, per rank; the blocks outlive the process")
    disk: str = described(
        "off",
        TEXT,
        "through: blocks in host memory are copied to disk in the background; off: none is",
        "through",
        "off",
        details="If this option is not given, `disk_bytes` above 0 means through.",
    )
    disk_dir: str | None = described(
        None,
        PATH,
        "directory of the blocks on disk, for one engine at a time",
        details=(
            "Without a value it is `offload` in the `checkpoint_dir`. Data parallel ranks but the first have `dp1`, "
            "`dp2` … in it. With `key_file` records there are authenticated, with `encrypt` they are unreadable."
        ),
    )
    durable: bool = described(
        False,
        SWITCH,
        "blocks on disk survive a loss of power, but for those of the last second; after a sleep or a regular end all "
        "of them",
        details="Blocks on disk survive the end of the process in any case.",
    )
    block_compression: str = described(
        "none",
        TEXT,
        "lossless compression of blocks on disk and in kv_store. bf16: of values of that type; zstd; none. Blocks "
        "with any of these are readable",
        "none",
        "bf16",
        "zstd",
        details=(
            "torpor stores a block as it is if a sample, or the result, shows that it does not become smaller. "
            "For blocks in host memory see `host_compression`."
        ),
    )
    kv_store: str | None = described(
        None,
        TEXT,
        "store in which engines share blocks: redis://HOST:PORT/NAME; rediss:// over TLS; mooncake://HOST:PORT/NAME; "
        "s3://BUCKET/PREFIX or file:///DIRECTORY. Each block in host memory is published there",
        details="See [sharing.md](sharing.md).",
    )
    kv_store_credentials: str | None = described(None, PATH, "file with the password, or the user and the password")
    kv_store_ca: str | None = described(None, PATH, "file of trusted certificates")
    kv_store_blocks: int = described(
        1 << 18, WHOLE, "number of shared blocks that the engine remembers to be there", least=1
    )
    kv_store_timeout_ms: int = described(
        2000,
        WHOLE,
        "most milliseconds of a call of the store",
        least=1,
        details="All attempts together have this time. A call moves a part of a transfer: 8 MiB at most, in an object "
        "store 16 MiB at most of what is put. A transfer of many calls has no deadline as a whole.",
    )
    kv_store_wait_ms: int = described(
        100, WHOLE, "most milliseconds that a request waits for a lookup in the store; then it goes on without", least=1
    )
    kv_store_expire_days: float = described(
        7.0, NUMBER, "blocks in an object store that are older are removed from it; 0: none is", least=0, most=36500
    )
    min_uses: int = described(1, WHOLE, "a block is offloaded once so many requests have used it", least=1)
    min_prefix_tokens: int = described(0, WHOLE, "shorter hits are computed, not loaded; in tokens", least=0)
    policy: str | None = described(
        None,
        TEXT,
        'class of your own, "module:Class", that is asked which blocks to store and which to load',
        details=(
            "See [howto/own-policy.md](howto/own-policy.md). The module must be importable in the engine's process. A "
            "class that does not answer within `policy_timeout_ms` is bypassed."
        ),
    )
    sync_load_budget_bytes: int = described(
        4 << 20,
        BYTES,
        "loads from host memory of together so many bytes per rank end before the forward pass of the step that plans "
        "them; 0: none does",
        details=(
            "Such a load costs its request no step of its own, and the other requests of the step wait for it. Larger "
            "loads, and those from disk or kv_store, run beside steps. It applies to models with one KV cache group "
            "whose layers see all tokens, without a pipeline."
        ),
    )
    untried_states: bool = described(
        False,
        SWITCH,
        "take models with states that were not run with torpor's KV connector: Mamba 1 and 2, linear attention",
        details=(
            "States are what Mamba, linear attention and short convolutions keep in place of KV. Those of short "
            "convolutions were run, on a CPU. Compare answers with those of an engine without the connector before "
            "you rely on it."
        ),
    )
    session_pin_share: float = described(
        0.5,
        NUMBER,
        "share of host_bytes that pinned and retained sessions hold at most",
        least=0,
        most=1,
        details="See [sessions.md](sessions.md#where-finished-sessions-lie).",
    )
    session_prefetch_share: float = described(
        0.5,
        NUMBER,
        "share of the device's free KV blocks that prefetches to the device load into at a time, at most",
        least=0,
        most=1,
        details="See [sessions.md](sessions.md#where-finished-sessions-lie).",
    )
    session_idle_seconds: float = described(
        0.0,
        NUMBER,
        "seconds after the end of a session's last request at which its blocks are demoted by themselves; 0: never",
        least=0,
        most=10**9,
        details="A request or a call of the session begins the time anew. See "
        "[sessions.md](sessions.md#where-finished-sessions-lie).",
    )
    session_idle_to: str = described(
        "host", TEXT, "tier to which session_idle_seconds demotes", "host", "disk", "remote"
    )
    # Advanced: given as {"advanced": {…}}. A user who has not measured needs none of them.
    presence: bool = _advanced(
        True,
        SWITCH,
        "when blocks that the tiers have already are skipped. true: before they are queued; false: when their turn "
        "comes",
    )
    max_batch_size: int = _advanced(64, WHOLE, "most blocks of one transfer job")
    min_batch_size: int = _advanced(8, WHOLE, "number of blocks that a transfer job waits for")
    flush_interval_ms: int = _advanced(10, WHOLE, "most milliseconds that a transfer job waits for them")
    policy_timeout_ms: int = _advanced(
        100,
        WHOLE,
        "most milliseconds to decide which blocks of a step are offloaded; then none is. A `policy` that takes longer "
        "for an answer is bypassed",
    )
    sweep_interval_ms: int = _advanced(10, WHOLE, "most milliseconds that cancelled blocks stay in the queue")
    max_concurrent_transfers: int = _advanced(1, WHOLE, "number of store jobs that ranks work at")
    on_deck_batches: int = _advanced(4, WHOLE, "number of store jobs that wait on ranks")
    loading_batches: int = _advanced(64, WHOLE, "number of load jobs that ranks work at or that wait there")
    queue_blocks: int = _advanced(
        1 << 16,
        WHOLE,
        "most blocks that wait to be offloaded; more are skipped",
        details=(
            "Blocks of a higher priority go first in each direction. A block has the priority of the request that "
            "filled it, as vLLM has it: a lower number goes first. A shared block that is offloaded lazily has "
            "the highest."
        ),
    )

    session_count: int = _advanced(4096, WHOLE, "most sessions whose blocks the engine knows")
    session_index_bytes: int = described(64 << 20, BYTES, "memory for what the engine knows of sessions", advanced=True)
    session_tenant_share: float = described(
        0.5,
        NUMBER,
        "share that one tenant has at most of session_count, session_index_bytes and session_pin_share",
        least=0.001,
        most=1,
        advanced=True,
    )
    session_pin_seconds: int = _advanced(86400, WHOLE, "longest time of a pin, in seconds")

    @staticmethod
    def of(given: dict, directory: str | None = None) -> ConnectorOptions:
        """`directory`: where there is none in `given`. Raises InvalidArgument."""
        known = {f.name: f for f in fields(ConnectorOptions)}
        values = {name: value_of(known[name], item, name) for name, item in _flat(given).items()}
        if "disk" not in values and values.get("disk_bytes", 0) > 0:
            values["disk"] = "through"
        if values.get("disk_dir") is None and directory is not None:
            values["disk_dir"] = f"{directory}/offload"
        options = ConnectorOptions(**values)
        options._check()
        return options

    def _check(self) -> None:
        if self.policy is not None:
            check_name(self.policy, "policy")
        if self.offload == "off":
            return
        if self.host_bytes == 0 and self.disk_bytes == 0:
            raise InvalidArgument("the connector has no room: host_bytes and disk_bytes are 0", "give one of them")
        if (self.disk == "through") != (self.disk_bytes > 0):
            raise InvalidArgument(f"disk is {self.disk!r} and disk_bytes is {self.disk_bytes}", "give both or neither")
        if self.session_idle_seconds > 0:
            lacks = {"host": self.host_bytes == 0, "disk": self.disk_bytes == 0, "remote": self.kv_store is None}
            if lacks[self.session_idle_to]:
                tier = {"host": "host_bytes", "disk": "disk_bytes", "remote": "kv_store"}[self.session_idle_to]
                raise InvalidArgument(
                    f"session_idle_to is {self.session_idle_to!r} and there is no {tier}",
                    f"give {tier}, or name another tier",
                )
        if self.kv_store is not None and self.host_bytes == 0:
            raise InvalidArgument("kv_store is given and host_bytes is 0", "give host memory: blocks go out from there")
        if self.kv_store is None and (self.kv_store_credentials is not None or self.kv_store_ca is not None):
            raise InvalidArgument(
                "kv_store_credentials or kv_store_ca without kv_store", "give the URL, or leave them out"
            )
        if self.disk_bytes > 0 and not self.disk_dir:
            raise InvalidArgument(
                "disk_bytes is given and disk_dir is not", "give the directory, or torpor's checkpoint_dir"
            )

    def of_rank(self, parallel_config) -> ConnectorOptions:
        """Return the options of one data parallel rank, by vLLM's ParallelConfig of its engine core."""
        return replace(self, disk_dir=directory_of_rank(self.disk_dir, parallel_config.data_parallel_index))

    @property
    def disk_folder(self) -> str | None:
        """Return the folder of the tier on disk, or None if there is no such tier."""
        return self.disk_dir if self.disk_bytes > 0 else None

    def of_sessions(self) -> dict:
        return {
            "sessions": self.session_count,
            "session_index_bytes": self.session_index_bytes,
            "tenant_share": self.session_tenant_share,
            "pin_share": self.session_pin_share,
            "pin_seconds": self.session_pin_seconds,
            "prefetch_share": self.session_prefetch_share,
            "idle_seconds": self.session_idle_seconds,
            "idle_to": self.session_idle_to,
        }

    def queue(self) -> dict:
        names = (
            "max_batch_size", "min_batch_size", "flush_interval_ms", "policy_timeout_ms", "sweep_interval_ms",
            "max_concurrent_transfers", "on_deck_batches", "loading_batches", "queue_blocks", "presence",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}


_ADVANCED = tuple(f.name for f in fields(ConnectorOptions) if f.metadata.get("advanced"))
NAMES = (*(f.name for f in fields(ConnectorOptions) if f.name not in _ADVANCED), "advanced")


def _flat(given: dict) -> dict:
    """Return the given options and those of the advanced group, in one dict. Raises InvalidArgument for others."""
    advanced = given.get("advanced", {})
    if not isinstance(advanced, dict):
        raise InvalidArgument(f"advanced is {advanced!r}", f"give a dict of {', '.join(_ADVANCED)}")
    if apart := sorted(set(given) & set(_ADVANCED)):
        raise InvalidArgument(f"{', '.join(apart)} outside of advanced", f'give {{"advanced": {{"{apart[0]}": …}}}}')
    for names, known, where in ((given, NAMES, ""), (advanced, _ADVANCED, "advanced ")):
        if unknown := sorted(set(names) - set(known)):
            raise InvalidArgument(
                f"unknown {where}connector option {', '.join(map(str, unknown))}", f"the options are {', '.join(known)}"
            )
    return {name: item for name, item in given.items() if name != "advanced"} | advanced


def directory_of_rank(directory: str | None, data_parallel_index: int) -> str | None:
    """Return the directory of a data parallel rank in that of all: a directory on disk is one engine's.

    The first rank has the directory itself. vLLM tells an engine core of a model without experts only its number.
    """
    return directory if directory is None or data_parallel_index == 0 else f"{directory}/dp{data_parallel_index}"


def storage_options(options) -> dict:
    """Return the options of the disk and of the shared store that torpor's core takes by the same names."""
    return {name: getattr(options, name) for name in _STORAGE}


def keys_have_adapters(vllm_config, options: ConnectorOptions) -> bool:
    """Whether keys depend on the content of LoRA adapters: blocks on disk or in a shared store outlive the engine."""
    return vllm_config.lora_config is not None and (options.disk_bytes > 0 or options.kv_store is not None)


def is_ours(kv_transfer_config) -> bool:
    """Whether vLLM's KVTransferConfig, or the dict that an argument of its server is, names a connector of torpor."""
    if isinstance(kv_transfer_config, dict):
        return kv_transfer_config.get("kv_connector") in (CLASS, ADMIT_CLASS)
    return getattr(kv_transfer_config, "kv_connector", None) in (CLASS, ADMIT_CLASS)


def all_ours(kv_transfer_config) -> bool:
    """Return whether vLLM's KVTransferConfig names connectors of torpor alone: one, or several inside
    MultiConnector."""
    members = inside(kv_transfer_config)
    if kv_transfer_config.kv_connector == "MultiConnector" and members:
        return all(is_ours(each) for each in members)
    return is_ours(kv_transfer_config)


def admits(kv_transfer_config) -> bool:
    """Whether vLLM's KVTransferConfig has TorporAdmit, alone or inside MultiConnector."""
    return ADMIT_CLASS in _connectors(kv_transfer_config)


def has_tiers(kv_transfer_config) -> bool:
    """Whether vLLM's KVTransferConfig, or None, has TorporConnector, alone or inside MultiConnector."""
    return kv_transfer_config is not None and CLASS in _connectors(kv_transfer_config)


def inside(kv_transfer_config) -> tuple[dict, ...]:
    """Return the connectors inside the one that vLLM's KVTransferConfig names, as MultiConnector takes them."""
    return tuple((kv_transfer_config.kv_connector_extra_config or {}).get("connectors", ()))


def members(connector) -> tuple:
    """Return a KV connector, or None, and those inside it if it is vLLM's MultiConnector. Nothing else of it is asked:
    it may be anybody's."""
    inside = getattr(connector, "sub_connectors", None)
    return (connector, *inside) if isinstance(inside, list) else (connector,)


def _connectors(kv_transfer_config) -> tuple[str | None, ...]:
    return (kv_transfer_config.kv_connector, *(each.get("kv_connector") for each in inside(kv_transfer_config)))
