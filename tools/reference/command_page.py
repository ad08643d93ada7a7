# SPDX-License-Identifier: Apache-2.0
"""cli.md: the verbs of the program `torpor`, from `torpor man --json`."""

from __future__ import annotations

from reference.text import code, item, page, paragraph, plain, sentence


def command_page(manual: dict, example: list[str], problems: list[str]) -> str:
    """`example`: blocks that show commands on the example checkpoint. Add to `problems` what lacks a text."""
    everywhere = _everywhere(manual)
    codes = "\n".join(item(f"`{each['code']}`: {plain(sentence(each['text']))}") for each in manual["exit_codes"])
    return page(
        "Command line: torpor",
        paragraph(plain(manual["description"])),
        paragraph("`tools/dev torpor` builds it if need be. See [the inspector](../../tools/torpor/README.md)."),
        "## Arguments of every command",
        "\n".join(_argument(each, problems) for each in everywhere),
        "## Exit codes",
        codes,
        *(["## Example", *example] if example else []),
        *(_verb(verb, everywhere, problems) for verb in manual["verbs"]),
    )


def _everywhere(manual: dict) -> list[dict]:
    """Return the arguments that every verb with answers in JSON has."""
    asked = [verb["arguments"] for verb in manual["verbs"] if verb["json"]]
    return [each for each in asked[0] if all(each in others for others in asked)]


def _verb(verb: dict, everywhere: list[dict], problems: list[str]) -> str:
    if not verb["text"]:
        problems.append(f"the verb {verb['name']} of torpor has no text")
    own = [each for each in verb["arguments"] if each not in everywhere]
    places = [_place(each) for each in own if each["positional"]]
    usage = " ".join(["torpor", verb["name"], *places, *(["[options]"] if len(places) < len(own) else [])])
    blocks = [f"## torpor {verb['name']}", paragraph(plain(sentence(verb["text"]))), code(usage)]
    if own:
        blocks.append("\n".join(_argument(each, problems) for each in own))
    if verb["json"]:
        blocks.append(paragraph(f"`--json`: {plain(verb['json'])}"))
    return "\n\n".join(blocks)


def _place(argument: dict) -> str:
    name = argument["name"].upper() + (" …" if argument["repeats"] else "")
    return name if argument["required"] else f"[{name}]"


def _argument(argument: dict, problems: list[str]) -> str:
    if not argument["text"]:
        problems.append(f"the argument {argument['name']} of torpor has no text")
    name = argument["name"].upper() if argument["positional"] else argument["name"].replace(",", ", ")
    taken = f" {argument['takes']}" if argument["takes"] else ""
    more = [f"Default: `{argument['default']}`."] if argument["default"] else []
    more += [f"Environment: `{argument['environment']}`."] if argument["environment"] else []
    more += ["Required."] if argument["required"] and not argument["positional"] else []
    return item(" ".join([f"`{name}{taken}`: {plain(sentence(argument['text']))}", *more]))
