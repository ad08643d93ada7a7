# SPDX-License-Identifier: Apache-2.0
"""torpor in vLLM's OpenAI-compatible server: the entry point `vllm.endpoint_plugins`. See docs/server.md."""

from __future__ import annotations

from argparse import Namespace

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute


class ServerPlugin:
    """Routes and life of a server; vLLM calls attach_router() and then init_state(), once each."""

    name = "torpor"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        if not wanted(app.state.args):
            return
        from torpor.vllm.server.access import Access, let_admin_be_client
        from torpor.vllm.server.gate import Gate
        from torpor.vllm.server.routes import routes
        from torpor.vllm.server.settings import Settings

        settings = Settings.from_environment()
        access = Access.of(app.state.args, settings)
        let_admin_be_client(app.state.args, settings)  # before vLLM adds its guard, around the gate
        include(app, routes())
        app.add_middleware(Gate, access=access)

    async def init_state(self, engine_client, state, args: Namespace) -> None:
        if not wanted(args):
            return
        from torpor.vllm.server import front
        from torpor.vllm.server.life import Server
        from torpor.vllm.server.settings import Settings

        model = state.openai_serving_models.base_model_paths[0].name
        state.torpor = Server(engine_client, state, Settings.from_environment(), model)
        await state.torpor.start()
        front.begin(state.torpor)


def include(app: FastAPI, router: APIRouter) -> None:
    """Its routes answer, not those of vLLM's development mode at the same paths: vLLM 0.31 puts its own first."""
    ours: dict[str, set[str]] = {}
    for route in router.routes:
        ours.setdefault(route.path, set()).update(route.methods)
    for route in app.routes:
        if isinstance(route, APIRoute):
            route.methods -= ours.get(route.path, set())
    app.router.routes[:] = [route for route in app.routes if not isinstance(route, APIRoute) or route.methods]
    app.include_router(router)


def wanted(args: Namespace) -> bool:
    """Whether torpor serves here. Otherwise, as where vLLM is unknown to it, this is vLLM's server without torpor."""
    from torpor.vllm import plugin
    from torpor.vllm.asking import asks
    from torpor.vllm.options import holds_memory_by

    return asks(args) and plugin.fits("server") and holds_memory_by(args)
