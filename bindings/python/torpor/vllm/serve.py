# SPDX-License-Identifier: Apache-2.0
"""vLLM's OpenAI-compatible server with torpor:
`python -m torpor.vllm.serve MODEL [vLLM's options] [--torpor-… options]`.

The same as `vllm serve` with VLLM_PLUGINS=torpor and the options in the environment (docs/server.md).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import MISSING, dataclass, fields
from importlib.metadata import entry_points
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from torpor.errors import Busy, Error, Unsupported
from torpor.vllm import connector_options
from torpor.vllm.near_names import meant
from torpor.vllm.options import Options, holds_memory_by
from torpor.vllm.paths import expanded
from torpor.vllm.server.settings import Settings, variable

if TYPE_CHECKING:
    from argparse import _ArgumentGroup

_TRY_AGAIN = 75  # exit code of sysexits.h, EX_TEMPFAIL: the same start may succeed later
_VALUES_OF_SWITCHES = ("1", "0", "true", "false", "yes", "no", "on", "off")


def main(arguments: list[str]) -> int:
    rest = take_options(arguments)
    os.environ.setdefault("TORPOR_ENABLED", "1")  # who calls this asks for torpor
    # vLLM loads routes only from plugins that are named, and then no other plugin that is not.
    named = os.environ.get("VLLM_PLUGINS")
    names = (
        named.split(",") if named is not None else [point.name for point in entry_points(group="vllm.general_plugins")]
    )
    os.environ["VLLM_PLUGINS"] = ",".join(dict.fromkeys([name for name in names if name] + ["torpor"]))
    os.environ.setdefault("PYTHONHASHSEED", "0")  # the keys of prefix blocks depend on it

    from torpor.vllm.plugin import require

    require("server")
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    from vllm.logger import configure_logging_from_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from torpor.vllm.compat import lookup
    from torpor.vllm.server import preflight

    lookup("vllm.entrypoints.serve.utils.api_utils", "cli_env_setup")()
    parser = lookup("vllm.entrypoints.launchers.cli_args", "make_arg_parser")(
        FlexibleArgumentParser(prog="python -m torpor.vllm.serve")
    )
    # For vLLM's --help, and for the file of its --config, which it reads by itself. take_options() has the values.
    ours = _add_options(parser.add_argument_group("torpor", "Sleep, wake and checkpoints: --torpor-… options."))
    options = parser.parse_args(rest)
    for name in ours.keys() & vars(options).keys():
        delattr(options, name)
    if getattr(options, "model_tag", None) is not None:
        options.model = options.model_tag
    if (options.api_server_count or 1) > 1 or options.headless or getattr(options, "grpc", False):
        parser.error("torpor needs one API server in this process: leave out --api-server-count, --headless and --grpc")
    if (options.data_parallel_size or 1) > 1:
        parser.error("torpor needs one engine: leave out --data-parallel-size, or serve with vLLM's own server")
    if not holds_memory_by(options):
        next_step = "serve on the CPU with the option enabled, on a GPU with gpu_preserve_state, or use vllm serve"
        raise Unsupported("torpor does not hold this engine's memory", next_step)
    configure_logging_from_args(options)
    lookup("vllm.entrypoints.launchers.cli_args", "validate_parsed_serve_args")(options)
    preflight.check(options, Options.of(options), Settings.from_environment())
    uvloop.run(run_server(options))
    return 0


@dataclass(frozen=True)
class _Flag:
    name: str  # --torpor-…
    variable: str  # of the environment
    switch: bool  # takes no value


def take_options(arguments: list[str]) -> list[str]:
    """Put --torpor-… into the environment, which all processes of the server share. Return the rest: vLLM's.

    Options may stand in the YAML file of vLLM's --config, too. The file stays among the rest.
    """
    parser = argparse.ArgumentParser(
        prog="python -m torpor.vllm.serve",
        usage="%(prog)s MODEL [any option of vLLM's server] [--torpor-…]",
        description=__doc__.split("\n\n")[0],
        add_help=False,
        allow_abbrev=False,
    )
    known = _add_options(parser)
    if "--torpor-help" in arguments:
        parser.print_help()
        print("\nvLLM's own options: python -m torpor.vllm.serve --help=all")
        sys.exit(0)
    path, words = _of_config_file(arguments, parser)
    in_file, _ = _parsed(parser, known, words, f"{path}: ")
    given, rest = _parsed(parser, known, arguments)
    spelled = {}
    for options, where in ((in_file, f"{path}: "), (given, "")):  # the command line wins, as with vLLM's own options
        for name, value in vars(options).items():
            os.environ[known[name].variable] = value
            spelled[known[name].variable] = where + known[name].name
    Options.check_environment(spelled)
    settings = Settings.from_environment(spelled)
    _follow_owner(settings, parser)
    settings.admin()  # said now if it cannot be had, not after the engine's start
    if settings.checkpoint_interval_seconds > 0:
        os.environ.setdefault("TORPOR_INCREMENTAL", "1")
    return rest


def _parsed(
    parser: argparse.ArgumentParser, known: dict[str, _Flag], words: list[str], where: str = ""
) -> tuple[argparse.Namespace, list[str]]:
    """Parse what is torpor's of these words. End the program at a mistake in it; its message begins with `where`."""
    given, rest = parser.parse_known_args(words)
    switches = {flag.name for flag in known.values() if flag.switch}
    for flag, word in pairwise(words):
        if flag in switches and word.lower() in _VALUES_OF_SWITCHES:
            parser.error(f"{flag} takes no value: leave out {word!r}")
    if unknown := [word for word in rest if word.startswith("--torpor-")]:
        wrong = unknown[0].split("=")[0]
        option = wrong.removeprefix("--torpor-").replace("-", "_")
        if option in connector_options.NAMES:
            values = json.dumps({"torpor": {"offload": "eager"} | {option: "…"}}, ensure_ascii=False)
            parser.error(f"{where}there is no option {wrong}; give it in --additional-config '{values}'")
        nearest = meant(wrong, [flag.name for flag in known.values()])
        parser.error(
            f"{where}there is no option {wrong}; {nearest}python -m torpor.vllm.serve --torpor-help lists them"
        )
    return given, rest


