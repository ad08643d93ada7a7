"""The compiled module. Made by tools/stubs.py; do not change by hand."""

import typing
from collections.abc import Callable, Mapping, Sequence

__version__: str

class BlockTier:
    """A store of KV blocks below the host memory of an engine."""

    def __init__(self, memory: memoryview, space: str, options: dict) -> None: ...
    def ask(self) -> None:
        """Send the lookups since the last call to the store."""
    def close(self) -> None: ...
    def finished(self) -> list:
        """[(job, which of its blocks are good, bytes moved, seconds), …]"""
    def forget(self) -> None:
        """Forget all blocks; blocks on disk for later processes, too."""
    def load(self, job: int, request: str, keys: Sequence[bytes], rows: Sequence[int]) -> None: ...
    def lookup(self, key: bytes, request: str) -> int:
        """0: the block is not there; 1: it is; 2: the store is asked."""
    def request_finished(self, request: str) -> None: ...
    def stats(self) -> dict: ...
    def store(self, job: int, keys: Sequence[bytes], rows: Sequence[int]) -> None: ...
    def take_removed(self) -> list:
        """Return the keys that were removed since the last call."""
    def wait(self) -> None:
        """Return when no job is under way."""

class CheckpointSet:
    """A committed set of checkpoints, until it is kept or withdrawn."""

    def keep(self) -> None:
        """It stays; older ones may go."""
    @property
    def path(self) -> str: ...
    def withdraw(self) -> None:
        """It goes again."""

class ConnectorScheduler:
    """What vLLM's scheduler asks of offloading, over its own block pool."""

    def __init__(self, pool: object, groups: list, options: dict) -> None: ...
    def acknowledge(self, step: int) -> None:
        """The forward pass of this step is over."""
    def adopt(self, ranks: list) -> bytes:
        """What every rank recovered is found from now on; returns what the ranks adopt."""
    def allocated(self, id: str, external: int, local: int | None = None, other: int = 0) -> bool:
        """It has blocks for `external` tokens that are loaded. `local`: if vLLM counts this look-up as the
        request's, the tokens in its own prefix cache; `other`: those that another connector loads. Returns
        whether the load ends within the step.
        """
    def apply(self, reports: list) -> None:
        """What became of plans, as the ranks say it."""
    @property
    def busy(self) -> bool:
        """Steps are needed, if only empty ones."""
    def check(self) -> None:
        """For tests: raises if the index or the queue contradict themselves."""
    @property
    def device_busy(self) -> bool:
        """Copies from or to the device, or for sessions, have not ended."""
    def fail_step(self, step: int) -> None:
        """What this step filled is not offered."""
    def finished(self, id: str, step: int, answered: bool) -> None:
        """Of a request that still has its blocks; `step` was the last one. `answered`: vLLM has said how many of its
        tokens were cached; then they are counted.
        """
    @property
    def fits_in_step(self) -> bool:
        """Whether the load that match() found last can end within the step."""
    @property
    def held(self) -> int:
        """Blocks of the engine."""
    def host_slots(self, blocks: Sequence[int], keep: bool) -> list[int]:
        """Of each of the engine's blocks, the slot in host memory that has its bytes, or -1; with `keep` they stay
        so.
        """
    def know(self, request: object) -> None: ...
    @property
    def loading(self) -> int:
        """Requests."""
    def match(self, request: object, computed: int) -> int | None:
        """Tokens behind the first `computed` ones that can be loaded; they are kept until allocated(). None: ask
        again.
        """
    def plan(self, flush: bool, of_device: bool = False) -> typing.Any:
        """The same, without a step. of_device: only copies from and to the device, and for sessions."""
    def queued(self, request: object) -> None:
        """The request waits: what only disk and remote store have of it comes into host memory meanwhile."""
    def release_all(self) -> None:
        """No block of the engine is held any more."""
    def release_host_slots(self) -> None: ...
    def reset(self) -> int:
        """Nothing is found any more; returns the number of the new namespace."""
    def session_answer(self, tenant: str, action: str) -> dict: ...
    def session_call(self, call: dict) -> dict:
        """Begin a call of a session; returns its answer so far."""
    def session_tenants(self, session: str) -> list[str]:
        """The tenants that have a session of this id."""
    def session_views(self, tenant: str | None, from_: object = None) -> dict:
        """Next sessions of a tenant; None: of all. `from_`: where the page before says that the next one begins."""
    @property
    def sessions_are_due(self) -> bool:
        """An idle session is to be demoted in the next step."""
    @property
    def sessions_are_loading(self) -> bool:
        """Blocks of a session are on their way to the device; no request has them."""
    @property
    def space(self) -> int: ...
    def stats(self) -> dict: ...
    def step(self, step: int, scheduled: dict, flush: bool = False, handed: dict = {}) -> typing.Any:
        """What this step fills is offered; returns what all ranks do next, or None. `handed`: by request, blocks
        that vLLM hands over: (group, block, tokens).
        """
    def take_events(self) -> typing.Any: ...
    def take_failed_within_step(self) -> list[tuple[str, int]]:
        """(request, number of its first block without valid content) for each load within a step that failed."""
    def take_loads_within_step(self) -> list[str]:
        """Requests whose loads are in the last plan and end before the step's forward pass."""
    def take_times(self) -> dict:
        """Seconds that each batch took, by way, and each request's load (`load`), since the last call."""
    def tokens_of_load(self, id: str) -> typing.Annotated[list[int], "FixedSize(3)"]:
        """Tokens of the request's last load by store: host, disk, remote."""
    @property
    def under_way(self) -> bool: ...
    def use_policy(self, ask: object) -> None:
        """Ask about blocks that are to be stored (0), and about those that were found for a request (1):
        ask(question, request, keys, groups) returns a byte for each key, or None for no answer.
        """

