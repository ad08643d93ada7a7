# SPDX-License-Identifier: Apache-2.0
"""What users write against what there is: options, calls and their arguments in examples, words of tools/dev. No
engine. The pages of docs/reference are made from the code: test_reference_pages.py."""

import ast
import dataclasses
import inspect
import re
import subprocess

import pytest
from conftest import ROOT, inspector

from torpor import memory
from torpor.vllm import options
from torpor.vllm.front_end_methods import Awaited, AwaitedTorpor, Blocking, Torpor
from torpor.vllm.serve import take_options
from torpor.vllm.server.settings import Settings

CALLS = ("sleep", "wake_up", "checkpoint", "updating_weights")


def test_the_help_of_the_server_shows_every_option_of_server_and_engine(capsys):
    with pytest.raises(SystemExit):
        take_options(["--torpor-help"])
    shown = set(re.findall(r"--torpor-([a-z0-9-]+)", capsys.readouterr().out))
    declared = (*dataclasses.fields(Settings), *dataclasses.fields(options.Options))
    wanted = {option.name.replace("_", "-") for option in declared if option.metadata}
    assert shown - {"help"} == wanted


def test_the_two_kinds_of_front_end_have_the_same_calls_and_the_docs_name_every_argument():
    pages = "".join((ROOT / f"docs/{name}.md").read_text() for name in ("semantics", "vllm", "sessions"))
    for name in CALLS:
        blocking, awaited = (inspect.signature(getattr(kind, name)) for kind in (Awaited, Blocking))
        assert blocking.parameters == awaited.parameters, name
        doc = inspect.getdoc(getattr(Blocking, name))
        for argument in list(blocking.parameters)[1:]:
            assert re.search(rf"\b{argument}\b", doc), f"{name}() does not document {argument}"
            assert re.search(rf"\b{argument}\b", pages), f"no page has {name}({argument}=…)"
    asked = {name: value for name, value in vars(Torpor).items() if not name.startswith("_")}
    for name, value in asked.items():
        awaited = getattr(AwaitedTorpor, name)
        if isinstance(value, property):
            assert isinstance(awaited, property) and f"torpor.{name}[" in pages, name
            continue
        assert inspect.iscoroutinefunction(awaited), name
        assert inspect.signature(value) == inspect.signature(awaited), name
        assert name == "call" or f"torpor.{name}(" in pages, f"no page has llm.torpor.{name}()"


def test_examples_in_the_docs_call_what_exists_with_arguments_that_exist():
    known = {name: set(inspect.signature(getattr(Blocking, name)).parameters) for name in CALLS}
    known["plan_sleep"] = set(inspect.signature(Torpor.plan_sleep).parameters)
    of_memory = [name for name, value in vars(memory).items() if inspect.isfunction(value)]
    known |= {f"memory.{name}": set(inspect.signature(getattr(memory, name)).parameters) for name in of_memory}
    wrong = []
    reference = set((ROOT / "docs/reference").glob("*.md"))  # made of the docstrings
    for page in [ROOT / "README.md", *({*(ROOT / "docs").rglob("*.md")} - reference)]:
        for name, arguments in re.findall(r"\b((?:memory\.)?[a-z_]+)\(([^()]*)\)", page.read_text()):
            if name in known:
                named = set(re.findall(r"\b([a-z_]+)=", re.sub(r'"[^"]*"', "", arguments)))
                wrong += [f"{page.name}: {name}({word}=…)" for word in named - known[name]]
    assert wrong == []


def test_the_documented_verbs_of_the_inspector_are_those_it_has():
    shown = inspector("--help").stdout
    verbs = set(
        re.findall(r"^  ([a-z]+) {2,}", shown[shown.index("SUBCOMMANDS") if "SUBCOMMANDS" in shown else 0 :], re.M)
    )
    table = (ROOT / "tools/torpor/README.md").read_text().split("`--json` prints")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    documented = {word for cell in cells for word in re.findall(r"`([a-z]+)", cell)}
    assert verbs and verbs == documented


def test_every_word_of_tools_dev_is_in_its_manual():
    shown = subprocess.run([ROOT / "tools/dev", "--help"], capture_output=True, text=True, check=True).stdout
    source = (ROOT / "tools/devtool/commands.py").read_text()
    words = set(re.findall(r'^        "([a-z_]+)": ', source, re.M))
    assert words and [word for word in sorted(words) if not re.search(rf"\b{word}\b", shown)] == []


# What programs import, and whether its arguments are its own: those of others mean what they mean there.
PUBLIC = {
    "errors.py": False, "memory.py": True, "torch_memory_saver.py": False, "trl.py": False, "verl/__init__.py": False,
    "verl/server.py": False, "console/__init__.py": True,
}  # fmt: skip


def public_calls(tree: ast.Module):
    """Each function and method whose name and class are public: its full name, itself, whether it has a self."""
    for scope in (tree, *(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name[0] != "_")):
        for node in scope.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name[0] != "_":
                prefix = "" if scope is tree else f"{scope.name}."
                yield prefix + node.name, node, scope is not tree


@pytest.mark.parametrize("file", PUBLIC)
def test_every_public_call_has_a_signature_with_types_and_says_what_it_does(file):
    tree = ast.parse((ROOT / "bindings/python/torpor" / file).read_text())
    calls = list(public_calls(tree))
    assert calls or file == "verl/__init__.py"
    problems = []
    for name, call, has_self in calls:
        decorated = {ast.unparse(each).split("(")[0] for each in call.decorator_list}
        doc = ast.get_docstring(call) or ""
        if not doc and not any(each.endswith(".setter") for each in decorated):
            problems.append(f"{name} says nothing")
        arguments = [*call.args.posonlyargs, *call.args.args, *call.args.kwonlyargs][has_self:]
        problems += [f"{name}: {each.arg} has no type" for each in arguments if each.annotation is None]
        if call.returns is None:
            problems.append(f"{name} does not say what it returns")
        if PUBLIC[file]:
            problems += [f"{name} does not say what {each.arg} is" for each in arguments if each.arg not in doc]
    assert problems == []


def test_each_word_of_tools_dev_has_help_of_its_own():
    manual = subprocess.run([ROOT / "tools/dev", "--help"], capture_output=True, text=True, check=True).stdout
    words = dict.fromkeys(re.findall(r"^  tools/dev ([a-z_-]+)", manual, re.M))
    assert len(words) > 15
    for word in words.keys() - {"demo", "gpu_check", "torpor", "simulate"}:  # they answer themselves
        shown = subprocess.run([ROOT / "tools/dev", word, "--help"], capture_output=True, text=True, check=True).stdout
        assert shown.startswith(f"  tools/dev {word} ") and shown.count("tools/dev ") == 1 and shown.strip() in manual
