# SPDX-License-Identifier: Apache-2.0
"""A process of the tests: vLLM differs in what one tier of torpor's needs, in a fork of this process for each.

Prints by change, and by "" for none, which tiers are off, and what was said in the log.
"""

import importlib
import io
import json
import logging
import os
import threading

from compat_process import forked
from doctored_process import add_a_field, take_a_function_away
from vllm.config import VllmConfig
from vllm.plugins import load_general_plugins

from torpor.vllm import plugin

# By the tier that alone needs it: a method, whose signature changes.
METHODS = {
    "early_wake": "vllm.v1.core.kv_cache_manager.KVCacheManager.get_computed_blocks",
    "connector": "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1.get_block_ids_with_load_errors",
    "hibernate": "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector.MultiConnector"
    ".get_num_new_matched_tokens",
    "fork": "vllm.v1.metrics.stats.PrefillStats.set",
    "other_connectors": "vllm.distributed.kv_transfer.kv_connector.factory.KVConnectorFactory.get_connector_class",
}
PARTS = ("connector", "portable", "fork", "server", "other_connectors")  # besides those that each engine has


def change(tier: str) -> None:
    if tier == "new_process":
        add_a_field()
    elif tier == "server":
        take_a_function_away()
    elif tier:
        owner, _, name = METHODS[tier].rpartition(".")
        module, _, cls = owner.rpartition(".")
        setattr(getattr(importlib.import_module(module), cls), name, lambda self, brand_new: None)


def look(tier: str) -> dict:
    change(tier)
    log = io.StringIO()
    logging.getLogger("vllm.torpor").addHandler(logging.StreamHandler(log))
    load_general_plugins()
    VllmConfig(additional_config={"torpor": {}})
    for part in PARTS:
        plugin.fits(part)
    return {"tiers": plugin.tiers(), "said": log.getvalue().splitlines()}


if __name__ == "__main__":
    os.environ["VLLM_LOGGING_LEVEL"] = "WARNING"
    assert threading.active_count() == 1, threading.enumerate()
    print("RESULT " + json.dumps({tier: forked(tier, look) for tier in ("", "new_process", "server", *METHODS)}))
