# SPDX-License-Identifier: Apache-2.0
"""python.md: signatures and docstrings of the public Python API, read from the source and not imported."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import dataclass
from pathlib import Path

from reference.text import code, item, of_docstring, page, paragraph, plain, sentence
from torpor.vllm import front_end_methods

PACKAGE = "bindings/python/torpor"
_WIDEST = 112


@dataclass(frozen=True)
class Part:
    """A section of the page. `names`: of the file; none: all that is public. `owner`: what a method is called on."""

    title: str
    file: str
    names: tuple[str, ...] = ()
    owner: str = ""
    text: str = ""


PARTS = (
    Part("torpor", "vllm/exchange.py", ("swap",), "torpor"),
    Part("Checkpoints", "_core.pyi", ("read_checkpoint", "EngineCheckpoint"), "torpor"),
    Part("LLM and LLMEngine", "vllm/front_end_methods.py", ("Blocking",), "llm",
         "`AsyncLLM` has the same methods. They are awaited there."),
    Part("llm.torpor", "vllm/front_end_methods.py", ("Torpor",), "llm.torpor",
         "`torpor` of an `AsyncLLM` has the same methods. They are awaited there."),
    Part("llm.torpor.sessions", "vllm/residency_calls.py", ("Sessions",), "llm.torpor.sessions",
         "Where the KV blocks of sessions lie whose requests have ended: "
         "[sessions.md](../sessions.md#where-finished-sessions-lie). `sessions` of an `AsyncLLM` has the same methods. "
         "They are awaited there."),
    Part('llm.torpor.sessions["ID"]', "vllm/residency_calls.py", ("Session",), 'llm.torpor.sessions["ID"]',
         "One session, whether it is known or not. Other requests are served meanwhile."),
    Part("torpor.vllm", "vllm/frontend.py", ("attach", "Report", "WakeReport"), "torpor.vllm",
         "What the entries of a report mean: [vllm.md](vllm.md#calls)."),
    Part("Results", "vllm/engine_values.py"),
    Part("Progress", "vllm/progress.py", ("Progress",)),
    Part("torpor.memory", "memory.py", (), "memory"),
    Part("torpor.console", "console/__init__.py", ("connect", "Engine"), "torpor.console"),
    Part("torpor.client", "client/__init__.py", ("OpenAI", "AsyncOpenAI", "http_client", "async_http_client"),
         "torpor.client"),
    Part("torpor.client: errors and interruptions", "client/answers.py", ("Interruption", "NotResumable")),
    Part("torpor.torch_memory_saver", "torch_memory_saver.py", (), "torpor.torch_memory_saver"),
    Part("torpor.trl", "trl.py", ("PartialRolloutGRPOTrainer", "Phase", "Group")),
    Part("torpor.staleness", "staleness.py", ("least_bound", "taken_in_time"), "torpor.staleness"),
)  # fmt: skip
# Their docstring belongs to how they are made, or is of the class that vLLM's or TRL's own has.
_SILENT = {"from_value", "from_dict"}


def python_page(root: Path, problems: list[str]) -> str:
    """Add to `problems` each public function, method and class without a docstring."""
    blocks = [
        paragraph(
            "With vLLM there is nothing to import: torpor is a plugin, and vLLM's own classes have its methods. Errors "
            "are in [errors.md](errors.md)."
        )
    ]
    for part in PARTS:
        blocks += _part(part, _tree(root, part.file), problems)
    return page("Python API", *blocks)


def _tree(root: Path, file: str) -> _Source:
    text = (root / PACKAGE / file).read_text()
    return _Source(file, ast.parse(text), text.splitlines())


@dataclass(frozen=True)
class _Source:
    file: str
    tree: ast.Module
    lines: list[str]


def _part(part: Part, source: _Source, problems: list[str]) -> list[str]:
    nodes = {node.name: node for node in source.tree.body if isinstance(node, _NAMED) and node.name[0] != "_"}
    missing = [name for name in part.names if name not in nodes]
    problems += [f"{part.file} has no {name}, which python.md is to show" for name in missing]
    shown = [nodes[name] for name in part.names or nodes if name in nodes]
    blocks = [f"## {part.title}"]
    whole = len(part.names) == 0 or part.title in ("torpor.console", "torpor.client")
    if whole and (doc := ast.get_docstring(source.tree)):
        blocks.append(of_docstring(doc))
    if part.text:
        blocks.append(of_docstring(part.text))
    for node in shown:
        if isinstance(node, ast.ClassDef):
            blocks += _class(part, source, node, problems, alone=part.names == (node.name,) and part.owner != "")
        else:
            blocks.append(_function(part, node, part.owner, problems))
    return blocks


_NAMED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _class(part: Part, source: _Source, node: ast.ClassDef, problems: list[str], alone: bool) -> list[str]:
    """`alone`: the section is about this class, and its methods are named by how they are called."""
    fields = [each for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)]
    fields = [each for each in fields if each.target.id[0] != "_"]
    doc = ast.get_docstring(node) or ""
    names = [each.target.id for each in fields]
    if not doc and not fields:
        problems.append(f"{part.file}: {node.name} has no docstring")
    blocks = [] if alone else [f"### class `{node.name}`"]
    if doc and not alone:
        blocks.append(of_docstring(doc, names))
    if fields and not any(f"{name}:" in doc for name in names):
        blocks.append("\n".join(_field(source, each) for each in fields))
    owner = part.owner if alone else node.name
    for each in node.body:
        if (
            isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
            and each.name[0] != "_"
            and each.name not in _SILENT
        ):
            decorated = [ast.unparse(decorator) for decorator in each.decorator_list]
            if any(word.endswith(".setter") for word in decorated):
                continue
            blocks.append(_function(part, each, owner, problems, method=True, level="###" if alone else "####"))
    return blocks


def _field(source: _Source, node: ast.AnnAssign) -> str:
    """Return the line of a field: its type, and the comment behind it."""
    text = source.lines[node.end_lineno - 1][node.end_col_offset :]
    comment = text.partition("#")[2].strip()
    meaning = f": {plain(sentence(comment))}" if comment else ""
    return item(f"`{node.target.id}` (`{ast.unparse(node.annotation)}`){meaning}")


def _function(part: Part, node, owner: str, problems: list[str], method: bool = False, level: str = "###") -> str:
    doc = ast.get_docstring(node) or _given_docstring(node)
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    names = [each.arg for each in (*arguments, *filter(None, (node.args.vararg, node.args.kwarg)))]
    is_property = any(ast.unparse(each) in ("property", "cached_property") for each in node.decorator_list)
    if not doc:
        problems.append(f"{part.file}: {node.name} has no docstring")
    called = f"{owner}.{node.name}" if owner else node.name
    heading = f"{level} `{called}`" if is_property else f"{level} `{called}()`"
    return "\n\n".join([heading, code(_signature(node, method, is_property), "python"), of_docstring(doc, names)])


def _given_docstring(node) -> str:
    """Return the docstring that the decorator `_documented(TEXT)` gives, which several functions share."""
    for each in node.decorator_list:
        if isinstance(each, ast.Call) and ast.unparse(each.func) == "_documented":
            value = front_end_methods
            for name in ast.unparse(each.args[0]).split("."):
                value = getattr(value, name)
            return inspect.cleandoc(str(value))
    return ""


def _signature(node, method: bool, is_property: bool) -> str:
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    if is_property:
        return f"{node.name}:{returns.removeprefix(' ->')}"
    arguments = node.args
    is_static = any(ast.unparse(each) == "staticmethod" for each in node.decorator_list)
    if method and not is_static:
        only = arguments.posonlyargs  # the first of them, if there are any, is `self`
        arguments = ast.arguments(
            only[1:], arguments.args[0 if only else 1 :], arguments.vararg, arguments.kwonlyargs, arguments.kw_defaults,
            arguments.kwarg, arguments.defaults,
        )  # fmt: skip
    start = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    written = [each.replace("'", '"') for each in _arguments(arguments)]
    line = f"{start}{node.name}({', '.join(written)}){returns}"
    if len(line) <= _WIDEST:
        return line
    return f"{start}{node.name}(\n" + "".join(f"    {each},\n" for each in written) + f"){returns}"


def _arguments(arguments: ast.arguments) -> list[str]:
    """Return each argument as it is written, with its type and default; and the marks between them."""
    found: list[str] = []
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    for each, default in zip(positional, defaults, strict=True):
        found.append(_argument(each, default))
    if arguments.posonlyargs:
        found.insert(len(arguments.posonlyargs), "/")
    if arguments.vararg:
        found.append(f"*{ast.unparse(arguments.vararg)}")
    elif arguments.kwonlyargs:
        found.append("*")
    found += [_argument(each, default)
              for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]  # fmt: skip
    if arguments.kwarg:
        found.append(f"**{ast.unparse(arguments.kwarg)}")
    return found


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    written = re.sub(r"\s+", " ", ast.unparse(argument))
    if default is None:
        return written
    equals = "=" if argument.annotation is None else " = "
    return f"{written}{equals}{ast.unparse(default)}"
