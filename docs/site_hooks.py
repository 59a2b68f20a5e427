"""Hooks of MkDocs: generate the reference from the code, and add what pages link to outside of docs/."""

import ast
import inspect
import json
import re
import textwrap
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

import tpuswarm
import tpuswarm.torch
from tpuswarm import recipes
from tpuswarm.cli.app import COMMANDS, make_app
from tpuswarm.cli.help import TYPED_WORDS
from tpuswarm.fleet.spec import file as swarm_file

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
TYPE_TEXTS: dict[Any, str] = {
    bool: "true or false", str: "text", Path: "path", int: "number", float: "number",
    swarm_file.Seconds: 'duration, `"4h"`', swarm_file.UnixSeconds: "date", swarm_file.Flags: "table",
}  # fmt: skip


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add README.md as the first page, the other pages of the root, the examples, and files that pages link to."""
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text(encoding="utf-8")))
    files.append(File.generated(config, "examples.md", content=_examples()))
    for name in ("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for page in sorted((ROOT / "docs").glob("*.md")):
        for _, target, _ in LINK.findall(page.read_text(encoding="utf-8")):
            name = target.removeprefix("../")
            if target.startswith("../") and (ROOT / name).is_file() and not files.get_file_from_path(name):
                files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links to the places of files in the site, and append what is generated."""
    is_from_root = page.file.src_uri in ("index.md", "CHANGELOG.md", "CONTRIBUTING.md")

    def lead(link: re.Match[str]) -> str:
        target = link[2].removeprefix("docs/" if is_from_root else "../")
        return f"{link[1]}{'examples.md' if target == 'examples' else target}{link[3]}"

    generated = {"commands.md": _commands, "swarm-toml.md": _swarm_toml, "api.md": _api}.get(page.file.src_uri)
    return LINK.sub(lead, markdown) + ("\n\n" + "\n".join(generated()) if generated else "")


def _examples() -> str:
    parts = ["# Examples"]
    for path in sorted((ROOT / "examples").iterdir()):
        if path.suffix in (".py", ".toml"):
            language = {".py": "python", ".toml": "toml"}[path.suffix]
            parts.append(f"## {path.name}\n\n```{language}\n{path.read_text(encoding='utf-8').rstrip()}\n```")
    return "\n\n".join(parts)


def _api() -> Iterator[str]:
    for package in tpuswarm, tpuswarm.torch:
        for name in package.__all__:
            place = getattr(package, name).__module__  # tpuswarm.torch.recipe is a function, and a module
            yield f"::: {place}.{name}\n    options:\n      heading: {package.__name__}.{name}\n"


class _Markdown:
    """Takes the place of click's formatter: what --help shows, as Markdown."""

    width, current_indent = 78, 0

    def __init__(self) -> None:
        self.parts: list[str] = []
        self._lines: list[str] = []
        self._head = ("option", "meaning")

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        self.parts.append(f"**{name}**")
        self._head = ("argument" if name == "Arguments" else "option", "meaning")
        yield
        self._end_lines()

    def write(self, text: str) -> None:
        self._lines.append(text)

    def write_text(self, text: str) -> None:
        self.parts.append(_escape(text))

    def write_dl(self, rows: Iterable[tuple[str, str]], **_: Any) -> None:
        self.parts.append(_table(self._head, [(f"`{name}`", _escape(text)) for name, text in rows]))

    def _end_lines(self) -> None:
        if self._lines:
            self.parts.append(f"```sh\n{textwrap.dedent(''.join(self._lines))}```")
            self._lines = []


def _commands() -> Iterator[str]:
    app: Any = typer.main.get_command(make_app())
    top = app.make_context("tpuswarm", [], resilient_parsing=True)
    for panel, names in COMMANDS.items():
        yield f"## {panel}\n"
        for name in names:
            command = app.commands[name]
            yield from _command(command, command.make_context(name, [], parent=top, resilient_parsing=True), 3)
    yield "## Options of recipes\n"
    for name in recipes.BUILT_IN:
        train = app.commands["train"]
        context = train.make_context("train", [], parent=top, resilient_parsing=True)
        yield f"### {name}\n"
        yield from _recipe(train, context, name)


