# SPDX-License-Identifier: Apache-2.0
"""options.md and environment.md: what describes itself in options.py, connector_options.py, offloading_tier.py and
server/settings.py.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import MISSING, Field, fields
from pathlib import Path

from devtool.documents import slug
from reference.text import code, item, linked, page, paragraph, plain, sentence
from torpor.vllm import described
from torpor.vllm import options as engine_options
from torpor.vllm.connector_options import ConnectorOptions
from torpor.vllm.offloading_tier import TierOptions
from torpor.vllm.options import Options
from torpor.vllm.server.settings import Settings, flag, variable

_KINDS = {
    described.SWITCH: "switch",
    described.TEXT: "text",
    described.PATH: "path",
    described.BYTES: "bytes",
    described.WHOLE: "whole number",
    described.NUMBER: "number",
}
_VARIABLES = Path(__file__).with_name("variables.toml")


def described_fields(kind) -> list[Field]:
    return [option for option in fields(kind) if option.metadata]


def options_page(problems: list[str]) -> str:
    """Add to `problems` what lacks a text."""
    engine, server = described_fields(Options), described_fields(Settings)
    connector, tier = described_fields(ConnectorOptions), described_fields(TierOptions)
    for option in (*engine, *connector, *tier, *server):
        if not option.metadata["help"].strip():
            problems.append(f"the option {option.name} has no text")
    plain_options = [option for option in connector if not option.metadata.get("advanced")]
    advanced = [option for option in connector if option.metadata.get("advanced")]
    return page(
        "Options",
        paragraph(
            "torpor has options of the engine, of its KV connector, of its tier under vLLM's own offloading and of "
            "its server. An option with a wrong value ends the start with an error that names the option. A name that "
            "does not exist ends the start with an error that lists the options."
        ),
        "How a value is written:",
        "\n".join(
            (
                item("switch: `true` or `false`; in the environment `1` or `0`; a switch of the server has no value."),
                item("bytes: a number, or text with KiB, MiB, GiB or TiB, as `4GiB`."),
                item("path: `~` is the user's home directory."),
                item('"not set" stands for `None`, or for an empty text.'),
            )
        ),
        "## Engine",
        paragraph(
            'They stand in `additional_config={"torpor": {…}}`, or in the environment variable that is named, which '
            "holds for all engines of the process. The engine's own value wins. A server has each of them as the flag "
            "that is named."
        ),
        *(_engine_option(option) for option in engine),
        "## KV connector",
        paragraph(
            'They stand beside the engine\'s options in `additional_config={"torpor": {…}}`, or in '
            "`kv_connector_extra_config`. See [vllm.md](../vllm.md#offloading-kv-while-serving)."
        ),
        *(_option(option, option.name) for option in plain_options),
        "### Advanced",
        paragraph("These options have a group of their own. A user who has not measured needs none of them."),
        code('"advanced": {"queue_blocks": 1024}', "json"),
        *(_option(option, option.name, level="####") for option in advanced),
        "## TorporTier",
        paragraph(
            "They stand beside `type` and `module_path` of an entry of `secondary_tiers`. See "
            "[offloading.md](../offloading.md)."
        ),
        "\n".join(_of_tier(option) for option in tier),
        "## Server",
        paragraph(
            "They are flags of `python -m torpor.vllm.serve`, which `--torpor-help` lists, or environment variables. "
            "See [server.md](../server.md)."
        ),
        *(_option(option, flag(option), [f"environment: `{variable(option)}`"]) for option in server),
    )


def _of_tier(option: Field) -> str:
    """Return one line: most of them are options of the KV connector, too."""
    about = option.metadata
    kind = ", ".join(f"`{choice}`" for choice in about["choices"]) or _KINDS[about["kind"]]
    text = plain(_marked(sentence(about["help"]), about["choices"]))
    return item(f"`{option.name}` ({kind}; default: {_default(option)}): {text}")


def _engine_option(option: Field) -> str:
    name = option.name.replace("_", "-")
    where = [f"environment: `{_variable_of(option)}`", f"flag of a server: `--torpor-{name}`"]
    return _option(option, option.name, where)


def _variable_of(option: Field) -> str:
    (found,) = (name for name in engine_options.VARIABLES if name == f"TORPOR_{option.name.upper()}")
    return found


def _option(option: Field, name: str, where: list[str] | None = None, level: str = "###") -> str:
    about = option.metadata
    facts = [f"type: {_KINDS[about['kind']]}", f"default: {_default(option)}"]
    if about["choices"]:
        facts[0] = f"values: {', '.join(f'`{choice}`' for choice in about['choices'])}"
    numeric = about["kind"] in (described.WHOLE, described.NUMBER)
    if numeric and (about["least"], about["most"]) != (None, None):
        facts.append(_range(about["least"], about["most"]))
    if needing := about.get("needs_log"):
        facts.append("needs the response log" if ... in needing else f"`{needing[0]}` needs the response log")
    blocks = [f"{level} `{name}`", paragraph(plain(_marked(sentence(about["help"]), about["choices"])))]
    if about["details"]:
        blocks.append(paragraph(linked(plain(_marked(about["details"], about["choices"])))))
    return "\n\n".join([*blocks, "\n".join(item(fact) for fact in (*facts, *(where or ())))])


def _marked(text: str, choices: tuple[str, ...]) -> str:
    """Return the text with its values as code where a sentence about one begins: `eager: …`, `eager copies …`."""
    for choice in choices:
        text = re.sub(rf"(^|[.;:] ){choice}(?=: | [a-z]+s )", rf"\1`{choice}`", text)
    return text


def _range(least: float | None, most: float | None) -> str:
    if most is None:
        return f"least: {least:g}"
    return f"range: {least:g} to {most:g}"


def _default(option: Field) -> str:
    default = option.default
    if default is None or default == "":
        return "not set"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    if isinstance(default, float):
        return f"`{default:g}`"
    if option.metadata["kind"] == described.BYTES and default and default % (1 << 20) == 0:
        return f"`{default >> 20}MiB`"
    assert default is not MISSING
    return f"`{default}`"


# --- environment ------------------------------------------------------------------------------------------------------


def environment_page(root: Path, problems: list[str]) -> str:
    """Add to `problems` each variable that code reads and no page has, and each that a page has and no code reads."""
    groups = tomllib.loads(_VARIABLES.read_text())["group"]
    of_options = {_variable_of(option): option.name for option in described_fields(Options)}
    of_settings = {variable(option): flag(option) for option in described_fields(Settings)}
    known = {*of_options, *of_settings, *(each["name"] for group in groups for each in group["variable"])}
    read = variables_read(root)
    problems += [f"no page has the variable {name}, which {read[name]} reads" for name in sorted(read.keys() - known)]
    named = {each["name"] for group in groups for each in group["variable"]}
    problems += [f"nothing reads the variable {name} of variables.toml" for name in sorted(named - read.keys())]

    def links(names: dict[str, str]) -> str:
        return "\n".join(item(f"`{name}`: [`{option}`](options.md#{slug(option)})") for name, option in names.items())

    blocks = []
    for group in groups:
        blocks += [f"## {group['title']}", paragraph(plain(linked(group["text"])))]
        for each in group["variable"]:
            default = f" Default: {each['default']}." if "default" in each else ""
            blocks.append(f"### `{each['name']}`\n\n" + paragraph(plain(linked(sentence(each["text"]) + default))))
    return page(
        "Environment variables",
        paragraph(plain(linked(_OF_OTHERS))),
        "## Options of an engine",
        paragraph("Each is for all engines of the process. Any of them turns torpor on."),
        links(of_options),
        "## Options of a server",
        links(of_settings),
        *blocks,
    )


_OF_OTHERS = """An engine or a server with torpor refuses to start if the environment has a name that is nearly one of \
these, such as `TORPOR_KEYFILE`, or `TORPOR_OFFLOAD`, an option that has no variable. It ignores other names that \
begin with `TORPOR_`, and all that Kubernetes sets for a Service, as `TORPOR_SERVICE_HOST` and \
`TORPOR_PORT_8000_TCP`."""
_NAME = r"(?:TORPOR|AWS)_[A-Z0-9_]*[A-Z0-9]|NO_COLOR|XDG_RUNTIME_DIR|VLLM_PLUGINS|PYTHONHASHSEED"
_READ_IN_CPP = re.compile(rf'"({_NAME})"')
_READ_IN_PYTHON = re.compile(
    rf"""environ(?:\.get\(|\.setdefault\(|\[)["']({_NAME})["']|["']({_NAME})["'] (?:not )?in os"""
)
_FOLDERS = ("base", "allocator", "offload", "kvcache", "scheduler_state", "checkpoint", "engine", "console", "bindings",
            "remote", "tools/torpor")  # fmt: skip
# Read for tests alone.
_OF_TESTS = {"TORPOR_CHECK_FILE_CALLS", "TORPOR_CHECK_CAPTURE"}


def variables_read(root: Path) -> dict[str, str]:
    """Return the environment variables that the library and the program read, each with a file that does."""
    found: dict[str, str] = {}
    for folder in _FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".cpp", ".h"):
                names = _READ_IN_CPP.findall(path.read_text())
            elif path.suffix == ".py":
                names = ["".join(match) for match in _READ_IN_PYTHON.findall(path.read_text())]
            else:
                continue
            found |= dict.fromkeys(names, str(path.relative_to(root)))
    return {name: file for name, file in found.items() if name not in _OF_TESTS}