class ConnectorWorker:
    """What one rank does for offloading, over its memory."""

    def __init__(self, memory: RankMemory, options: dict) -> None: ...
    def adopt(self, blocks: bytes) -> None: ...
    def close(self) -> None: ...
    def finish_loads(self, requests: Sequence[str]) -> None:
        """Returns when the loads of these requests have ended; poll() has what became of them."""
    def idle(self) -> bool: ...
    def open_space(self, space: int, name: str, shared: str = '') -> None:
        """Keys of this number belong to the namespace with this name from now on; in the remote store, to `shared`."""
    def poll(self) -> tuple: ...
    def recover(self, space: int) -> bytes: ...
    def run(self, plan: bytes) -> None:
        """Begins a plan; a repeated one changes nothing."""
    def sizes(self) -> dict: ...
    def sync(self) -> None: ...
    def wait(self) -> None:
        """Returns when nothing of a plan is under way."""
    def wait_for_report(self, seconds: typing.SupportsFloat | typing.SupportsIndex) -> bool:
        """Waits until poll() has something, so long at most; returns whether it has."""
    def weights_digest(self) -> str: ...

class DeliveryLog:
    """What each request of a server asked and was given, in memory and in a log."""

    def __init__(self, options: dict) -> None: ...
    def all(self) -> list: ...
    def close(self) -> None:
        """Nothing is recorded from now on."""
    @staticmethod
    def count_running(options: dict) -> int:
        """How many answers still run that an earlier server left. Nothing is written."""
    def counts(self) -> dict: ...
    def dropped(self) -> int:
        """Ended answers that went for keep_bytes."""
    def find(self, response: str, tenant: str) -> list[str]:
        """Ids of the choices of a response, in their order."""
    def get(self, id: str) -> typing.Any: ...
    def hand_over(self) -> None:
        """Let another server open the log: sync it, release the lock, and record nothing from then on. WrongState:
        it lacks records that could not be written.
        """
    def pack(self) -> bytes:
        """For wake_up(answers=…) in the engine's process."""
    def part(self, id: str, from_token: int = 0, from_text: int = 0) -> dict: ...
    def position(self, id: str) -> dict:
        """As part(), without tokens and text."""
    def rotate(self) -> None:
        """Begin the log anew. Busy: that is being done already."""
    def start(self, answer: dict) -> None: ...
    def step(self, steps: list) -> None:
        """What one engine step gave, all in one record."""
    def step_states(self, states: list, running: dict, others: set, plain: object, step_of: Callable) -> bool:
        """step() of what vLLM's states have beyond their record."""
    def sync(self) -> None: ...
    def take_back(self) -> None:
        """Own the log again. Busy: another server has it. WrongState: another server went on with an answer."""
    def unwritten(self) -> list[str]:
        """Ids of the answers of which the file lacks records."""
    def was_dropped(self, response: str, tenant: str) -> bool: ...

