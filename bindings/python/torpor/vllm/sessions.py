# SPDX-License-Identifier: Apache-2.0
"""Requests that leave a live engine and come back: `torpor.hibernate()` and `torpor.resume()`, in the engine core.

C++ keeps what is hibernated: engine/request_images.h, and on disk engine/stored_images.h. portable.py has the connector
by which vLLM takes a request back.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm.v1.request import Request, RequestStatus

from torpor import _core
from torpor.errors import Damaged, Incompatible, InvalidArgument, NotFound, Unsupported, WrongState
from torpor.vllm import connector_options, connector_sleep, grammar, portable
from torpor.vllm import scheduler_values as values
from torpor.vllm.mixed_in import mix_in
from torpor.vllm.other_connectors import has_remote_prompt

if TYPE_CHECKING:
    from torpor.vllm.portable import Admissions
    from torpor.vllm.preemptions import Preemptions

_MOST_MOVED = 4096  # images of which it is remembered that another engine has taken them


def admissions_of(scheduler) -> Admissions | None:
    """Return the scheduler's side of TorporAdmit, or None where the engine has no such connector."""
    connector: Any = scheduler.connector
    for each in connector_options.members(connector):
        if type(each).__name__ == connector_options.ADMIT_CLASS:
            return each.admissions
    return None


