"""torpor in vLLM's OpenAI-compatible server: the entry point `vllm.endpoint_plugins`. docs/server.md is for its operators."""

from __future__ import annotations

from argparse import Namespace

from fastapi import FastAPI


class ServerPlugin:
    """Routes and life of a server; vLLM calls attach_router() and then init_state(), once each."""

    name = "torpor"
    required_tasks = ("generate",)

    def attach_router(self, app: FastAPI) -> None:
        from torpor.vllm.server.gate import Gate
        from torpor.vllm.server.routes import routes

        app.include_router(routes(app.state.args))
        app.add_middleware(Gate, state=app.state)

    async def init_state(self, engine_client, state, args: Namespace) -> None:
        from torpor.vllm.server.life import Server
        from torpor.vllm.server.settings import Settings

        state.torpor = Server(engine_client, state, Settings.from_environment(), state.openai_serving_models.base_model_paths[0].name)
        await state.torpor.start()
