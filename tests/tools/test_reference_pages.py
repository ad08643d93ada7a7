# SPDX-License-Identifier: Apache-2.0
"""docs/reference against the code: how its pages are made, and that what differs or lacks a text is found."""

import dataclasses
import json
import re
import shutil

import pytest
from conftest import ROOT, inspector, started
from reference import command_page, errors_page, http_page, option_pages, python_page, text, write

import torpor
from torpor import errors
from torpor.vllm import options
from torpor.vllm.server import metrics, routes
from torpor.vllm.server.route_table import ROUTES


@pytest.fixture(scope="module")
def manual() -> dict:
    return json.loads(inspector("man", "--json").stdout)


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    problems: list[str] = []
    pages = write.pages(ROOT / "build/release/tools/torpor/torpor", problems)
    assert problems == []
    return pages


def sections(page: str, level: str = "###") -> dict[str, str]:
    """Return the text of each section whose heading is a name as code."""
    found = {}
    for part in re.split(r"^(?=#+ )", page, flags=re.M):
        if name := re.match(rf"{level} `([^`]+)`\n", part):
            found[name[1]] = part
    return found


def test_the_pages_are_those_of_the_code(made):
    assert write.differing(made, ROOT / "docs/reference", complete=True) == []


def test_a_page_that_differs_is_gone_or_is_stale_is_named_with_the_command(made, tmp_path):
    for name, page in made.items():
        (tmp_path / name).write_text(page)
    assert write.differing(made, tmp_path, complete=True) == []
    (tmp_path / "options.md").write_text(made["options.md"].replace("most", "least", 1))
    (tmp_path / "errors.md").unlink()
    (tmp_path / "old.md").touch()
    found = write.differing(made, tmp_path, complete=True)
    named = ("options.md", "errors.md", "old.md")
    assert found == [f"docs/reference/{name} differs from the code: run tools/dev reference" for name in named]


def test_lines_have_at_most_120_columns_and_links_lead_to_files(made):
    for name, page in made.items():
        assert [line for line in page.splitlines() if len(line) > text.COLUMNS] == [], name
        for link in re.findall(r"\]\(([^)#]+)", page):
            assert (ROOT / "docs/reference" / link).exists(), f"{name}: {link}"


def test_each_option_has_its_default_its_values_and_its_variable(made):
    shown = sections(made["options.md"]) | sections(made["options.md"], "####")
    assert (
        "default: `2`" in shown["retain_checkpoints"] and "`TORPOR_RETAIN_CHECKPOINTS`" in shown["retain_checkpoints"]
    )
    assert "values: `none`, `bf16`, `zstd`" in shown["compression"] and "default: not set" in shown["compression"]
    assert "range: 1 to 256" in shown["copy_threads"]
    assert "default: `256MiB`" in shown["--torpor-response-log-bytes"]
    assert "environment: `TORPOR_ADMIN_KEY`" in shown["--torpor-admin-key"]
    assert "default: `65536`" in shown["queue_blocks"] and "environment" not in shown["queue_blocks"]
    assert "- `threads` (whole number; default: `4`): Threads that move bytes." in made["options.md"]


def test_each_flag_of_a_server_that_a_document_names_is_one(made):
    known = {*re.findall(r"`(--torpor-[a-z-]+)`", made["options.md"]), "--torpor-help"}
    named = {}
    for page in ROOT.glob("docs/**/*.md"):
        named |= dict.fromkeys(re.findall(r"--torpor-[a-z]+(?:-[a-z]+)*", page.read_text()), page.name)
    assert len(named) > 30 and {flag: page for flag, page in named.items() if flag not in known} == {}


def test_an_option_without_a_text_is_a_problem(monkeypatch):
    @dataclasses.dataclass
    class Options:
        encrypt: bool = options.described(False, "switch", " ")

    monkeypatch.setattr(option_pages, "Options", Options)
    problems: list[str] = []
    option_pages.options_page(problems)
    assert problems == ["the option encrypt has no text"]


