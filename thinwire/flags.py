"""Reads command lines with tyro: returns the stated values, and reports everything that is wrong at once."""

from __future__ import annotations

import ast
import difflib
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass, replace
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from thinwire.errors import Problems, nearest, similar, type_name, type_rule

# The value of a flag that was not stated.
UNSET: Any = ...


# The variable by which a program knows the command of the lab in which it runs.
LAB = "THINWIRE_LAB"
# How a boolean is written in TOML, and after a flag.
TRUTHS = ("true", "false")
# What other programs call the same thing.
ELSEWHERE = {
    "--nproc-per-node": "--workers", "--nnodes": "--nodes", "--node-rank": "--node", "--batch-size": "--micro-batch",
    "--learning-rate": "--lr", "--max-steps": "--steps", "--output-dir": "--run-dir",
}  # fmt: skip
VERY_CLOSE = 0.8


@dataclass(frozen=True)
class Also:
    """A word that may follow a switch although it changes nothing, and the rule for words that are not allowed."""

    word: str
    rule: str


@dataclass(frozen=True)
class Option:
    """One field of a dataclass as a command-line option. notes: of the field's Annotated type."""

    name: str
    hint: Any
    default: Any
    notes: tuple[Any, ...]

    @property
    def is_word(self) -> bool:
        """Whether it is positional: it has no flag."""
        return tyro.conf.Positional in self.notes

    @property
    def takes_all(self) -> bool:
        """Whether it is the last positional option and takes all remaining words."""
        return get_origin(self.hint) is tuple

    @property
    def metavar(self) -> str:
        """Its name in the usage line: the field's name in capitals, unless the field states another."""
        stated = (getattr(note, "metavar", None) for note in self.notes)
        return next(filter(None, stated), self.name.upper())

    @property
    def spec(self) -> Any:
        """How tyro reads it; of another type for what it can't read from words."""
        own = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(self.hint, set(self.markers)))
        kinds = get_args(self.hint) if get_origin(self.hint) in (Union, UnionType) else (self.hint,)
        if bool not in kinds or not isinstance(own, PrimitiveConstructorSpec):
            return own
        words = tuple(word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind))
        choices = (*TRUTHS, *words)
        return replace(
            own, metavar=f"{{{','.join(choices)}}}", choices=choices,
            instance_from_str=lambda given: given[0] if given[0] in words else given == ["true"],
        )  # fmt: skip

    @property
    def markers(self) -> list[Any]:
        return [note for note in self.notes if note is tyro.conf.UseAppendAction]

    def flag(self, table: str) -> str:
        """Its flag on a command line."""
        return flag(f"{table}.{self.name}" if table else self.name)

    def is_switch(self, table: str) -> bool:
        """Whether the flag takes no value. Options of a table always take one."""
        return self.hint is bool and not table


def flag(name: str) -> str:
    """The command-line flag of a field."""
    return f"--{name.replace('_', '-')}"


@cache
def options_of(cls: type) -> tuple[Option, ...]:
    """The fields of a dataclass that can be flags; empty for any other class."""
    hints = get_type_hints(cls, include_extras=True)
    found = []
    for item in fields(cls) if is_dataclass(cls) else ():
        hint = hints[item.name]
        hint, *notes = get_args(hint) if get_origin(hint) is Annotated else [hint]
        option = Option(item.name, hint, item.default, tuple(notes))
        if tyro.conf.Suppress not in notes and isinstance(option.spec, PrimitiveConstructorSpec):
            found.append(option)
    return tuple(found)


