"""`--help`: commands and options in groups, the options of the recipe that was named, and examples."""

import inspect
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, get_args

from typer.core import TyperCommand, TyperGroup

from tpuswarm.cli.completion import recipe_option_names
from tpuswarm.cli.examples import EXAMPLES
from tpuswarm.config.formatting import wrap_text
from tpuswarm.errors import InputError, TpuswarmError

TYPED_WORDS = "tpuswarm.typed_words"
"""Key of the context's meta for the words after the command, which --help and `up -- CMD` read."""
MAY_BE_EMPTY = ("prompt", "stop")
TYPE_NAMES = {
    "str": "TEXT", "list[str]": "TEXT", "int": "NUMBER", "int range": "NUMBER", "float": "NUMBER", "path": "PATH",
}  # fmt: skip


class Command(TyperCommand):
    """A command whose help has its options in groups, the named recipe's options, and examples."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[TYPED_WORDS] = list(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Refuse empty words (a shell variable that is not set), and find the local cloud's buckets."""
        given = {name: value if isinstance(value, list | tuple) else [value] for name, value in ctx.params.items()}
        for parameter in self.params:
            if "" in given.get(parameter.name, ()) and parameter.name not in MAY_BE_EMPTY:
                is_option = parameter.param_type_name == "option"
                raise InputError(f"{parameter.opts[0] if is_option else parameter.name} is empty; give it a value")
        if any(isinstance(value, str) and value.startswith("gs://") for values in given.values() for value in values):
            from tpuswarm.fleet.spec.providers import use_rehearsed_buckets

            use_rehearsed_buckets()
        return super().invoke(ctx)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Complete the named recipe's options too."""
        found: list[Any] = super().shell_complete(ctx, incomplete)
        if ctx.ignore_unknown_options and incomplete.startswith("-"):
            own = {item.value for item in found}
            names = recipe_option_names(ctx.params.get("recipe") or "")
            found += [
                SimpleNamespace(value=name, type="plain", help=None)
                for name in names
                if name.startswith(incomplete) and name not in own
            ]
        return found

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Write RECIPE instead of {recipe}, [FILE] instead of [[FILE]]."""
        pieces = [piece.removesuffix("...") for piece in super().collect_usage_pieces(ctx)]
        pieces = [piece[1:-1] if piece[0] == "{" or piece[:2] == "[[" else piece for piece in pieces]
        return [piece.upper() if piece.strip("[]").islower() else piece for piece in pieces]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                is_argument = parameter.param_type_name == "argument"
                name, _, kind = record[0].rstrip(">").partition(" <")
                if is_argument:
                    record = (name.upper() if name.islower() else name, record[1])
                elif kind:
                    record = (f"{name} {TYPE_NAMES.get(kind, kind)}", record[1])
                panel = getattr(parameter, "rich_help_panel", None) or ("Arguments" if is_argument else "Options")
                panels.setdefault(panel, []).append(record)
        for name, records in panels.items():
            if records:
                with formatter.section(name):
                    _write_table(records, formatter)
        if ctx.ignore_unknown_options:
            _write_recipe(ctx.meta[TYPED_WORDS], {parameter.name for parameter in self.params}, formatter)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        _write_lines("Examples", EXAMPLES[ctx.command_path.partition(" ")[2]], formatter)


class CommandGroup(TyperGroup):
    """Commands under the headings of their groups, with their whole first sentences."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            sentence = command.get_short_help_str(limit=1_000).partition(": ")[0].partition("; ")[0].rstrip(".")
            panels.setdefault(command.rich_help_panel or "Commands", []).append((name, sentence))
        for name, rows in panels.items():
            with formatter.section(name):
                _write_table(rows, formatter)


