# SPDX-License-Identifier: Apache-2.0
"""vLLM's load_format="torpor": a new process fills its weights from a checkpoint and reads none of the model's files.

vLLM makes the model, its parameters get their places in a region of the checkpoint's layout, the region is filled, each
piece proved, and then vLLM processes the weights as if it had loaded them: what it derives from them is its own work.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.config import replace
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.model_executor.model_loader import get_model_loader, register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from torpor import _core
from torpor.errors import Error, Incompatible, InvalidArgument, Unsupported
from torpor.vllm import memory, weights_layout
from torpor.vllm.fingerprint import of_weights
from torpor.vllm.options import Options
from torpor.vllm.paths import expanded
from torpor.vllm.weights_layout import OWN_FILES

FORMAT = "torpor"


@dataclass(frozen=True)
class StoredWeights:
    """One rank's weights in a checkpoint."""

    path: str
    generation: int
    id: bytes
    layout: dict  # weights_layout.describe()


class TorporLoader(BaseModelLoader):
    def __init__(self, load_config):
        super().__init__(load_config)
        extra = load_config.model_loader_extra_config or {}
        if not isinstance(extra, dict) or extra.keys() - {"checkpoint"}:
            raise InvalidArgument(
                f"model_loader_extra_config is {extra!r}",
                'give {"checkpoint": …}, or nothing for the newest one of checkpoint_dir',
            )
        self._checkpoint: str | None = extra.get("checkpoint")
        self._vllm_config = None

    def download_model(self, model_config) -> None:
        pass

    def load_model(self, vllm_config, model_config, prefix: str = "") -> torch.nn.Module:
        worker_memory = memory.being_loaded()
        if worker_memory is None:
            raise Unsupported(
                'load_format="torpor" fills the memory of torpor, which does not hold this engine\'s',
                "it needs vLLM on the CPU with the option enabled",
            )
        if worker_memory.filled_from is not None:  # a draft model: its weights are in no checkpoint
            return self._own_files().load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        if model_config.quantization is not None:
            raise Unsupported(
                f'load_format="torpor" with the quantization {model_config.quantization}: vLLM rearranges such weights '
                "when it has loaded them",
                OWN_FILES,
            )
        self._vllm_config = vllm_config
        return super().load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)

    def load_weights(self, model: torch.nn.Module, model_config) -> None:
        worker_memory = memory.being_loaded()
        if self._vllm_config is None or worker_memory is None:
            raise Unsupported('load_format="torpor" outside of the start of an engine', "use reload_weights()")
        worker_memory.fill(model, self._stored(self._vllm_config, worker_memory.rank))

    def get_all_weights(self, model_config, model: torch.nn.Module):
        """For reload_weights(): new weights come from files."""
        return self._own_files().get_all_weights(model_config, model)

    def _own_files(self):
        return get_model_loader(replace(self.load_config, load_format="auto", model_loader_extra_config={}))

    def _stored(self, vllm_config, rank: int) -> StoredWeights:
        options = Options.of(vllm_config)
        path = expanded(self._checkpoint or options.checkpoint_dir)
        if path is None:
            raise InvalidArgument(
                'load_format="torpor" without a checkpoint',
                'set the option checkpoint_dir, or model_loader_extra_config={"checkpoint": …}',
            )
        # The first rank says which one: another could become the newest meanwhile.
        chosen = self._describe(vllm_config, path, options)
        chosen = get_pp_group().broadcast_object(get_tp_group().broadcast_object(chosen))
        if isinstance(chosen, Error):
            raise chosen
        compare(chosen["fingerprint"], of_weights(vllm_config, options))
        if rank >= len(chosen["layouts"]) or chosen["layouts"][rank] is None:
            raise Incompatible(
                f"{chosen['path']} does not say how its weights lie: an earlier torpor wrote it", OWN_FILES
            )
        layout = weights_layout.parse(chosen["layouts"][rank])
        return StoredWeights(chosen["path"], chosen["generation"], chosen["id"], layout)

    def _describe(self, vllm_config, path: str, options: Options) -> dict | Error:
        """Of the checkpoint there, or the newest one, or what this data parallel rank has in a set of them."""
        try:
            data_parallel_rank = vllm_config.parallel_config.data_parallel_index
            found = _core.describe_checkpoint(path, data_parallel_rank, options.key_file)
        except Error as problem:
            return problem
        found["layouts"] = [(worker or {}).get("weights") for worker in found.pop("workers")]
        return found


def compare(stored: dict[str, str], own: dict[str, str]) -> None:
    """What decides about the weights, before any is read. The wake compares the rest."""
    differing = [
        f"{name} is {stored.get(name)} there and {value} here"
        for name, value in own.items()
        if stored.get(name) != value
    ]
    if differing:
        raise Incompatible(
            f"the checkpoint has the weights of another model or configuration: {'; '.join(differing)}",
            "start the engine as the one that slept was started, or with the model's own files",
        )


def register() -> None:
    register_model_loader(FORMAT)(TorporLoader)
