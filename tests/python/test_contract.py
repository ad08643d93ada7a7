# SPDX-License-Identifier: Apache-2.0
"""The source of vLLM, read without importing it: equal to what the imported one shows; and tools/dev contract."""

from __future__ import annotations

import importlib
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import vllm
from conftest import result_of
from contract_process import of_class, signature

from torpor.vllm import compat
from torpor.vllm.compat import guards, imported
from torpor.vllm.compat.changes import ABSENT, Changed, Moved, changed, find
from torpor.vllm.compat.guards import Class, Module
from torpor.vllm.compat.source import SourceTree

ROOT = Path(__file__).parents[2]
PACKAGE = Path(vllm.__file__).parent
EVERYTHING = {module.name: module for part in compat.manifest(vllm.__version__).PARTS.values() for module in part}


@pytest.fixture(scope="module")
def tree() -> SourceTree:
    return SourceTree(PACKAGE)


@pytest.fixture(scope="module")
def differences(zygote) -> dict[str, list[str]]:
    """By module; of a process in which torpor has replaced nothing."""
    return result_of(zygote.run([Path(__file__).parent / "contract_process.py"]))


@pytest.mark.parametrize("name", EVERYTHING)
def test_source_and_imported_module_say_the_same(differences, name):
    assert differences[name] == []


def test_the_source_of_this_vllm_has_no_problems(tree):
    assert guards.problems(EVERYTHING.values(), tree) == []


# --- all ways to define something, in a package that both can read ----------------------------------------------------

TOY = {
    "__init__": """
        from typing import TYPE_CHECKING
        from .shapes import Plain as Renamed
        from torpor_toy.stars import *
        if TYPE_CHECKING:
            from torpor_toy.shapes import Record
            unset: int
        else:
            def __getattr__(name):
                if name == "unset":
                    return 7
                if name == "Record":
                    from torpor_toy.shapes import Record
                    return Record
                raise AttributeError(name)
    """,
    "stars": """
        from torpor_toy.shapes import record
        def starred(a, *, b=None): pass
        _hidden = 1
    """,
    "shapes": """
        import dataclasses
        import enum
        import functools
        import sys
        from dataclasses import dataclass, KW_ONLY, InitVar
        from typing import Any, ClassVar, Generic, NamedTuple, TYPE_CHECKING, TypeVar, dataclass_transform, overload
        import msgspec
        if TYPE_CHECKING:
            from nowhere import OnlyForTyping
        T = TypeVar("T")

        @dataclass_transform()
        def record(cls=None, **options):
            return dataclasses.dataclass(cls) if cls is not None else lambda cls: dataclasses.dataclass(cls)

        class Plain(Generic[T]):
            __slots__ = ("slot",)
            CONSTANT = 3
            declared: int
            def __init__(self, first, /, second=-1, *rest, third: int = 0x10, fourth="it's", **more):
                self.slot = first
            @overload
            def many(self, a: int): ...
            @overload
            def many(self, a: str, b: int): ...
            def many(self, a, b=(1, 2), c={"x": [None]}): pass
            other_name = many
            @property
            def whole(self): return 1
            @whole.setter
            def whole(self, value): self.from_setter = value
            @functools.cached_property
            def once(self): return 1
            @classmethod
            def make(cls, *, size=1.5): pass
            @staticmethod
            def alone(a, b=True): pass
            if sys.version_info < (3,):
                def conditional(self, old): pass
            else:
                def conditional(self, old): self.by_condition, self.by_tuple = old, 1

        class Derived(Plain[int]):
            def alone(self, another): self.own: int = 1

        class Last(Derived, Plain): pass
        class Beside(Plain): pass
        class Diamond(Beside, Derived): pass

        class Kind(enum.Enum):
            ONE = 1
            TWO = enum.auto()

        @dataclass
        class Record:
            a: int
            b: ClassVar[int] = 1
            c: InitVar[int] = 2
            _: KW_ONLY
            d: int = 5
            not_a_field = 6

        @dataclasses.dataclass(slots=True)
        class MoreRecord(Record):
            e: "list[int]" = dataclasses.field(default_factory=list)

        class NoRecord(Record):
            f: int = 1

        @record
        class ByOurDecorator:
            a: int

        @record(option=1)
        class ByOurDecoratorWithOptions(ByOurDecorator):
            b: Any = None

        class Tuple(NamedTuple):
            x: int
            y: int = 2

        class Struct(msgspec.Struct, array_like=True, omit_defaults=True):
            m: int
            n: list[int] | None = None

        class MoreStruct(Struct):
            o: int = 1

        class Many:
            def __init__(self):
                MANY_FIELDS

        class ManyOfAnObjectThatAFunctionKeeps:
            def __init__(self):
                self.function = lambda: self
                MANY_FIELDS

        Alias = Derived
        function = Plain
        try:
            from nowhere import fallback
        except ImportError:
            def fallback(a, b): pass

        async def waits(a, *args): pass
        value = 5
    """,
}

