# SPDX-License-Identifier: Apache-2.0
"""The base of torpor's two KV connectors, connector.py and portable.py: nothing happens within a layer."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA


class ConnectorBase(KVConnectorBase_V1, SupportsHMA):
    """A connector that loads a request's blocks before its step, and stores blocks after theirs."""

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # what is not stored is computed again, and no more

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A request waits for its load before it is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer, attn_metadata, **kwargs) -> None:
        """Blocks are stored when their step is over."""

    def wait_for_save(self) -> None:
        """The scheduler keeps blocks until they are stored."""

    def request_finished_all_groups(self, request, block_ids: tuple[list[int], ...]) -> tuple[bool, dict | None]:
        return self.request_finished(request, [])