class Sessions:
    """The images of one EngineSide. The engine core's thread calls it between steps."""

    def __init__(self, hooks, store_options: dict | None = None):
        """`store_options`: how images are written to disk, as RequestImages takes it; None: nowhere."""
        self._hooks = hooks
        self._store_options = store_options or {}
        self._core = hooks.core
        self._scheduler = hooks.scheduler
        self._images: _core.RequestImages | None = None
        self._epochs: dict[str, int] = {}  # of each image that is not resumed: VllmHooks.kv_epoch when it was made
        self._makers: dict[str, str] = {}  # of each image: the call that made it
        self._recomputed: dict[str, bool] = {}  # of each image that is being resumed: what resume() said of it
        self._portable: list[str] | None = None  # requests of a checkpoint or image, until their front end has them
        self._taken: str | None = None  # of these, the image that is theirs
        self._holder: str | None = None  # the call whose front end they wait for
        self._paths: dict[str, str] = {}  # of each image that was written to disk, or came from there
        self._moved: dict[str, dict] = {}  # of each image that another engine has taken: what resume() said of it
        self.preemptions: Preemptions | None = None  # with the option offload_preempted
        self.drawn_seeds: set[str] = set()  # requests whose seed their model runner drew, before they left
        self._clients: dict[str, int] = {}  # of each request that was hibernated here: vLLM's number of its front end

    def hibernate(self, image: str, requests: list[str], timeout: float | None, call: str) -> dict:
        """Take these requests out of the engine, all or none, but for those that end with the step under way. Return
        the summary of their image. `call`: an id of this call alone."""
        images, admissions = self.begun()
        if known := next((each for each in images.summaries() if each["id"] == image), None):
            more = set(requests) - set(known["requests"])
            if more & self._scheduler.requests.keys() or not set(known["requests"]) <= set(requests):
                raise InvalidArgument(f"the image {image} has other requests", "give each image an id of its own")
            if known["resuming"]:
                raise WrongState(f"the image {image} is being resumed", "wait for the next tokens of its requests")
            return known
        for request_id in requests:
            self._check_runs(request_id)
        was_quiet = self._hooks.is_quiet
        self._hooks.quiesce(timeout)
        try:
            named, requests = requests, [each for each in requests if self._is_unfinished(each)]
            if not requests:
                raise NotFound(f"request {', '.join(named)}: the step under way was the last one", "take its answer")
            if any(self._scheduler.requests[each].status is RequestStatus.WAITING_FOR_REMOTE_KVS for each in requests):
                self._hooks.other_connector.end_transfers(timeout)  # another connector brings their KV
            self._send_drops(admissions)
            summary = self._extract(images, admissions, image, requests)
            self._clients |= {each: self._scheduler.requests[each].client_index for each in requests}
            # Now that each rank has a whole, verified image. The front end hears nothing of it, and waits on.
            self._scheduler.finish_requests(requests, RequestStatus.FINISHED_ABORTED)
        finally:
            if not was_quiet:
                self._hooks.resume()
        self._forget_gone(images)
        self._paths.pop(image, None)  # of another image, that had this id before
        self._epochs[image], self._makers[image] = self._hooks.kv_epoch, call
        return summary

    def _is_unfinished(self, request_id: str) -> bool:
        """Return whether the scheduler runs this request. One that has ended may be there as well, while another KV
        connector holds its blocks."""
        request = self._scheduler.requests.get(request_id)
        return request is not None and not request.is_finished()

    def _send_drops(self, admissions: Admissions) -> None:
        """The ranks free images that are gone, before the next step would tell them: the next one may have the same
        id."""
        drops = admissions.orders.drops
        while drops:
            self._hooks.call_ranks(drops[0])
            del drops[0]

    def send_drops(self) -> None:
        """As _send_drops(), if any request was in an image."""
        if self._images is not None:
            self._send_drops(self.begun()[1])

    def _forget_gone(self, images: _core.RequestImages) -> None:
        known = {each["id"] for each in images.summaries()}
        for of_images in (self._epochs, self._makers, self._recomputed, self._paths):
            for image in of_images.keys() - known:
                del of_images[image]

    def was_made_by(self, image: str, call: str) -> bool:
        return self._makers.get(image) == call

    def image_of(self, image: str, path: str | None) -> str | None:
        """Return the id of this engine's image that has this id or this path, or None."""
        known = [each["id"] for each in self.summaries()]
        if image in known or path is None:
            return image
        return next((each for each in known if self._paths.get(each) == path), None)

    def begun(self) -> tuple[_core.RequestImages, Admissions]:
        admissions = admissions_of(self._scheduler)
        if admissions is None:
            raise Unsupported("sessions: this engine was started without them", "start it with the option sessions")
        if self._images is None:
            self._images = admissions.images = _core.RequestImages(self._hooks, self._store_options)
            if hasattr(self._scheduler.connector, "sub_connectors"):  # vLLM's MultiConnector
                mix_in(self._scheduler.connector, portable.AskedFirst)
            admissions.kv_epoch = lambda: self._hooks.kv_epoch
            self._scheduler.torpor_sessions = self
        return self._images, admissions

    def _check_runs(self, request_id: str) -> Request:
        request = self._scheduler.requests.get(request_id)
        if request is None or request.is_finished():
            raise NotFound(f"request {request_id} does not run here", "it has ended, or is hibernated")
        return request

    def _extract(self, images, admissions, image: str, requests: list[str]) -> dict:
        scheduler = self._scheduler
        values.assert_quiet(scheduler)
        if self.preemptions is not None:
            self.preemptions.give_up(requests)
        found = []
        for request_id in requests:
            request = self._check_runs(request_id)
            if request_id in admissions.requests:
                raise WrongState(f"request {request_id} is being resumed", "wait for its next token")
            if problems := unsupported(request):
                raise Unsupported(f"request {request_id} cannot be hibernated: {', '.join(problems)}")
            found.append(request)
        of_runners = self._hooks.states_of_runners(requests)
        block_tokens, tables, states = scheduler.block_size, [], []
        for i, request in enumerate(found):
            value = values.request_to_value(request)
            value["num_computed_tokens"] = computed = tokens_with_kv(request)
            value["engine"]["of_runners"] = [rank[i] for rank in of_runners]
            if request.request_id in self.drawn_seeds:  # it is still no seed of the caller's
                seed = request.sampling_params.seed
                value["sampling"] = value["sampling"] | {"seed": None}
                value["engine"]["of_runners"] = [rank | {"seed": seed} for rank in value["engine"]["of_runners"]]
            self._check_comes_back(value)
            states.append(value)
            (blocks,) = scheduler.kv_cache_manager.get_block_ids(request.request_id)
            tables.append(list(blocks[: -(-computed // block_tokens)]))
        return images.extract(image, states, tables, block_tokens)

    def _check_comes_back(self, item: dict) -> None:
        """A request that cannot be made of its values does not leave."""
        try:
            self._without_grammar(item)
        except Exception as problem:
            raise Unsupported(f"request {item['id']} cannot be hibernated: {problem}") from problem

    def resume(self, image: str) -> dict:
        """Put the requests of an image into the engine, all or none. Return its summary, and whether their KV is of
        other weights and is computed again."""
        images, admissions = self.begun()
        if known := next((each for each in images.summaries() if each["id"] == image and each["resuming"]), None):
            return known | {"recomputed": self._recomputed.get(image, False)}
        if image in self._moved and all(each["id"] != image for each in images.summaries()):
            return self._moved[image]  # who asked has perhaps not heard it
        stored = next((each["path"] for each in images.summaries() if each["id"] == image), "")
        self._end_transfers_of(image)
        try:
            items = images.read_back(image)
            recomputed = self._epochs.get(image) != self._hooks.kv_epoch
            requests = [self.made(item) for item in items]
            images.take(image)
        except NotFound:
            if not stored:
                raise
            moved = {"id": image, "path": stored, "moved": self._forget_moved(images, image)}
            self._moved[image] = moved
            while len(self._moved) > _MOST_MOVED:
                del self._moved[next(iter(self._moved))]
            return moved
        except BaseException:
            images.put_back(image)
            raise
        images.begin(image)
        summary = next(each for each in images.summaries() if each["id"] == image)
        self._forget_gone(images)
        self.drawn_seeds &= {*self._scheduler.requests, *self.held(), *summary["requests"]}
        self._recomputed[image] = recomputed
        for item, request in zip(items, requests, strict=True):
            self._admit(admissions, item, request, 0 if recomputed else item["num_computed_tokens"])
        return summary | {"recomputed": recomputed}

    def _end_transfers_of(self, image: str) -> None:
        """End the transfers that another KV connector, if there is one, has of the image's requests. It knows requests
        by their ids, so it must have done with those that left before they come back. Raises TimedOut if these
        transfers do not end."""
        other, was_quiet = self._hooks.other_connector, self._hooks.is_quiet
        if not other.is_there:
            return
        requests = [each for known in self.summaries() if known["id"] == image for each in known["requests"]]
        self._hooks.quiesce(None)
        try:
            other.end_transfers_of(requests)
        finally:
            if not was_quiet:
                self._hooks.resume()

    def _forget_moved(self, images, image: str) -> list[str]:
        """Another engine has taken this image. Return its requests, which are no more here."""
        images.put_back(image)
        requests = images.forget(image)
        for request_id in requests:
            self._clients.pop(request_id, None)
        self._forget_gone(images)
        return requests

    def store(self, image: str, fingerprint: dict[str, str], outputs: dict) -> dict:
        """Have an image lie on disk, durable, and in host memory no more. Return its summary.

        `fingerprint`: of this engine. `outputs`: the front end's part of the image's requests. After an error it lies
        in host memory as before.
        """
        images, _ = self.begun()
        there = self._paths.get(image)  # it is on disk already
        if there is None and self._epochs.get(image, self._hooks.kv_epoch) != self._hooks.kv_epoch:
            raise WrongState(f"the weights have changed since the image {image} was made", "resume it")
        images.store(image, fingerprint, outputs)
        summary = next(each for each in images.summaries() if each["id"] == image)
        self._paths[image] = summary["path"]
        self._moved.pop(image, None)
        return summary

    def take(self, path: str, fingerprint: dict[str, str], call: str) -> dict:
        """Admit the requests of an image on disk, of another engine. The engine stands still until end_portable() of
        this call, which takes the image. `fingerprint`: of this engine.

        Raises Incompatible, by field, where its KV means something else here, Damaged, NotFound, Busy. Then nothing has
        changed, and the image is there.
        """
        images, admissions = self.begun()
        if self._hooks.is_quiet:
            raise WrongState("the engine stands still for another call", "call this again when that has ended")
        stored = images.open(path)
        image, state = stored["name"], stored["state"]
        try:
            _core.check_portable(stored["fingerprint"], fingerprint)
            gone = {state["scheduler"]["requests"][place]["id"] for place in stored["ended"]}
            items, failed = self._items_of(state)
            if failed:
                raise Incompatible(failed[0]["error"])
            items = [item for item in items if item["id"] not in gone]
            here = self._scheduler.requests.keys() | self.held().keys()
            if known := [item["id"] for item in items if item["id"] in here]:
                raise WrongState(f"this engine has a request {known[0]} of its own", "resume the image elsewhere")
            made = [(item, self.made(item)) for item in items]
            outputs = dict(state["outputs"])
            outputs["ended"] = [each for each in outputs["requests"] if each["id"] in gone]
            outputs["requests"] = [each for each in outputs["requests"] if each["id"] not in gone]
        except BaseException:
            images.put_back(image)
            raise
        self._portable, self._taken, self._holder = [], image, call
        try:
            self._hooks.quiesce(None)
            self._hooks.other_connector.end_transfers_of(item["id"] for item in items)
            try:
                self._read(images, image, made, state, stored)
            except NotFound as missing:  # a part of an image that is there
                raise Damaged(f"the image {path}: {missing}", "abort its requests and send them again") from missing
            for item, request in made:
                self._portable.append(request.request_id)
                self._admit(admissions, item, request, item["num_computed_tokens"])
        except BaseException:
            self.end_portable(keep=False)
            raise
        self._forget_gone(images)
        self.drawn_seeds &= {*self._scheduler.requests, *self.held()}
        self._epochs[image], self._paths[image] = self._hooks.kv_epoch, path
        return {
            "id": image, "path": path, "requests": {item["id"]: len(item["output_token_ids"]) for item in items},
            "recomputed": False, "outputs": outputs, "state": state,
        }  # fmt: skip

    def _admit(self, admissions, item: dict, request: Request, computed: int) -> None:
        if item["sampling"]["seed"] is None and item["engine"]["of_runners"][0].get("seed") is not None:
            self.drawn_seeds.add(request.request_id)
        admissions.admit(request, computed, for_runners(item))
        self._scheduler.add_request(request)
        if request.num_output_tokens > 0:  # else the front end has not heard yet that it was queued
            request.events.clear()
        self._clients.pop(request.request_id, None)

    def wake_portable(self, options: dict, engine: dict[str, str], key_file: str | None) -> dict:
        """Admit all requests of a checkpoint, which another engine may have written, with their KV. The engine stands
        still until end_portable(). `engine`: its fingerprint. Return the report of a wake.

        Raises Incompatible, by field, where the KV means something else here; a request that cannot come alone is in
        `failed_requests`. Then, and after any other error, nothing has changed.
        """
        images, admissions = self.begun()
        if self._scheduler.requests or images.summaries():
            raise WrongState("this engine has requests of its own", "wake the checkpoint in an engine without requests")
        if self._hooks.is_quiet:
            raise WrongState("the engine stands still for another call", "call this again when that has ended")
        began = time.monotonic()
        stored = _core.describe_checkpoint(options["from_checkpoint"], 0, key_file)
        _core.check_portable(stored["fingerprint"], engine)
        checkpoint = _core.read_checkpoint(stored["path"], key_file)
        checkpoint.validate()
        state = checkpoint.to_dict()
        items, failed = self._items_of(state)
        made = []
        for item in items:
            try:
                made.append((item, self.made(item)))
            except Exception as problem:  # whatever another release may have written
                failed.append({"id": item["id"], "error": f"{problem}"})
        image = f"checkpoint-{uuid.uuid4().hex}"
        self._hooks.quiesce(None)
        self._portable, self._holder = [], options["call"]
        try:
            self._hooks.other_connector.end_transfers()
            summary = self._read(images, image, made, state, stored)
            for item, request in made:
                self._portable.append(request.request_id)
                self._admit(admissions, item, request, item["num_computed_tokens"])
        except BaseException:
            self.end_portable(keep=False)
            raise
        return {
            "changed": True, "fully_awake": True, "held": True, "checkpoint": stored["path"], "requests": len(made),
            "restored_bytes": summary["bytes"], "failed_requests": failed, "outputs": state["outputs"],
            "metadata": state["metadata"], "seconds": time.monotonic() - began, "state": state,
        }  # fmt: skip

    @staticmethod
    def _read(images, image: str, made: list[tuple[dict, Request]], state: dict, stored: dict) -> dict:
        """Have the ranks read the KV of these requests. Return the summary of their image."""
        if not made:
            return {"bytes": 0}
        (group,) = state["kv"]["groups"]
        tables = [list(group["tables"].get(item["id"], ())) for item, _ in made]
        place = {name: stored[name] for name in ("path", "generation", "id")}
        summary = images.read(image, [item for item, _ in made], tables, group["block_size"], place)
        images.begin(image)
        return summary

    def end_portable(self, keep: bool, lost: Iterable[str] = (), call: str | None = None) -> None:
        """Let the engine go on. `keep`: the front end has the requests but for those that it lost. Otherwise it cannot
        take them, and they end.

        `call`: the call that wants it; None: the one that holds the engine. If the engine does not wait for this call,
        nothing happens; with `keep` NotFound is raised. Raises NotFound if another engine has taken their image: then
        they end, too.
        """
        if self._portable is None or call not in (None, self._holder):
            if keep:
                raise NotFound("these requests have ended", "call it again")
            return
        requests, self._portable = self._portable, None
        image, self._taken = self._taken, None
        images, admissions = self.begun()
        try:
            if keep and image is not None:
                images.take(image)
        except BaseException:
            keep = False
            raise
        finally:
            if ended := list(lost) if keep else requests:
                self._scheduler.finish_requests(ended, RequestStatus.FINISHED_ABORTED)
            if image is not None:
                images.put_back(image)
            try:
                self._send_drops(admissions)
            finally:
                self._hooks.resume()

    @property
    def holds_portable(self) -> bool:
        """Whether the engine stands still for the front end of a portable wake."""
        return self._portable is not None

    @property
    def takes_image(self) -> bool:
        """Whether that wake is the resume of an image of another engine."""
        return self._taken is not None

    def _items_of(self, state: dict) -> tuple[list[dict], list[dict]]:
        """The requests of a checkpoint in the order in which its engine ran them, and those that cannot leave it."""
        if len(state["kv"]["groups"]) != 1:
            raise Incompatible("the checkpoint has several KV cache groups", "wake it in an engine like its own")
        requests = {item["id"]: item for item in state["scheduler"]["requests"]}
        items, failed = [], []
        for request_id in (each for queue in ("running", "held", "waiting") for each in state["scheduler"][queue]):
            item = requests[request_id]
            if problem := _bound_to_its_engine(item):
                failed.append({"id": request_id, "error": f"request {request_id}: {problem}"})
                continue
            of_runners = item["engine"].get("of_runners")  # of an image; else it is where a checkpoint has it
            of_runners = of_runners or [_of_runner(worker, request_id) for worker in state["workers"]]
            computed = item["num_computed_tokens"]
            if item["sampling"]["prompt_logprobs"] is not None and len(item["output_token_ids"]) == 0:
                computed = 0  # as tokens_with_kv()
            item |= {"client_index": 0, "num_computed_tokens": computed}
            item["engine"] = item["engine"] | {"of_runners": of_runners}
            items.append(item)
        return items, failed

    def made(self, item: dict) -> Request:
        """A request of an image, as a new one with the tokens that it has. Raises Incompatible."""
        request = self._without_grammar(item)
        if request.use_structured_output:
            grammar.remember_beginning(request)
            self._core.structured_output_manager.grammar_init(request)
            if request.num_output_tokens > 0:
                grammar.replay(self._core.structured_output_manager, request)
            else:
                request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        return request

    def _without_grammar(self, item: dict) -> Request:
        engine = dict(item["engine"])
        seed = engine.pop("of_runners")[0].get("seed")
        request = values.moved_request(item | {"engine": engine}, self._core.request_block_hasher)
        if seed is not None:
            request.sampling_params.seed = seed  # model runner V2 goes on with the one that it drew
        if (why := values.not_taken(request, self._core.vllm_config)) is not None:
            raise Incompatible(f"request {request.request_id}: {why}")
        return request

    def end(self, requests: str | Iterable[str] | None) -> list[SimpleNamespace]:
        """Forget the hibernated ones of these requests, or of all (None): their readers have gone.

        For None, images on disk stay there, for another engine: this process may be about to end.
        Return an object with `request_id` and `client_index` for each, as vLLM's finish_requests() returns. A request
        that is just leaving is in an image and still unfinished: it is not among them.
        """
        if self._images is None:
            return []
        held = [request_id for request_id in self.held() if not self._is_unfinished(request_id)]
        gone = self._leave_stored() if requests is None else []
        wanted = held if requests is None else [requests] if isinstance(requests, str) else list(requests)
        left = {each.request_id for each in gone}
        for request_id in [each for each in held if each in wanted and each not in left]:
            gone.append(SimpleNamespace(request_id=request_id, client_index=self._clients.pop(request_id)))
            if (drop := self._images.end(request_id)) is not None:
                self._hooks.call_ranks(drop)
        return gone

    def _leave_stored(self) -> list[SimpleNamespace]:
        """Forget the requests of images on disk, which stay there."""
        gone = []
        for image in [each["id"] for each in self.summaries() if each["path"]]:
            clients = dict(self._clients)
            gone += [
                SimpleNamespace(request_id=i, client_index=clients[i]) for i in self._forget_moved(self._images, image)
            ]
        return gone

    def held(self) -> dict[str, int]:
        """The requests that are hibernated and not being resumed, and how many output tokens each has."""
        return {
            request_id: tokens
            for image in self.summaries()
            if not image["resuming"]
            for request_id, tokens in image["requests"].items()
        }

    def summaries(self) -> list[dict]:
        return [] if self._images is None else self._images.summaries()

    def settle(self) -> None:
        """The engine stands still: requests whose KV has arrived wait for their turn from now on."""
        if admissions_of(self._scheduler) is None:
            return
        connector_sleep.settle(self._scheduler)

    def close(self) -> None:
        """The engine has ended."""
        self._scheduler.torpor_sessions = self._scheduler.torpor_preemptions = None
        if (admissions := admissions_of(self._scheduler)) is not None:
            admissions.images = None
        self._images = None


def unsupported(request: Request) -> list[str]:
    """Return the name of each property for which this request cannot leave its engine."""
    params = request.sampling_params
    checks = {
        "pooling": request.pooling_params is not None,
        "LoRA": request.lora_request is not None,
        "images, sounds or videos": bool(request.mm_features),
        "a prompt of embeddings": request.prompt_embeds is not None,
        "a prompt that comes in pieces": request.resumable,
        "KV of its prompt that another engine still has": has_remote_prompt(request),
        "a thinking budget": params is not None and params.thinking_token_budget is not None,
        "scores of given tokens in the prompt's places": params is not None
        and getattr(params, "prompt_logprob_token_ids", None) is not None,
    }
    found = [name for name, is_so in checks.items() if is_so]
    found += values.bound_to_process(request)
    return found or values.unsupported_status(request) + values.unknown_fields(request)


def tokens_with_kv(request: Request) -> int:
    """Return of how many tokens a request that leaves takes its KV along.

    0 if its runner has half of the log probabilities of a prompt: the runner loses them, so the request begins again.
    """
    params = request.sampling_params
    if params is not None and params.prompt_logprobs is not None and request.num_output_tokens == 0:
        return 0
    return request.num_computed_tokens


def _bound_to_its_engine(item: dict) -> str | None:
    """Why a request of a checkpoint cannot come into another engine."""
    engine, sampling = item["engine"], (item["sampling"] or {}).get("engine", {})
    checks = {
        engine.get("bound"): engine.get("bound"),
        "a thinking budget": sampling.get("thinking_token_budget") is not None,
        "scores of given tokens in the prompt's places": sampling.get("prompt_logprob_token_ids") is not None,
        "a pooling request": engine.get("pooling"),
        "LoRA": engine.get("adapter"),
        "images, sounds or videos": engine.get("features") or engine.get("features_elsewhere"),
        "a prompt of embeddings": engine.get("embeddings"),
        "its prompt is in no checkpoint": engine.get("elsewhere"),
    }
    return next((name for name, is_so in checks.items() if is_so), None)


def _of_runner(worker: dict, request_id: str) -> dict:
    """What a checkpoint has of a request as runner_v1.request_to_value() or runner_v2.request_to_value() gives it."""
    seeds = {item["id"]: item.get("seed") for item in worker["engine"].get("requests", ())}
    return {"generator": worker["generators"].get(request_id), "seed": seeds.get(request_id)}


def for_runners(item: dict) -> dict:
    names = ("id", "prompt_token_ids", "output_token_ids", "sampling")
    return {name: item[name] for name in names} | {"of_runners": item["engine"]["of_runners"]}