MANY_FIELDS = "; ".join(f"self.field_{number} = {number}" for number in range(300))  # more than a byte can number

CLASSES = {
    "Renamed": Class("Renamed"),
    "Plain": Class(
        "Plain",
        dict.fromkeys(["__init__", "many", "other_name", "make", "alone", "conditional", "CONSTANT", "nothing"], ""),
        properties="whole once many",
        members="CONSTANT declared",
    ),
    "Derived": Class("Derived", dict.fromkeys(["alone", "many"], "")),
    "Last": Class("Last", {"alone": ""}),
    "Diamond": Class("Diamond", {"alone": ""}),
    "Kind": Class("Kind", members="ONE TWO"),
    "Alias": Class("Alias"),
} | {
    name: Class(name)
    for name in (
        "Record", "MoreRecord", "NoRecord", "ByOurDecorator", "ByOurDecoratorWithOptions", "Tuple", "Struct",
        "MoreStruct", "Many", "ManyOfAnObjectThatAFunctionKeeps",
    )
}  # fmt: skip


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy") / "torpor_toy"
    folder.mkdir()
    for name, text in TOY.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text).replace("MANY_FIELDS", MANY_FIELDS))
    sys.path.insert(0, str(folder.parent))
    yield SourceTree(folder)
    sys.path.remove(str(folder.parent))


@pytest.mark.parametrize(
    "module, name", [("torpor_toy" if name in ("Renamed",) else "torpor_toy.shapes", name) for name in CLASSES]
)
def test_every_kind_of_class_is_read_as_it_is(toy, module, name):
    read, seen = toy.module(module).cls(name), imported.module(module).cls(name)
    found = of_class(read, CLASSES[name])
    assert found == of_class(seen, CLASSES[name])
    assert not found["has"] - CLASSES[name].touched()


def test_the_toy_shows_what_it_is_for(toy):
    cls = toy.module("torpor_toy.shapes").cls
    assert cls("Last").fields() == {"slot", "from_setter", "by_condition", "by_tuple", "own"}
    assert cls("Last").signature("alone") == "self, another"
    assert cls("NoRecord").fields() == cls("Record").fields() == {"a", "d"}
    assert cls("MoreStruct").fields() == {"m", "n", "o"}


@pytest.mark.parametrize(
    "module, names",
    [
        ("torpor_toy", "Renamed Record unset starred record shapes stars _hidden nothing TYPE_CHECKING"),
        ("torpor_toy.shapes", "Plain Alias dataclass OnlyForTyping fallback waits value nothing"),
    ],
)
def test_every_kind_of_name_is_found(toy, module, names):
    read, seen = toy.module(module), imported.module(module)
    importlib.import_module("torpor_toy.stars")
    for name in names.split():
        assert read.has(name) == seen.has(name), name
    for name in ("starred", "record", "fallback", "waits", "value", "nothing"):
        assert signature(read, name) == signature(seen, name), name


def test_definitions_of_which_either_may_hold_must_be_the_same(tmp_path):
    folder = tmp_path / "either"
    folder.mkdir()
    (folder / "__init__.py").write_text(
        "import os\nif os.name == 'nt':\n    def f(a): pass\nelse:\n    def f(b): pass\n"
    )
    tree = SourceTree(folder)
    assert guards.problems([Module("either", {"f": "b"})], tree) == ["either.f takes (a) or (b), torpor expects (b)"]


def test_what_is_not_there_is_named(toy):
    found = guards.problems(
        [
            Module("torpor_toy.nowhere"),
            Module(
                "torpor_toy.shapes", {"value": ""}, (Class("Gone"), Class("Record", fields="a", exact=True)), ("gone",)
            ),
        ],
        toy,
    )
    assert found == [
        "torpor_toy.nowhere cannot be used: ModuleNotFoundError: No module named 'torpor_toy.nowhere'",
        "torpor_toy.shapes has no Gone",
        "torpor_toy.shapes has no gone",
        "torpor_toy.shapes.value cannot be called",
        "torpor_toy.shapes.Record has a field d that torpor does not know",
    ]


# --- a manifest by what differs from another one's -------------------------------------------------------------------