@cache
def help_of(cls: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, on one line, by field name."""
    found: dict[str, str] = {}
    for base in filter(is_dataclass, reversed(cls.__mro__)):
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(node, ast.ClassDef)
        for item, below in pairwise(node.body):
            match item, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split())
    return found


class CommandLine:
    """The flags of one command.

    Args:
        cls: the dataclass of the command.
        tables: returns a dataclass for each prefix, such as `--sdp4bit.`. Called if a flag with a prefix is stated, or
            if all flags are shown.
        presets: the defaults to show for options of a table, in place of the fields' own.
        groups: titles, each with the options of `cls` below it. `--help` shows the first group, `--help-all`
            everything. Without groups `--help` shows all of `cls`.
    """

    def __init__(
        self, prog: str, cls: type, *, tables: Callable[[], Mapping[str, type]] | None = None,
        presets: Mapping[str, str] | None = None, groups: Mapping[str, Sequence[str]] | None = None,
    ) -> None:  # fmt: skip
        self.prog, self.presets, self.groups = prog, presets or {}, groups or {}
        self._tables = tables
        self.classes = {"": cls}
        self.tables = {"": options_of(cls)}
        self.words = [option for option in self.tables[""] if option.is_word]

    def load_tables(self) -> None:
        """Load the tables, so that flags with a prefix are known too."""
        self.classes |= self._tables() if self._tables else {}
        self.tables |= {table: options_of(cls) for table, cls in self.classes.items() if table not in self.tables}

    def knows(self, name: str) -> bool:
        """Whether `name` is one of the flags."""
        if "." in name:
            self.load_tables()
        return name in self.known

    @property
    def known(self) -> list[str]:
        """All flags; those with a prefix only after `load_tables`."""
        values = [option.flag(table) for table in self.tables for option in self.tables[table] if not option.is_word]
        return [*values, *self._switches, *map(flag, self._helps)]

    def read(
        self, args: Sequence[str], problems: Problems, *, elsewhere: Callable[[str], str] = lambda name: "",
        hint: str = "",
    ) -> Stated:  # fmt: skip
        """The stated values of each table, by field name. Everything that is wrong is noted in `problems`.

        elsewhere: what to say about a flag that belongs elsewhere. hint: what to say about a word that is not expected.
        Raises SystemExit after --help.
        """
        wrong: list[str] = []
        if any("." in arg.partition("=")[0] for arg in args if arg.startswith("--")):
            self.load_tables()
        try:
            parsed, rest = self._parse(args, wrong, is_lenient=False)
        except SystemExit:
            # A value is missing, at which tyro stops.
            wrong.clear()
            parsed, rest = self._parse(args, wrong, is_lenient=True)
        if parsed.help or getattr(parsed, "help_all", False):
            self.show_help(everything=not parsed.help)
        self._tell_repeated(args)
        unknown = [word for word in rest if word.startswith("-") and not word[1:2].isdigit()]
        for word in unknown:
            name = word.partition("=")[0].replace("_", "-")
            problems.messages.append(f"unknown flag {name}{elsewhere(name) or self._nearest(name)}")
        problems.messages += wrong
        stated: Stated = {table: {} for table in self.tables}
        for table, name, value in self._stated(parsed, ""):
            stated[table][name] = value
        words = self._own([*parsed.words, *(word for word in rest if word not in unknown)], args, unknown, problems)
        stated[""] |= self._placed(words, problems, knows_all=not unknown, hint=hint)
        return stated

    def _nearest(self, name: str) -> str:
        """Tail of a message about an unknown flag. Of a table that is known, only the rest of the name counts."""
        table, dot, option = name.partition(".")
        inside = {one.partition(".")[2]: one for one in self.known if dot and one.startswith(f"{table}.")}
        if not inside:
            return self._nearest_of_all(name)
        close = difflib.get_close_matches(option, inside, n=1, cutoff=0.5)
        return f"; did you mean {inside[close[0]]!r}?" if close else f"; choose one of {', '.join(inside.values())}"

    def _nearest_of_all(self, name: str) -> str:
        """See `_nearest`. Loads the tables only where no flag is much like this one, since loading takes seconds."""
        if (same := ELSEWHERE.get(name)) in self.known:
            return f"; did you mean {same!r}?"
        if not difflib.get_close_matches(name, self.known, n=1, cutoff=VERY_CLOSE):
            self.load_tables()
            if of_tables := [one for one in self.known if one.endswith(f".{name.lstrip('-')}")]:
                return f"; did you mean {' or '.join(of_tables)}?"
        return nearest(name, self.known)

    def _tell_repeated(self, args: Sequence[str]) -> None:
        """Say which flags stand more than once, since only the last counts."""
        appended = {option.flag(table) for table in self.tables for option in self.tables[table] if option.markers}
        found: dict[str, list[int]] = {}
        for place, arg in enumerate(args):
            if arg.startswith("--") and (name := arg.partition("=")[0].replace("_", "-")) not in appended:
                found.setdefault(name, []).append(place)
        for name, places in found.items():
            if len(places) > 1 and os.environ.get("RANK", "0") == "0":
                value = args[places[-1] + 1 : places[-1] + 2] if "=" not in args[places[-1]] else []
                last = " ".join([args[places[-1]], *(word for word in value if not word.startswith("--"))])
                print(f"thinwire: {name} stands {len(places)} times: the last counts, {last}", file=sys.stderr)

    def show_help(self, *, everything: bool) -> None:
        """Print the flags and exit."""
        if everything:
            self.load_tables()
        description = inspect.cleandoc(self.classes[""].__doc__ or "")
        if not everything and "help_all" in self._helps:
            description += f"\n\n`{self.prog} --help-all` shows every flag."
        tyro.cli(self.flags(everything=everything), args=["--help"], prog=self.prog, description=description)

    def flags(self, *, everything: bool = True) -> type:
        """The dataclass that tyro shows and completes. everything: all groups and tables; else the first group only."""
        return make_dataclass("Flags", [*self._words(), *self._fields(everything=everything)])

    def _parse(self, args: Sequence[str], wrong: list[str], *, is_lenient: bool) -> tuple[Any, list[str]]:
        """What tyro reads from the words, and the words that it does not know. Bad values are added to `wrong`.

        is_lenient: a flag may lack its value, and takes all words that follow.
        """

        def reader(option: Option, table: str) -> Any:
            return _noting(option, option.flag(table), wrong, is_lenient=is_lenient)

        helps = [(name, Annotated[bool, tyro.conf.FlagCreatePairsOff, _aliases(name)], False) for name in self._helps]
        words = ("words", Annotated[tuple[str, ...], tyro.conf.Positional], ())
        prefixes = {arg[2:].partition(".")[0] for arg in args if "." in arg and arg.startswith("--")}
        tables = [table for table in self.tables if table in prefixes]
        cls = make_dataclass("Flags", [words, *helps, *self._fields(reader, tables=tables)])
        return tyro.cli(cls, args=list(args), return_unknown_args=True, add_help=False, console_outputs=False)

    def _fields(
        self, reader: Reader | None = None, *, everything: bool = True, tables: Sequence[str] | None = None
    ) -> Iterator[tuple[str, Any, Any]]:
        """The fields that tyro reads: options in no group, then those of groups, then those of `tables`, or of all."""
        own = {option.name: option for option in self.tables[""] if not option.is_word}
        grouped = set(chain(*self.groups.values()))
        texts = {} if reader else help_of(self.classes[""])
        others = [name for name in own if name not in grouped] if everything or not self.groups else ()
        yield from (self._field(own[name], "", texts, reader) for name in others)
        for title in list(self.groups)[: None if everything else 1]:
            inside = [self._field(own[name], "", texts, reader) for name in self.groups[title]]
            yield _nested(title, "", inside, tyro.conf.OmitArgPrefixes)
        for table in (self.tables if tables is None else tables) if everything else ():
            if table:
                texts = {} if reader else help_of(self.classes[table])
                inside = [self._field(option, table, texts, reader) for option in self.tables[table]]
                yield _nested(table, (self.classes[table].__doc__ or "").split("\n")[0], inside)

    def _field(
        self, option: Option, table: str, texts: Mapping[str, str], reader: Reader | None
    ) -> tuple[str, Any, Any]:
        text = texts.get(option.name) or option.name.replace("_", " ")
        note = tyro.conf.arg(help=text, help_behavior_hint=_shown(option, table, self.presets.get(table)))
        if option.is_switch(table):
            return option.name, Annotated[bool | None, tyro.conf.DisallowNone, note], None
        spec = reader(option, table) if reader else option.spec
        spec = replace(spec, metavar=spec.metavar.removeprefix("{None}|"), str_from_instance=lambda value: [])
        if option.markers:
            return option.name, Annotated[(option.hint, spec, note, *option.markers)], ()
        return option.name, Annotated[Any, spec, note], UNSET

    def _words(self) -> list[tuple[str, Any, Any]]:
        """The fields of positional options."""
        texts, made = help_of(self.classes[""]), []
        for option in self.words:
            note = tyro.conf.arg(help=texts.get(option.name, ""), metavar=option.metavar, help_behavior_hint="")
            made.append((option.name, Annotated[str, tyro.conf.Positional, note], ""))
        return made

    def _stated(self, parsed: Any, table: str) -> Iterator[tuple[str, str, Any]]:
        """Yield (table, name, value) of every option that has a value."""
        for item in fields(parsed):
            value = getattr(parsed, item.name)
            if is_dataclass(value):
                yield from self._stated(value, item.name if item.name in self.tables else table)
            elif item.name not in ("words", *self._helps) and value is not item.default:
                yield table, item.name, value

    def _own(
        self, words: Iterable[str], args: Sequence[str], unknown: Sequence[str], problems: Problems
    ) -> Iterator[str]:
        """The words, without those that follow an unknown flag, and without those meant as the value of a switch."""
        pieces = [piece for arg in args for piece in (arg.split("=", 1) if arg.startswith("--") else [arg])]
        # The same word may follow several flags.
        before: dict[str, list[str]] = {}
        for name, word in pairwise(["", *pieces]):
            before.setdefault(word, []).append(name.replace("_", "-"))
        strangers = {one.partition("=")[0].replace("_", "-") for one in unknown}
        for word in words:
            if not strangers.isdisjoint(before[word]):
                continue
            name = next((one for one in before[word] if one in self._switches), "")
            if not name or word.endswith(".toml") or Path(word).exists():
                yield word
                continue
            also = self._switches[name]
            if also is None:
                problems.messages.append(f"{name} {word}: takes no value; say {name} alone, or leave it out")
            elif word != also.word:
                problems.messages.append(f"{name} {word}: {also.rule}; nearest: {name} {also.word}")

    def _placed(
        self, words: Iterable[str], problems: Problems, *, knows_all: bool, hint: str
    ) -> Iterator[tuple[str, Any]]:
        """The positional words by field name. Notes options that are missing and words that are not expected."""
        given: list[Any] = list(words)
        if self.words and self.words[-1].takes_all:
            given = [*given[: len(self.words) - 1], tuple(given[len(self.words) - 1 :])]
        yield from zip((option.name for option in self.words), given, strict=False)
        for option in self.words[len(given) :]:
            if option.default is MISSING:
                text = help_of(self.classes[""])[option.name]
                problems.messages.append(f"{self.prog} needs {option.metavar}: {text}")
        for word in given[len(self.words) :] if knows_all else ():
            takes = " ".join(option.metavar for option in self.words) or "flags"
            problems.messages.append(f"unexpected {word!r}: {hint or f'{self.prog} takes {takes} alone'}")

    @property
    def _switches(self) -> dict[str, Also | None]:
        """The flags without a value, such as --checked and --no-checked, and the word that may follow each."""
        found: dict[str, Also | None] = {}
        for option in self.tables[""]:
            also = next((note for note in option.notes if isinstance(note, Also)), None)
            names = (option.name, f"no_{option.name}") if option.is_switch("") else ()
            found |= {flag(name): also for name in names}
        return found

    @property
    def _helps(self) -> list[str]:
        return ["help", *(["help_all"] if self.groups or self._tables else [])]


Reader = Callable[[Option, str], PrimitiveConstructorSpec]
# The values that a command line states, by table and name.
Stated = dict[str, dict[str, Any]]


def is_plain(stated: Stated, names: Collection[str]) -> bool:
    """Whether torch is not loaded yet, and nothing is stated but `names`, which are checked without it."""
    tables = any(values for table, values in stated.items() if table)
    return "torch" not in sys.modules and not tables and stated[""].keys() <= set(names)


def _noting(option: Option, name: str, wrong: list[str], *, is_lenient: bool) -> PrimitiveConstructorSpec:
    """How tyro reads the option, except that an unreadable value becomes a message. is_lenient: see `_parse`."""
    own = option.spec
    takes_one = own.nargs == 1
    such_as = "" if option.default in (MISSING, None, ()) else f", such as {_written(option.default)}"
    takes_numbers = option.hint == tuple[int, ...]
    such_as = ", such as 0 1 2" if takes_numbers else such_as

    def read(words: list[str]) -> Any:
        if takes_one and not words:
            wrong.append(f"{name}: needs a value, {type_name(option.hint)}{such_as}")
            return UNSET
        words = words[:1] if takes_one else words
        # Commas between numbers mean what spaces do.
        words = [number for word in words for number in word.split(",")] if takes_numbers else words
        # As Python writes it.
        words = [word.lower() for word in words] if own.choices and TRUTHS[0] in own.choices else words
        try:
            if own.choices is None or set(words) <= set(own.choices):
                return own.instance_from_str(words)
        except ValueError:
            pass
        is_choice = get_origin(option.hint) is Literal
        close = similar(words[0], map(str, get_args(option.hint))) if is_choice else such_as
        if option.hint in (float, float | None) and (short := re.fullmatch(r"([\d.]+)([kmbt])", words[0].lower())):
            close = f"; nearest: {short[1]}e{3 * 'kmbt'.index(short[2]) + 3}"
        wrong.append(f"{name} {' '.join(words)}: {type_rule(' '.join(words), option.hint, close)}")
        return UNSET

    return replace(own, instance_from_str=read, choices=None, nargs="*" if is_lenient else own.nargs)


def _nested(name: str, text: str, inside: list[tuple[str, Any, Any]], *markers: Any) -> tuple[str, Any, Any]:
    """A field that holds other fields, under their own title in --help."""
    cls = make_dataclass(name, inside)
    # Stated, so that tyro does not read source for it, which takes longer than all else.
    return name, Annotated[(cls, tyro.conf.arg(help=text), *markers)], field(default_factory=cls)


def _aliases(name: str) -> Any:
    return tyro.conf.arg(aliases=("-h",) if name == "help" else None)


def _shown(option: Option, table: str, preset: str | None) -> str:
    """The default, as --help shows it; nothing where the text says what holds by default."""
    if preset is not None:
        return f"(default: {preset})"
    if option.default in (MISSING, None, (), ""):
        return ""
    is_off = option.is_switch(table) and option.default is False
    return f"(default: {'off' if is_off else _written(option.default)})"


def _written(default: Any) -> str:
    """A default as the user would state it."""
    return str(default).lower() if isinstance(default, bool) else str(default)