class EngineCheckpoint:
    """All state of an engine but the bytes of its memory, as values."""

    @staticmethod
    def decode(sections: list, fingerprint: dict = {}) -> EngineCheckpoint:
        """The reverse of encode(). Raises Damaged or Incompatible, which names the section."""
    def encode(self) -> list:
        """The sections of a checkpoint, uncompressed: a list of (name, bytes). The fingerprint is not among them."""
    @staticmethod
    def from_dict(values: dict) -> EngineCheckpoint:
        """The reverse of to_dict(). Raises InvalidArgument, which names the value that is missing or of another
        type.
        """
    def to_dict(self) -> dict:
        """Plain values, by the names of the structs: fingerprint, scheduler, kv, workers, outputs, metadata."""
    def validate(self) -> None:
        """Raises for the first contradiction."""

class FrontCall:
    """A call of a console that this front end was asked for."""

    def answer(self, result: str) -> None:
        """JSON."""
    def fail(self, code: str, what: str, next_step: str = '', state_changed: bool = False) -> None: ...

class OwnerRecord:
    """Records this process, and those that it has started, as the owner of a server's directory, or as its standby."""

    def __init__(
        self, directory: str, term_seconds: typing.SupportsFloat | typing.SupportsIndex, address: str = '', role: str =
        'owner'
    ) -> None: ...
    def beat(self) -> None:
        """Give a heartbeat: several times a term."""

class OwnerWatch:
    """Follows the owner of a server's directory, or its standby, from another process."""

    def __init__(self, directory: str, role: str = 'owner') -> None: ...
    def end_owner(self, seconds: typing.SupportsFloat | typing.SupportsIndex) -> None:
        """End what is left of the one that was seen (SIGKILL). TimedOut: something lives on after these seconds."""
    def wait(self, seconds: typing.SupportsFloat | typing.SupportsIndex) -> dict:
        """Return the state of the one that is watched ("none", "serves", "ended", "silent"), its process, why, and
        its address: after these seconds if it serves, else at once.
        """

class ProgressFile:
    """How far a sleep or wake is, in a file that its processes are given as `progress`."""

    def __init__(self, path: str) -> None: ...
    def cancel(self) -> None:
        """The operation is undone, and raises Aborted."""
    def read(self) -> dict: ...

class RankMemory:
    """The memory of one worker rank: regions by tag, and the controller's orders on them."""

    def __init__(self, options: dict = {}) -> None: ...
    def allocate(self, tag: str, name: str, size_bytes: int) -> int:
        """A new zeroed region; returns its address, which stays valid for life."""
    def call(self, order: bytes) -> bytes:
        """Carries out an order of the controller; a failure is in the reply."""
    def free(self, address: int) -> None: ...
    def invalidate_digest(self, tag: str) -> None:
        """Somebody may have changed bytes of this tag: they are read when they are wanted next."""
    def load_tag(self, tag: str, directory: str, generation: int, id: bytes) -> dict:
        """Fills the regions of a tag from this checkpoint, each piece proved before it is copied."""
    def mark_dirty(self, tag: str) -> None:
        """The owner changed bytes of this tag: a kept backup is no longer that of its content."""
    def name_weights(self, label: str, places: Sequence[tuple[int, int]]) -> None:
        """The weights are these bytes, address and size of each: fingerprints are of them, not of their whole tag."""
    def proven_digest(self, tag: str) -> str | None:
        """Of what load_tag() filled: its digest; None if it was seen to be written since."""
    def set_kv_layout(self, tag: str, layout: dict) -> None:
        """From now on `tag` holds KV blocks laid out like this."""
    def start_prefault(self) -> None:
        """Begin to prefault host memory for the first sleep, which waits for this on a GPU; else it has begun."""
    def states(self) -> dict:
        """The state of each tag."""

class ReadAhead:
    """Reads the blocks of a directory's newest checkpoint into the page cache."""

    def __init__(self, directory: str, key_file: str | None, budget_bytes: int) -> None: ...
    def follow(self) -> dict:
        """Read what the newest checkpoint has and no earlier call has read. NotFound: there is none. Aborted: stop()
        was called.
        """
    def stop(self) -> None:
        """Let follow() return before its next read. Any thread may call it."""