OLD = {
    "engine": (
        Module(
            "torpor_toy.shapes", {"fallback": "a, b", "waits": "a"}, (Class("Plain", fields="slot gone", exact=True),)
        ),
        Module("torpor_toy.old", names=("starred", "here")),
        Module("torpor_toy.gone", names=("anything",)),
    ),
    "cpu": (Module("torpor_toy.shapes", classes=(Class("Plain", {"many": "self"}, "slot", members="CONSTANT"),)),),
}
CHANGES = {
    "torpor_toy.shapes.waits": ABSENT,
    "torpor_toy.shapes.Plain": Changed({"many": "self, a"}, without="gone", also="new", used="once"),
    "torpor_toy.old.starred": Moved("torpor_toy.stars.starred"),
    "torpor_toy.gone": ABSENT,
}


def test_a_manifest_is_written_by_its_changes():
    assert changed(OLD, CHANGES) == {
        "engine": (
            Module("torpor_toy.shapes", {"fallback": "a, b"}, (Class("Plain", fields="slot new", exact=True),)),
            Module("torpor_toy.old", names=("here",)),
            Module("torpor_toy.stars", names=("starred",)),
        ),
        "cpu": (
            Module(
                "torpor_toy.shapes", classes=(Class("Plain", {"many": "self, a"}, "slot once", members="CONSTANT"),)
            ),
        ),
    }
    moved = changed(OLD, {"torpor_toy.old": Moved("torpor_toy.new")})["engine"][1]
    assert moved == Module("torpor_toy.new", names=("starred", "here"))


@pytest.mark.parametrize(
    "name, change",
    [
        ("torpor_toy.typo", ABSENT),
        ("torpor_toy.shapes.Typo", Changed()),
        ("torpor_toy.shapes.Plain", Changed(without="typo")),
    ],
)
def test_a_change_of_nothing_is_a_mistake(name, change):
    with pytest.raises(ValueError, match=r"typo|Typo"):
        changed(OLD, CHANGES | {name: change})


def test_what_has_another_place_is_found_there(toy):
    changes = CHANGES | {"torpor_toy.whole": Moved("torpor_toy.shapes")}
    assert find(changes, "torpor_toy.old", "starred").__module__ == "torpor_toy.stars"
    assert find(changes, "torpor_toy.whole", "value") == find(changes, "torpor_toy.shapes", "value") == 5
    assert find(changes, "torpor_toy.shapes", "waits") is find(changes, "torpor_toy.gone", "anything") is None


@pytest.mark.parametrize(
    "version, expected",
    [("0.32.5", "0.32"), ("0.32.0+cpu", "0.32"), ("0.99.0", max(compat.VERSIONS)), ("0.1", min(compat.VERSIONS)),
     ("1.0", max(compat.VERSIONS)), ("unknown", max(compat.VERSIONS)), ("dev", max(compat.VERSIONS))],
)  # fmt: skip
def test_an_unknown_version_is_compared_with_the_nearest(version, expected):
    assert compat.nearest(version) == expected


# --- tools/dev contract -----------------------------------------------------------------------------------------------


def contract(*arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "tools/dev", "contract", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


@pytest.mark.long
def test_the_command_says_what_changed(tmp_path):
    done = contract(PACKAGE)
    assert (done.returncode, done.stdout.count("\n")) == (0, 1) and "0 differences" in done.stdout, done
    (changed := tmp_path / "vllm").mkdir()
    for path in PACKAGE.rglob("*.py"):
        copy = changed / path.relative_to(PACKAGE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.symlink_to(path)
    request = changed / "v1/request.py"
    text = request.read_text().replace("def update_block_hashes(self)", "def update_block_hashes(self, salt)")
    text = text.replace(
        "        self.request_id = request_id\n", "        self.wishes = self.request_id = request_id\n"
    )
    request.unlink()
    request.write_text(text)
    done = contract(changed)
    assert done.returncode == 1 and done.stdout.splitlines()[:2] == [
        "engine: vllm.v1.request.Request.update_block_hashes takes (self, salt), torpor expects (self)",
        "engine: vllm.v1.request.Request has a field wishes that torpor does not know",
    ], done
    assert "2 differences" in done.stdout
    lines = done.stdout.splitlines()
    new = next(i for i, line in enumerate(lines) if line.endswith("field wishes of vllm.v1.request.Request"))
    assert "written: v1/request.py:" in lines[new + 1] and lines[new + 2] == "    read: nowhere"
    assert any("Request.update_block_hashes does something else: hooks.py" in line for line in lines)


@pytest.mark.parametrize("arguments", [(), ("--wrong",), ("nonsense",), (ROOT / "docs",), ("0.32.0", "0.31.0")])
def test_the_command_says_what_it_takes(arguments):
    done = contract(*arguments)
    assert done.returncode == 2 and not done.stdout and "vllm" in done.stderr.lower(), done
    assert "Traceback" not in done.stderr