def test_a_variable_that_is_read_and_not_shown_is_a_problem_and_so_is_one_that_nothing_reads(tmp_path):
    for folder in ("base", "bindings/python"):
        (tmp_path / folder).mkdir(parents=True)
    known = option_pages.variables_read(ROOT)
    assert known["TORPOR_LOG"] == "base/log.cpp" and "TORPOR_CHECK_CAPTURE" not in known
    lines = [f'std::getenv("{name}");' for name in known if name not in ("TORPOR_LOG", "NO_COLOR")]
    (tmp_path / "base/all.cpp").write_text("\n".join([*lines, 'const char* value = std::getenv("TORPOR_NEW");']))
    (tmp_path / "bindings/python/more.py").write_text(
        '"TORPOR_SAID"; os.environ.get("TORPOR_OTHER"); "TORPOR_THIRD" in os.environ; os.environ["NO_COLOR"]'
    )
    problems: list[str] = []
    option_pages.environment_page(tmp_path, problems)
    assert problems == [
        "no page has the variable TORPOR_NEW, which base/all.cpp reads",
        "no page has the variable TORPOR_OTHER, which bindings/python/more.py reads",
        "no page has the variable TORPOR_THIRD, which bindings/python/more.py reads",
        "nothing reads the variable TORPOR_LOG of variables.toml",
    ]


def test_each_route_of_torpor_is_there_with_its_parameters_and_who_may_call_it(made):
    shown = sections(made["http.md"])
    own = {f"{method} {path}".replace(":path}", "}") for method, path in ROUTES if path.startswith("/torpor/")}
    assert own <= shown.keys() and "POST /sleep" in shown
    assert "Allowed callers: the admin key." in shown["POST /torpor/plan"]
    assert "anybody" in shown["GET /torpor/ready"] and "anybody" not in shown["GET /torpor/state"]
    assert "`level` (query, integer 0 to 2, default `1`)" in shown["POST /sleep"]
    assert "`to` (query, text, required)" in shown["POST /swap"]


def test_a_parameter_of_a_route_without_a_text_is_a_problem(monkeypatch):
    made = routes.routes

    def changed():
        router = made()
        for route in router.routes:
            if route.path == "/sleep":
                route.endpoint.__doc__ = "Put the engine to sleep.\n\nlevel: of the sleep.\n"
            if route.path == "/torpor/state":
                route.endpoint.__doc__ = None
        return router

    monkeypatch.setattr(http_page, "routes", changed)
    problems: list[str] = []
    http_page.http_page(problems)
    without = ("mode", "preserve_state", "to", "weights", "tags", "metadata")
    assert problems == [
        *(f"the docstring of POST /sleep says nothing of {name}" for name in without),
        "the route GET /torpor/state has no docstring",
    ]


def test_each_metric_has_its_type_and_the_values_of_its_labels(made):
    shown = sections(made["metrics.md"])
    assert "type: counter" in shown["torpor_operations_total"]
    assert "label `result`: `restored`, `extended`, `added`, `dropped`, `failed`" in shown["torpor_start_requests"]
    assert "`falling_asleep`" in shown["torpor_state"]
    assert "`onboard`, `offload`, `demote`, `publish`, `lookup`" in shown["torpor_offload_bytes_total"]
    assert all(f"`{tag}`" in shown["torpor_tag_bytes"] for tag in metrics._PARTS)


def test_each_error_has_its_code_and_what_other_programs_see_of_it(made):
    shown = sections(made["errors.md"], "##")
    assert shown.keys() == {cls.__name__ for cls in (*errors.Error.__subclasses__(), errors.Error)}
    damaged = shown["Damaged"]
    assert "code: `corruption`" in damaged and "exit code: 1" in damaged and "routes: 500" in damaged
    assert "also: `MemoryError`" in shown["NotEnoughRoom"] and "routes: 507" in shown["NotEnoughRoom"]


def test_a_code_that_python_does_not_have_is_a_problem(manual):
    problems: list[str] = []
    known = [each for each in manual["errors"] if each["error"] != "timeout"]
    errors_page.errors_page({"errors": [*known, {"error": "melted", "exit_code": 5}]}, problems)
    assert problems == [
        "torpor.errors has no class of the code melted", "base/status.h has no code timeout of torpor.errors"
    ]  # fmt: skip


