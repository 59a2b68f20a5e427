"""What `--help` shows beyond typer's own: commands and options in groups, a recipe's own options, examples."""

import inspect
from collections.abc import Iterable, Sequence
from typing import Any, get_args

from typer.core import TyperCommand, TyperGroup

from tpuswarm.cli.examples import EXAMPLES
from tpuswarm.errors import InputError, TpuswarmError

WORDS = "tpuswarm.words"
"""Where a context keeps what was typed after the command: `--help` is answered before the recipe is read."""

MAY_BE_EMPTY = ("prompt",)


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
        return super().invoke(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments, options by group, the recipe's options."""
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
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


class Group(TyperGroup):
    """Commands in the groups they were registered with, each with its whole first sentence."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """A section for each group."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            sentence = command.get_short_help_str(limit=1_000).partition(": ")[0].rstrip(".")
            panels.setdefault(command.rich_help_panel or "Commands", []).append((name, sentence))
        for name, rows in panels.items():
            with formatter.section(name):
                formatter.write_dl(rows)


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
        (f"--{each.name.replace('_', '-')} {_kind(each.annotation)}", _default(each.default))
        for each in inspect.signature(maker, eval_str=True).parameters.values()
        if each.name not in shown
    ]
    with formatter.section(named):
        for item in (inspect.getdoc(maker) or "").split("\n- "):
            formatter.write_text(item)
    if rows:
        with formatter.section(heading):
            formatter.write_dl(rows)


def _kind(annotation: Any) -> str:
    """<float> for float | None; nothing for what has no annotation."""
    kinds = [
        each for each in get_args(annotation) or (annotation,) if each not in (type(None), inspect.Parameter.empty)
    ]
    return f"<{'|'.join(getattr(each, '__name__', str(each)) for each in kinds)}>" if kinds else ""


def _default(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return "Required."
    return "" if value is None else f"Default: {value}."


def _write_lines(heading: str, lines: Iterable[str], formatter: Any) -> None:
    """Lines as they are: a command must be one that can be copied."""
    with formatter.section(heading):
        for line in lines:
            formatter.write(f"{'':>{formatter.current_indent}}{line}\n")