def format_top_help(
    program: str, text: str, groups: Mapping[str, Iterable[str]], summaries: Mapping[str, str], formatter: Any
) -> None:
    """Write all commands on a screen of 24 rows: those with a summary first, the others by name."""
    columns = formatter.width + 2
    for line in (f"Usage: {program} [OPTIONS] COMMAND [ARGS]...", f"{text}\n"):
        formatter.write(wrap_text(line, columns) + "\n")
    for panel, names in groups.items():
        rows = [f"{name:<9}{summaries[name]}" for name in names if name in summaries]
        if rest := [name for name in names if name not in summaries]:
            rows.append(f"also:    {', '.join(rest)}")
        for number, row in enumerate(rows):
            formatter.write(wrap_text(f"{'' if number else panel:<10}{row}", columns, 19) + "\n")
    last = "COMMAND --help: its options. Here: --version, --debug, --install-completion."
    formatter.write(wrap_text(last, columns) + "\n")


def _write_recipe(words: Sequence[str], command_options: set[str | None], formatter: Any) -> None:
    """Write the description and options of the recipe among these words, or the names of all recipes."""
    from tpuswarm import recipes
    from tpuswarm.train.user_code import build_recipe, find_maker

    name = next((word for word in words if not word.startswith("-")), None)
    if name is None:
        _write_lines(
            "Recipes; RECIPE --help: its options", (*recipes.BUILT_IN, "hf:ORG/NAME", "file.py:NAME"), formatter
        )
        return
    heading = f"Options of {name}"
    try:
        target, preset = recipes.find(name)
        maker = find_maker(target)
        given: Mapping[str, Any] = {}
        if ":" not in name:  # a file's function may read its data
            given = {**preset, **build_recipe(target, preset).option_defaults}
    except TpuswarmError as error:
        _write_lines(heading, (str(error),), formatter)
        return
    intro, described = _documentation(maker)
    rows = [
        (
            f"--{option.name.replace('_', '-')} {_type_name(option.annotation)}".rstrip(),
            f"{described.get(option.name, '')} {_default_text(given.get(option.name, option.default))}".strip(),
        )
        for option in inspect.signature(maker, eval_str=True).parameters.values()
        if option.name not in command_options
    ]
    with formatter.section(name):
        formatter.write_text(intro)
        for option_name, description in described.items():
            if option_name in command_options:
                formatter.write_text(f"--{option_name}: {description}")
    if rows:
        with formatter.section(heading):
            _write_table(rows, formatter)


def _documentation(maker: Any) -> tuple[str, dict[str, str]]:
    """Return how a recipe's docstring begins, and what it and its bases say of each option."""
    bases = [base for base in getattr(maker, "__mro__", (maker,)) if base.__module__ not in ("abc", "builtins")]
    texts = [inspect.cleandoc(base.__doc__ or "") for base in bases]
    described: dict[str, str] = {}
    for item in (item for text in reversed(texts) for item in text.split("\n- ")[1:]):
        names, _, description = " ".join(item.split()).partition(": ")
        described |= dict.fromkeys(names.split(", "), description)
    return " ".join(texts[0].split("\n- ")[0].split()), described


def _type_name(annotation: Any) -> str:
    # NUMBER for float | None
    ignored = (type(None), inspect.Parameter.empty)
    kinds = [kind for kind in get_args(annotation) or (annotation,) if kind not in ignored]
    names = (getattr(kind, "__name__", str(kind)) for kind in kinds)
    return "|".join(dict.fromkeys(TYPE_NAMES.get(name, name) for name in names))


def _default_text(value: Any) -> str:
    if value is inspect.Parameter.empty:
        return "Required."
    return "" if value is None else f"Default: {format(value, 'g') if isinstance(value, float) else value}."


def _write_table(rows: Sequence[tuple[str, str]], formatter: Any) -> None:
    formatter.write_dl(rows, col_max=min(30, formatter.width // 2))


def _write_lines(heading: str, lines: Iterable[str], formatter: Any) -> None:
    with formatter.section(heading):  # unwrapped, so that a command can be copied
        for line in lines:
            formatter.write(f"{'':>{formatter.current_indent}}{line}\n")