def test_each_verb_has_its_arguments_and_what_its_json_has(manual):
    page = command_page.command_page(manual, [], [])
    for verb in manual["verbs"]:
        assert f"\n## torpor {verb['name']}\n" in page
    fits = page.split("\n## torpor fits\n")[1].split("\n## ")[0]
    assert "```\ntorpor fits PATH [options]\n```" in fits and "`--model" in fits and "`--json`: " in fits
    assert "--key-file" not in fits and page.count("Environment: `TORPOR_KEY_FILE`") == 1
    problems: list[str] = []
    bad = {"name": "--bad", "positional": False, "required": False, "takes": "", "repeats": False, "default": "",
           "environment": "", "text": ""}  # fmt: skip
    command_page.command_page(
        manual | {"verbs": [*manual["verbs"], {"name": "new", "text": "", "arguments": [bad], "json": ""}]},
        [],
        problems,
    )
    assert problems == ["the verb new of torpor has no text", "the argument --bad of torpor has no text"]


def test_the_commands_of_the_example_print_what_the_page_shows(tmp_path):
    page = (ROOT / "docs/reference/cli.md").read_text()
    shown = dict(re.findall(r"^```\n\$ (.*)\n([^`]*)```$", page, flags=re.M))
    words = {command.split()[1] for command in shown}
    assert {"ls", "tree", "requests", "show", "blocks", "prefix", "diff", "verify"} <= words
    program = ROOT / "build/release/tools/torpor/torpor"
    for command, output in shown.items():
        assert command_page.output_of(command, program, ROOT) == output, command
    copy = shutil.copytree(ROOT / "examples", tmp_path / "examples")
    with open(copy / "checkpoints/g-000002/chunks-r0", "r+b") as file:
        file.seek(5000)
        file.write(b"changed")
    assert command_page.output_of("torpor verify examples/checkpoints", program, tmp_path) != output
    sizes = {path: path.stat().st_size for path in (ROOT / "examples/checkpoints").rglob("*") if path.is_file()}
    assert len(sizes) >= 8 and sum(sizes.values()) < 400_000


@pytest.mark.long
def test_the_script_makes_such_checkpoints(tmp_path):
    done = started(ROOT / "examples/make_checkpoints.py", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    made, kept = (
        json.loads(inspector("requests", folder / "checkpoints", "--json").stdout)["requests"]
        for folder in (tmp_path, ROOT / "examples")
    )
    same = ("queue", "status", "prompt_tokens", "output_tokens", "computed_tokens", "sampling")
    assert [[each[name] for name in same] for each in made] == [[each[name] for name in same] for each in kept]
    assert (tmp_path / "tokenizer.json").read_bytes() == (ROOT / "examples/tokenizer.json").read_bytes()


def test_the_python_page_has_what_torpor_exports_and_the_shared_docstrings(made):
    page = made["python.md"]
    shown = sections(page) | sections(page, "####")
    assert {f"torpor.{name}()" for name in ("swap", "read_checkpoint")} <= shown.keys()
    assert set(torpor.__all__) - {"Error", "__version__", "errors"} <= set(re.findall(r"\w+", page))
    assert "- `level`: 0 only pauses" in shown["llm.sleep()"] and 'to: str = "host",' in shown["llm.sleep()"]
    assert "Take running or waiting requests" in shown["llm.torpor.hibernate()"]
    assert "[semantics.md](../semantics.md)" in shown["llm.sleep()"]


def test_a_public_function_without_a_docstring_is_a_problem(tmp_path):
    package = tmp_path / python_page.PACKAGE
    shutil.copytree(ROOT / python_page.PACKAGE, package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    with open(package / "memory.py", "a") as file:
        file.write("\n\ndef melt(tag: str) -> None:\n    pass\n\n\ndef _inner() -> None:\n    pass\n")
    problems: list[str] = []
    python_page.python_page(tmp_path, problems)
    assert problems == ["memory.py: melt has no docstring"]


def test_docstrings_become_lists_code_and_links():
    doc = """Do it, `n` > 1 * 2.

        x = 1

    a, b: two of them,
        and more
    other: is no argument. See docs/vllm.md.
    """
    assert text.of_docstring(doc, ("a", "b")) == (
        "Do it, `n` > 1 \\* 2.\n\n```python\nx = 1\n```\n\n"
        "- `a`, `b`: Two of them, and more other: is no argument. See [vllm.md](../vllm.md)."
    )
    assert text.argument_texts(doc, ("a", "b"))["b"].startswith("two of them, and more")
    assert text.paragraph("word " * 22 + "`GET /a/long/route` end").splitlines()[1] == "`GET /a/long/route` end"
