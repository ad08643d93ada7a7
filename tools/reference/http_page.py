# SPDX-License-Identifier: Apache-2.0
"""http.md: torpor's routes by their OpenAPI schema, and all routes by who may call them, awake and asleep."""

from __future__ import annotations

import inspect

from fastapi import FastAPI
from reference.text import argument_texts, item, linked, of_docstring, page, paragraph, plain, sentence
from torpor.vllm.server.route_table import ROUTES, UNKNOWN, Asleep, Rule, Who
from torpor.vllm.server.routes import routes

_KEYED = ("/v1/", "/v2/", "/inference/", "/cohere/")  # vLLM asks for a client's key there
_METHODS = ("get", "post", "delete", "put")


def public_routes() -> list[str]:
    """Return the routes that answer without a key, as METHOD PATH; what is below a mounted path ends with /*."""
    found = []
    for (method, path), rule in ROUTES.items():
        if rule.who is Who.ANYBODY and not path.startswith(_KEYED):
            found.append(f"GET {path}/*" if method == "MOUNT" else f"{method} {path}")
    return [route for route in found if f"{route}/*" not in found]


def http_page(problems: list[str]) -> str:
    """Add to `problems` each route of torpor and each parameter without a text, and routes without a rule."""
    app = FastAPI()
    app.include_router(routes())
    own = [(method.upper(), path, call) for path, calls in app.openapi()["paths"].items()
           for method, call in calls.items() if method in _METHODS]  # fmt: skip
    declared = {
        (method, route.path): route.endpoint.__doc__ or "" for route in app.routes for method in route.methods or ()
    }
    kinds: dict[Rule, list[str]] = {}
    for (method, path), rule in ROUTES.items():
        kinds.setdefault(rule, []).append(f"GET {path}/*" if method == "MOUNT" else f"{method} {path}")
    return page(
        "HTTP routes",
        paragraph(
            "The server is vLLM's, with the routes below. A running server has its whole schema at `/openapi.json`. "
            "See [server.md](../server.md) for keys, errors and progress."
        ),
        "## Routes of torpor",
        *(_route(method, path, call, declared, problems) for method, path, call in own),
        "## Public routes",
        paragraph(
            "With keys of clients and of the admin configured, these routes answer without a key, and no others do. "
            "vLLM has some of them only with its own switches. `/*` stands for everything below a path."
        ),
        "\n".join(item(f"`{route}`") for route in public_routes()),
        "## All routes, by who may call them and what a sleep does to them",
        paragraph(
            "vLLM has some of these routes only in some of its releases, or with its own switches. Without any key "
            "configured, a call for which a client's key suffices is open to anybody."
        ),
        *(_kind(rule, listed) for rule, listed in kinds.items()),
        "### Other routes",
        _rule(UNKNOWN),
    )


def _rule(rule: Rule) -> str:
    return "\n".join(
        (
            item(f"who: {plain(sentence(rule.who.value))}"),
            item(f"while it sleeps: {plain(sentence(rule.asleep.value))}"),
        )
    )


def _rule_of_own(rule: Rule, route: str) -> str:
    """Return the allowed callers, and what a sleep does to it, if it does anything."""
    who = "anybody, also without a key" if route in public_routes() else rule.who.value
    asleep = "" if rule.asleep is Asleep.SERVED else f" While the engine sleeps: {rule.asleep.value}."
    return paragraph(plain(f"Allowed callers: {who}.{asleep}"))


def _kind(rule: Rule, listed: list[str]) -> str:
    heading = f"### {rule.who.name.lower()}, {rule.asleep.name.lower().replace('_', ' ')}"
    return f"{heading}\n\n{_rule(rule)}\n\n{paragraph(', '.join(f'`{route}`' for route in listed))}"


def _route(method: str, path: str, call: dict, declared: dict, problems: list[str]) -> str:
    rule = next((rule for (verb, where), rule in ROUTES.items() if verb == method and _same(where, path)), None)
    doc = next((text for (verb, where), text in declared.items() if verb == method and _same(where, path)), "")
    if rule is None:
        problems.append(f"route_table.py has no {method} {path}")
    if not doc:
        problems.append(f"the route {method} {path} has no docstring")
    parameters = call.get("parameters", [])
    names = [each["name"] for each in parameters]
    texts = argument_texts(doc, names)
    problems += [f"the docstring of {method} {path} says nothing of {name}" for name in names if name not in texts]
    lead = _without(doc, names)
    lines = [_parameter(each, texts.get(each["name"], "")) for each in parameters]
    rules = _rule_of_own(rule, f"{method} {path}") if rule else ""
    listed = "\n".join(lines)
    blocks = [f"### `{method} {path}`", of_docstring(lead), rules, listed]
    return "\n\n".join(block for block in blocks if block)


def _same(declared: str, path: str) -> bool:
    return declared.replace(":path}", "}") == path


def _without(doc: str, names: list[str]) -> str:
    """Return a docstring without its lines about parameters."""
    kept, about = [], False
    for line in inspect.cleandoc(doc).splitlines():
        if line.split(":")[0] in names:
            about = True
        elif not line.startswith(" "):
            about = False
        if not about:
            kept.append(line)
    return "\n".join(kept).strip()


def _parameter(parameter: dict, text: str) -> str:
    words = [parameter["in"], _type(parameter["schema"])]
    default = parameter["schema"].get("default")
    if parameter.get("required") and parameter["in"] == "query":
        words.append("required")
    if default is not None:
        words.append(f"default `{_written(default)}`")
    return item(f"`{parameter['name']}` ({', '.join(words)}): {linked(plain(sentence(text)))}")


def _written(default) -> str:
    if isinstance(default, float):
        return f"{default:g}"
    return str(default).lower() if isinstance(default, bool) else str(default)


def _type(schema: dict) -> str:
    if "anyOf" in schema:
        return " or ".join(_type(each) for each in schema["anyOf"] if each.get("type") != "null")
    if "enum" in schema:
        return " or ".join(f"`{each}`" for each in schema["enum"] if each is not None)
    if schema.get("type") == "array":
        return f"{_type(schema['items'])}, repeatable"
    if "maximum" in schema and "minimum" in schema:
        return f"{schema['type']} {schema['minimum']:g} to {schema['maximum']:g}"
    return schema.get("type", "text").replace("string", "text").replace("boolean", "`true` or `false`")
