# SPDX-License-Identifier: Apache-2.0
"""Started by test_unchanged.py as a new interpreter: an engine asks for torpor in a process that has no worker.

Prints which modules of vLLM that imported, why torpor is inactive, if it is, and whether vLLM knows torpor's loader
once it has imported its own.
"""

import importlib
import json
import sys

from vllm.config import VllmConfig
from vllm.plugins import load_general_plugins

from torpor.vllm import plugin

importlib.import_module("vllm.entrypoints.llm")  # as every front end does
load_general_plugins()
before = set(sys.modules)
VllmConfig(additional_config={"torpor": {}})
imported = sorted(name for name in sys.modules.keys() - before if name.startswith("vllm."))
loaders = importlib.import_module("vllm.model_executor.model_loader")  # behind the engine's question
knows = "torpor" in loaders._LOAD_FORMAT_TO_MODEL_LOADER
print("RESULT " + json.dumps({"imported": imported, "inactive": plugin.inactive(), "knows": knows}), flush=True)
