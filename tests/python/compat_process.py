# SPDX-License-Identifier: Apache-2.0
"""Started by test_compat.py: lets torpor meet several vLLMs, each in a fork of this process, which has the stock one.

Takes a JSON list of cases, {"change": code, "environment": {}, "additional_config": {}}; prints what was seen when an
engine with that configuration had been described.
"""

import asyncio
import importlib
import io
import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from argparse import Namespace

import vllm
from fastapi import FastAPI
from vllm.config import VllmConfig
from vllm.plugins import load_general_plugins

from torpor import errors
from torpor.vllm import compat, plugin, serve
from torpor.vllm.asking import asks
from torpor.vllm.server import ServerPlugin

STOCK = vllm.__version__  # a case may change it


def vllms_own() -> list:
    """Every module and class of vLLM that the manifest names."""
    found = []
    for part in compat.manifest(STOCK).PARTS.values():
        for module in part:
            loaded = importlib.import_module(module.name)
            found += [loaded, *(getattr(loaded, cls.name) for cls in module.classes)]
    return found


def look(case: dict) -> dict:
    os.environ.update(case["environment"])
    exec(case["change"], {"vllm": vllm})
    before = [(owner, dict(vars(owner))) for owner in vllms_own()]
    log = io.StringIO()
    logging.getLogger("vllm.torpor").addHandler(logging.StreamHandler(log))
    load_general_plugins()
    VllmConfig(additional_config=case["additional_config"])
    touched = [
        f"{owner.__name__}.{name}"
        for owner, names in before
        for name in {*names, *vars(owner)} - {"__warningregistry__"}
        if vars(owner).get(name) is not names.get(name)
    ]
    app = FastAPI()
    app.state.args = Namespace(additional_config=case["additional_config"], api_key=None)
    stock_routes = len(app.routes)
    server = ServerPlugin()
    server.attach_router(app)
    routes = len(app.routes) - stock_routes + len(app.user_middleware)
    if not routes:
        asyncio.run(
            server.init_state(None, app.state, app.state.args)
        )  # touches nothing, or it would fail without an engine
    said, inactive = log.getvalue().splitlines(), plugin.inactive()
    refused = []  # of calls that ask for torpor themselves
    calls = [lambda: plugin.require("server"), lambda: importlib.import_module("torpor.vllm").attach]
    if inactive:
        calls.append(lambda: serve.main(["some-model"]))
    for call in calls if asks(app.state.args) else ():
        try:
            call()
        except errors.Unsupported as problem:
            refused.append(str(problem))
    return {"touched": touched, "said": said, "inactive": inactive, "routes": routes, "refused": refused}


def forked(case, look: Callable = look) -> dict:
    """Return what look(case) returns in a fork of this process."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.close(reader)
        try:
            seen = look(case)
        except BaseException as problem:
            seen = {"failed": f"{type(problem).__name__}: {problem}"}
        os.write(writer, json.dumps(seen).encode())  # short: a pipe holds it
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as text:
        seen = json.load(text)
    os.waitpid(child, 0)
    return seen


if __name__ == "__main__":
    vllms_own()
    assert threading.active_count() == 1, threading.enumerate()
    print("RESULT " + json.dumps([forked(case) for case in json.loads(sys.argv[1])]))