class RemoteHome:
    """What a server has in an object store, and who may go on with it."""

    def __init__(
        self, url: str, term_seconds: typing.SupportsFloat | typing.SupportsIndex, key_file: str | None = None, address:
        str = ''
    ) -> None: ...
    @property
    def before(self) -> str:
        """The holder from whom this one took over; empty: none."""
    def fetch(self, directory: str, engine: Mapping[str, str]) -> str:
        """The newest checkpoint and its answers come into the directory; its path, or empty: there is none. Raises
        Incompatible for one that does not fit the engine; nothing has come then.
        """
    def fetch_answers(self, directory: str) -> bool:
        """The newest answers alone come into the directory. False: there are none."""
    @property
    def holder(self) -> str: ...
    def owner_address(self) -> str:
        """At which another one that owns serves clients; empty: none does, or it did not say."""
    def owns(self) -> bool: ...
    def publish(self, sent: SentCheckpoint) -> None:
        """The next owner goes on from these. Raises Aborted: it is another one already."""
    def release(self) -> None:
        """The next owner need not wait."""
    def renew(self) -> None:
        """Goes on owning. Raises Aborted: not any more."""
    def send(self, checkpoint: str, answers: str) -> SentCheckpoint:
        """Copies them there; nobody goes on from them yet."""
    def stop_copies(self) -> None:
        """What is sent or fetched now, or later, raises Aborted soon."""
    def take(self) -> bool:
        """Whether this process owns it now; otherwise another one does, or may. This and the next three end within a
        third of the term.
        """
    @property
    def term(self) -> int: ...

class RequestImages:
    """Requests that left a live engine, as values and KV in host memory of each rank."""

    def __init__(self, hooks: object, options: dict = {}) -> None:
        """`options`: how images are written to disk, and "directory", that of checkpoints."""
    def admit_order(self, request: str, blocks: Sequence[int]) -> bytes:
        """The order to all ranks that brings the KV of a request into its blocks, which are in token order."""
    def begin(self, id: str) -> None:
        """The requests of the image are on their way into the engine."""
    def end(self, request: str) -> typing.Any:
        """As release(), of a request that has ended: its image on disk goes with the last one."""
    def extract(self, id: str, requests: list, tables: Sequence[Sequence[int]], block_tokens: int) -> dict:
        """Copies the KV of requests of an engine that stands still into a new image, verified. Returns its summary."""
    def forget(self, id: str) -> list[str]:
        """Another engine has taken the image. Returns its requests, which are no more here."""
    def open(self, path: str) -> dict:
        """Holds an image of another engine. Returns where it lies, its state, and which of its requests have ended."""
    def put_back(self, id: str) -> None:
        """Lets go of an image that is held: it is on disk as before."""
    def read(
        self, id: str, requests: list, tables: Sequence[Sequence[int]], block_tokens: int, checkpoint: dict
    ) -> dict:
        """The same of requests of a checkpoint: its path, generation and id, as describe_checkpoint() gives them."""
    def read_back(self, id: str) -> list:
        """As verify(); an image on disk is read into host memory, and held. Returns its requests."""
    def release(self, request: str) -> typing.Any:
        """A request has its KV, or has ended. Returns the order that frees its image if it was the last, or None."""
    def store(self, id: str, fingerprint: dict, outputs: object) -> str:
        """Writes the image to disk, durable, then frees its host memory. Returns its path."""
    def summaries(self) -> list: ...
    def take(self, id: str) -> None:
        """The image that is held is this engine's alone, and its files go. Raises NotFound if another was first."""
    def verify(self, id: str) -> list:
        """Has every rank compare the image with its digests. Returns its requests."""

class SentCheckpoint:
    """A checkpoint and answers that were copied to an object store."""

    @property
    def bytes(self) -> int: ...
    @property
    def moved_bytes(self) -> int: ...
    @property
    def name(self) -> str: ...

class SharedFolder:
    """A folder for files that processes map. What killed ones left goes when one is made."""

    def __init__(self) -> None: ...
    @property
    def path(self) -> str: ...
    def remove(self) -> None:
        """With all that is in it."""
    @staticmethod
    def remove_left() -> None:
        """What killed processes of this user left."""

