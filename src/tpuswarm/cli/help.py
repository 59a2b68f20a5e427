"""What `--help` shows beyond typer's own: commands and options in groups, a recipe's own options, examples."""

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, get_args

from typer.core import TyperCommand, TyperGroup

from tpuswarm.cli.examples import EXAMPLES
from tpuswarm.errors import InputError, TpuswarmError

WORDS = "tpuswarm.words"
"""Where a context keeps what was typed after the command: `--help` is answered before the recipe is read."""

MAY_BE_EMPTY = ("prompt",)

KINDS = {
    "str": "TEXT", "list[str]": "TEXT", "int": "NUMBER", "int range": "NUMBER", "float": "NUMBER", "path": "PATH",
}  # fmt: skip
"""What typer calls what an option takes, and what a person does."""


class Command(TyperCommand):
    """A command whose help has its options in groups, those of the recipe that was named, and examples."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As typer does, but the words stay known."""
        ctx.meta[WORDS] = list(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """As typer does; InputError for an empty word, which a shell makes of a variable that is not set."""
        for parameter in self.params:
            if ctx.params.get(parameter.name) == "" and parameter.name not in MAY_BE_EMPTY:
                option = parameter.param_type_name == "option"
                raise InputError(f"{parameter.opts[0] if option else parameter.name} is given as an empty word")
        if any(isinstance(each, str) and each.startswith("gs://") for each in ctx.params.values()):
            from tpuswarm.cli.storage import as_rehearsed

            as_rehearsed()
        return super().invoke(ctx)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """RECIPE rather than {recipe}, [FILE] rather than [[FILE]]."""
        pieces = [each.removesuffix("...") for each in super().collect_usage_pieces(ctx)]
        pieces = [each[1:-1] if each[0] == "{" or each[:2] == "[[" else each for each in pieces]
        return [each.upper() if each.strip("[]").islower() else each for each in pieces]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments, options by group, the recipe's options."""
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                name, _, kind = record[0].rstrip(">").partition(" <")
                if parameter.param_type_name == "argument":
                    record = (name.upper() if name.islower() else name, record[1])
                elif kind:
                    record = (f"{name} {KINDS.get(kind, kind)}", record[1])
                usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or usual, []).append(record)
        for name, records in panels.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)
        if ctx.ignore_unknown_options:
            _write_recipe(ctx.meta[WORDS], {each.name for each in self.params}, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """The command's examples."""
        _write_lines("Examples", EXAMPLES[ctx.command_path.partition(" ")[2]], formatter)


class CommandGroup(TyperGroup):
    """Commands in the groups they were registered with, each with its whole first sentence."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """A section for each group."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            sentence = command.get_short_help_str(limit=1_000).partition(": ")[0].partition("; ")[0].rstrip(".")
            panels.setdefault(command.rich_help_panel or "Commands", []).append((name, sentence))
        for name, rows in panels.items():
            with formatter.section(name):
                formatter.write_dl(rows)


class Top(CommandGroup):
    """All commands on one screen of 24 rows: the first of each group with a sentence, the others by their names."""

    first: ClassVar[Mapping[str, int]]
    """How many commands of a group have a sentence."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Without the blank lines that there is no room for."""
        formatter.write(f"Usage: {ctx.command_path} [OPTIONS] COMMAND [ARGS]...\n{self.help}\n\n")
        panels: dict[str, list[Any]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            panels.setdefault(command.rich_help_panel, []).append(command)
        for panel, commands in panels.items():
            count = self.first[panel]
            rows = [f"{each.name:<9}{_brief(each)}" for each in commands[:count]]
            if rest := [each.name for each in commands[count:]]:
                rows.append(f"also:    {', '.join(rest)}")
            for number, row in enumerate(rows):
                formatter.write(f"{'' if number else panel:<10}{row}\n")
        formatter.write("COMMAND --help: its options. Here: --version, --debug, --install-completion.\n")


def _brief(command: Any) -> str:
    """The first clause of its sentence."""
    return re.split(r"[:;] |, and |\.$", command.get_short_help_str(limit=1_000), maxsplit=1)[0]


def _write_recipe(words: Sequence[str], shown: set[str | None], formatter: Any) -> None:
    """What the recipe among these words says of itself, and its options that are not `shown` as the command's own.

    Without a recipe, which there are.
    """
    from tpuswarm import recipes
    from tpuswarm.train.user_code import find_maker

    named = next((word for word in words if not word.startswith("-")), None)
    if named is None:
        _write_lines("Recipes (RECIPE --help lists the options of one)", (*recipes.BUILT_IN, "file.py:NAME"), formatter)
        return
    heading = f"Options of {named}"
    try:
        maker = find_maker(recipes.find(named)[0])
    except TpuswarmError as error:
        _write_lines(heading, (str(error),), formatter)
        return
    rows = [
        (f"--{each.name.replace('_', '-')} {_kind(each.annotation)}".rstrip(), _default(each.default))
        for each in inspect.signature(maker, eval_str=True).parameters.values()
        if each.name not in shown
    ]
    with formatter.section(named):
        for item in (inspect.getdoc(maker) or "").split("\n- "):
            formatter.write_text(" ".join(item.split()))
    if rows:
        with formatter.section(heading):
            formatter.write_dl(rows)


def _kind(annotation: Any) -> str:
    """NUMBER for float | None; nothing for what has no annotation."""
    kinds = [
        each for each in get_args(annotation) or (annotation,) if each not in (type(None), inspect.Parameter.empty)
    ]
    names = (getattr(each, "__name__", str(each)) for each in kinds)
    return "|".join(dict.fromkeys(KINDS.get(name, name) for name in names))


def _default(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return "Required."
    return "" if value is None else f"Default: {value}."


def _write_lines(heading: str, lines: Iterable[str], formatter: Any) -> None:
    """Lines as they are: a command must be one that can be copied."""
    with formatter.section(heading):
        for line in lines:
            formatter.write(f"{'':>{formatter.current_indent}}{line}\n")