def _command(command: Any, context: Any, level: int) -> Iterator[str]:
    yield f"{'#' * level} tpuswarm {context.command_path.partition(' ')[2]}\n"
    context.meta[TYPED_WORDS] = []
    yield from (f"{_escape(part)}\n" for part in inspect.cleandoc(command.help or "").split("\n\n"))
    subcommands = getattr(command, "commands", None)
    if subcommands:
        for name, sub in subcommands.items():
            yield from _command(sub, sub.make_context(name, [], parent=context, resilient_parsing=True), level + 1)
        return
    yield f"```text\n{' '.join([context.command_path, *command.collect_usage_pieces(context)])}\n```\n"
    markdown = _Markdown()
    command.format_options(context, markdown)
    command.format_epilog(context, markdown)
    yield "\n\n".join(markdown.parts) + "\n"


def _recipe(train: Any, context: Any, name: str) -> Iterator[str]:
    context.meta[TYPED_WORDS] = []
    usual, named = _Markdown(), _Markdown()
    train.format_options(context, usual)
    context.meta[TYPED_WORDS] = [name]
    train.format_options(context, named)
    yield "\n\n".join(part for part in named.parts if part not in usual.parts) + "\n"


def _swarm_toml() -> Iterator[str]:
    help_of_train = {
        parameter.name: parameter.help
        for parameter in typer.main.get_command(make_app()).commands["train"].params  # type: ignore[attr-defined]
        if parameter.param_type_name == "option"
    }
    done: set[type] = set()

    def describe(table: type[BaseModel], heading: str) -> Iterator[str]:
        done.add(table)
        yield f"## {heading}\n"
        yield f"{_escape((inspect.getdoc(table) or '').partition(': ')[2] or inspect.getdoc(table))}\n"
        hints, texts = get_type_hints(table, include_extras=True), _field_texts(table)
        rows = []
        for name, field in table.model_fields.items():
            text = texts.get(name) or (help_of_train.get(name) if heading == "[train]" else None)
            if text is None:
                raise LookupError(f"{table.__name__}.{name} has no docstring, which docs/swarm-toml.md shows")
            rows.append((f"`{name}`", _type_text(hints[name]), _default(field), _escape(text)))
        yield _table(("key", "value", "default", "meaning"), rows) + "\n"
        for name, hint in hints.items():
            for inner in _tables(hint):
                if name in table.model_fields and inner not in done:
                    yield from describe(inner, _heading(heading, name, hint))

    yield from describe(swarm_file.SwarmFile, "The file")


def _heading(parent: str, name: str, hint: Any) -> str:
    path = name if parent == "The file" else f"{parent.strip('[]')}.{name}"
    if get_origin(hint) is dict:
        return f"[{path}.NAME]"
    return f"[[{path}]]" if get_origin(hint) is tuple else f"[{path}]"


def _field_texts(table: type[BaseModel]) -> dict[str, str]:
    """Return the docstrings below the fields of a table and of the tables that it extends."""
    found: dict[str, str] = {}
    for base in reversed(table.__mro__):
        if issubclass(base, BaseModel) and base.__module__.startswith("tpuswarm."):
            [definition] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            assert isinstance(definition, ast.ClassDef)
            for field, text in zip(definition.body, definition.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    found[ast.unparse(field.target)] = " ".join(ast.literal_eval(text.value).split())
    return found


def _tables(hint: Any) -> Iterator[type[BaseModel]]:
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        yield hint
    for part in get_args(hint):
        yield from _tables(part)


def _type_text(hint: Any) -> str:
    if text := TYPE_TEXTS.get(hint) if not isinstance(hint, list) else None:
        return text
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " or ".join(f'`"{part}"`' for part in parts)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type_text(part) for part in parts if part is not type(None)))
    if origin in (tuple, list):
        return "tables" if [*_tables(hint)] else f"list of {_type_text(parts[0])}"
    if origin is dict or [*_tables(hint)]:
        return "table"
    return _type_text(parts[0]) if parts else "text"


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    default = field.default
    if default is PydanticUndefined or default is None or default == () or isinstance(default, BaseModel):
        return ""
    return f"`{json.dumps(default)}`"


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [[*head]]
    lines += [["---"] * len(lines[0]), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _escape(text: str | None) -> str:
    """Return plain text as Markdown; what stands between backquotes stays."""
    parts = re.split(r"(`[^`]*`)", text or "")
    plain = (re.sub(r"([*_\[])", r"\\\1", part).replace("<", "&lt;") for part in parts[::2])
    return "".join(part for pair in zip_longest(plain, parts[1::2], fillvalue="") for part in pair)