class SleepController:
    """Sleep and wake of one engine; lives where its scheduler lives."""

    def __init__(self, hooks: object, options: dict = {}) -> None: ...
    def begin_checkpoint(self, progress: str = '', metadata: dict = {}) -> None:
        """One that is written while the engine serves: continued until it is ready, taken, continued until it has
        ended.
        """
    def cancel_checkpoint(self) -> None: ...
    def check_directory(self) -> None:
        """Raises where the host of a rank does not see the directory of checkpoints."""
    def checkpoint(
        self, outputs: object, data_parallel: tuple[int, int] = (0, 1), progress: str = '', metadata: dict = {}
    ) -> dict:
        """A checkpoint of an engine that serves on; `outputs` is the front end's part."""
    def checkpoint_to_wake(self) -> str:
        """The directory of checkpoints, if it has one and this engine has had neither a step nor a request; else ""."""
    def continue_checkpoint(self) -> str: ...
    def continue_wake(self, wait: str = 'none', wanted: Sequence[int] = [], skipped: Sequence[int] = []) -> dict:
        """After a post-copy wake, between two steps: which blocks have arrived. They are released to the engine."""
    def end_checkpoint(self) -> dict: ...
    def end_hold(self, keep: bool) -> None:
        """After wake_up with hold: lets the engine run, or throws away what was restored."""
    def end_sleep(self, keep: bool) -> dict:
        """After a sleep or checkpoint that is held: carries it out, or undoes it."""
    def fingerprint(self) -> dict[str, str]:
        """All that must be equal for tokens to be equal, by name."""
    def is_sleeping(self) -> bool: ...
    def ledger(self) -> list: ...
    def plan_sleep(self, options: dict = {}) -> dict: ...
    def sleep(self, options: dict = {}) -> dict: ...
    def state(self) -> dict: ...
    def take_checkpoint(self, outputs: object) -> None:
        """The engine stands still, and goes on; later tokens are not in it."""
    def wake_up(self, options: dict = {}) -> dict: ...

class Slots:
    """The requests of a scheduler, each with its state, told as events."""

    def __init__(self) -> None: ...
    def create(self, id: str, tokens: int) -> int:
        """Its number."""
    def finish(self, slot: int, busy: bool = False) -> None:
        """`busy`: what was committed of it is still under way."""
    def keys(self, slot: int, keys: Sequence[bytes], first: int, made: bool) -> None:
        """Of its blocks, from the one with the number `first` on; `made`: by itself, not of its prompt."""
    def may_admit(self, slot: int) -> bool:
        """False: somebody holds it; ask again in the next step."""
    def onboard(self, slot: int, blocks: int) -> None: ...
    def onboard_failed(self, slot: int) -> None: ...
    def preempt(self, slot: int) -> None: ...
    def scheduled(self, slot: int, computed: int, now: int, tokens: int, device_blocks: int = 0) -> None: ...
    def skip(self, slot: int) -> None: ...
    def stage(self, slot: int, blocks: int) -> None:
        """They are kept for it below; 0: none is any more."""
    def step(
        self, running: int, waiting: int, tokens: int, nanoseconds: int, used_blocks: int, free_blocks: int
    ) -> None: ...

class SwapChannel:
    """Device memory that one engine gives and another takes, in a file."""

    def __init__(self, path: str, peer_timeout: typing.SupportsFloat | typing.SupportsIndex = 60.0) -> None:
        """A half that has no heartbeat of the other for so many seconds gives the swap up."""
    def has_joined(self, side: str) -> bool:
        """An engine has begun with this half. It may have failed since."""
    def stop(self, side: str) -> None:
        """One of the two cannot: the other is told."""
    def stopped_by(self) -> str:
        """"out" or "in": the side that failed first; or ""."""

def admit_error(reply: bytes) -> str | None:
    """Why a rank could not admit a request, by its reply to RequestImages.admit_order(); or None."""

def begin_control(operates: bool, records: str = '') -> str:
    """A socket beside the ring of this process; returns its path. `operates`: who connects may stop the engine.
    `records`: a directory, below which they may begin recordings.
    """

def begin_events(directory: str, role: str, rank: int = 0, blocks: bool = False) -> str:
    """From now on this process writes its events into a ring there; returns its path. A second call changes nothing.
    `blocks`: each state of each block, too.
    """

def built_with_cuda() -> bool:
    """Whether cuda.h was there when this was built."""

def cache_epoch(directory: str) -> str:
    """The word in the name of the namespace on disk."""

def check_call(method: str, params: str) -> None:
    """Raises if a console has no such method, or it does not take these parameters (JSON)."""

def check_image_name(name: str) -> None:
    """Raises InvalidArgument if an image on disk cannot have this id."""

def check_metadata(metadata: dict, to_disk: bool) -> None:
    """Raises InvalidArgument for names that are no str, values that are none of JSON, what is beyond the limits of
    metadata, or where nothing is written to disk.
    """

def check_portable(checkpoint: dict, engine: dict) -> None:
    """Raises Incompatible, naming each field, where requests of a checkpoint cannot go on with their KV in an
    engine.
    """