def _of_config_file(arguments: list[str], parser: argparse.ArgumentParser) -> tuple[str, list[str]]:
    """Return the path of the YAML file of vLLM's --config, and torpor's options there as words of a command line.

    vLLM reads the file a second time; it says what is wrong with the file itself.
    """
    if "--config" not in arguments[:-1]:
        return "", []
    import yaml

    path = arguments[arguments.index("--config") + 1]
    try:
        with open(path) as file:
            read = yaml.safe_load(file)
    except (OSError, ValueError, yaml.YAMLError):
        return path, []
    words = []
    for key, value in (read if isinstance(read, dict) else {}).items():
        flag = f"--{key}".replace("_", "-")
        if not flag.startswith("--torpor-"):
            continue
        if isinstance(value, dict | list) or value is None:
            parser.error(f"{path}: {key} has one value: write a word or a number, not {value!r}")
        if value is True:
            words.append(flag)
        elif value is not False:
            words.append(f"{flag}={value}")
    return path, words


def _follow_owner(settings: Settings, parser: argparse.ArgumentParser) -> None:
    """Give a standby the directory of its owner."""
    if not settings.standby_of:
        return
    given = os.environ.setdefault("TORPOR_CHECKPOINT_DIR", settings.standby_of)
    if os.path.realpath(expanded(given)) != os.path.realpath(settings.standby_of):
        parser.error(
            f"--torpor-standby-of {settings.standby_of} and --torpor-checkpoint-dir {given} differ: leave out "
            "--torpor-checkpoint-dir"
        )


def _add_options(to: argparse.ArgumentParser | _ArgumentGroup) -> dict[str, _Flag]:
    """Add all options of the engine and the server. Return each by its name in a namespace."""
    known: dict[str, _Flag] = {}

    def add(name: str, default, text: str, choices: tuple[str, ...], in_environment: str) -> None:
        flag = f"--torpor-{name.replace('_', '-')}"
        if default not in (None, "", False, MISSING):
            text += f" (default: {default})"
        switch = default is False
        kind: dict[str, Any] = {"metavar": "VALUE"}
        if switch:
            kind = {"action": "store_const", "const": "1"}
        elif choices:
            kind = {"choices": choices}
        action = to.add_argument(flag, help=text, default=argparse.SUPPRESS, **kind)
        known[action.dest] = _Flag(flag, in_environment, switch)

    for option in fields(Options):
        if option.name == "connector":  # not of one value: --kv-transfer-config, or additional_config
            continue
        text = f"of the engine: {option.metadata['help']}"
        add(option.name, option.default, text, option.metadata["choices"], f"TORPOR_{option.name.upper()}")
    for setting in fields(Settings):
        help_text, choices = setting.metadata["help"], setting.metadata["choices"]
        add(setting.name, setting.default, help_text, choices, variable(setting))
    return known


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Error as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(_TRY_AGAIN if isinstance(problem, Busy) else 2)