def check_same_engine(checkpoint: dict, engine: dict) -> None:
    """Raises Incompatible, naming each field, where an engine is another one than a checkpoint's."""

def claim_image(path: str, key_file: str | None) -> None:
    """Delete an image on disk, so that no engine takes it any more. Raises NotFound if there is none, or another
    engine has taken it; Busy while another process reads it.
    """

def commit_set(directory: str, paths: Sequence[str], options: dict = {}) -> CheckpointSet:
    """Makes the checkpoints of all data parallel ranks, by rank, one: a CheckpointSet."""

def console_page() -> str:
    """A page for a browser that asks the server it comes from."""

def control_methods() -> list:
    """The table of docs/console.md. `control`: it changes something; `front`: only a front end can carry it out."""

def copy_blocks(hooks: object, source: int, targets: Sequence[int]) -> int:
    """Has every rank copy one KV block into others, within its device. Returns the bytes, of all ranks."""

def describe_checkpoint(path: str, data_parallel_rank: int = 0, key_file: str | None = None) -> dict:
    """Which checkpoint is there, of which engine, and what its adapter keeps of each worker."""

def digest(bytes: bytes) -> str:
    """XXH3-128 of `bytes`, in hexadecimal."""

def end_stops() -> None:
    """Whoever has stopped this process's engine lets it go."""

def list_checkpoints(directory: str, key_file: str | None = None) -> list:
    """The committed checkpoints of a directory, oldest first."""

def may_step() -> bool:
    """Whether the engine of this process may take a step: nobody has stopped it to look at it."""

def memory_allocate(device: int, bytes: int) -> int: ...

def memory_backups_kept() -> bool: ...

def memory_begin(tag: str, keep: bool, engine: bool) -> None: ...

def memory_end() -> None: ...

def memory_engine_tags() -> set[str]:
    """The tags of an engine's scopes, with and without memory."""

def memory_free(device: int, address: int) -> None: ...

def memory_keep_backups(kept: bool) -> None: ...

def memory_ledgers() -> dict: ...

def memory_mark_dirty(tags: Sequence[str]) -> None: ...

def memory_of(device: int, options: dict) -> RankMemory:
    """The RankMemory that torch's allocations on this device come from; made with these options if there is none
    yet, else they apply to it, but for copy_threads and the size of deferred jobs. On a GPU it prefaults no host
    memory before start_prefault().
    """

def memory_plan_sleep(tags: Sequence[str], keep: Sequence[str] | None) -> dict: ...

def memory_plan_wake(tags: Sequence[str]) -> dict: ...

def memory_saved(address: int, bytes: int) -> bytearray:
    """A copy of what is saved of memory that sleeps."""

def memory_set_margin(bytes: int) -> None:
    """An allocation that would leave less free on its device fails."""

def memory_sleep(tags: Sequence[str], keep: Sequence[str] | None, check: bool) -> dict: ...

def memory_trim(device: int, addresses: Sequence[int]) -> int:
    """Give the memory of allocations of which nothing is in use back to the device. Their addresses stay taken until
    they are freed. Return the bytes given back.
    """

def memory_wake(tags: Sequence[str]) -> dict: ...

def open_set(path: str, key_file: str | None = None) -> dict:
    """The checkpoints of a set, by rank; all of them are there, and those that were written together."""

def order_name(order: bytes) -> str:
    """What an order of the controller to the ranks is called."""

def plan_fork(parent: dict, at: int | None, children: int, free_blocks: int) -> dict:
    """Returns how many of its parent's blocks each child of a fork shares, and how many it needs besides."""

def rank_directory(directory: str, rank: int, ranks: int) -> str:
    """Where the engine of this data parallel rank writes its checkpoints."""

def read_checkpoint(path: str, key_file: str | None = None) -> EngineCheckpoint:
    """The verified state of a checkpoint, or of the latest one of a directory."""

def record_input(kind: str, words: str) -> None:
    """An input of vLLM as an event with its words; at most 8 KiB."""

def renew_cache_epoch(directory: str) -> str:
    """Another one; what was stored before is not found."""

def serve_front(begin: Callable) -> None:
    """What a console asks of this process as a front end: `begin(method, params, call)` is called in another thread,
    returns at once, and sees to it that the call is answered or fails. `params` is JSON.
    """

def set_woken_from(directory: str, generation: int, options: dict = {}) -> None:
    """Its engines run: older sets may go."""
