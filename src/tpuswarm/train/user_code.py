"""Code that is not ours: finding a recipe by name, and telling its errors from ours."""

import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter, ValidationError

from tpuswarm.config.limits import option_name
from tpuswarm.config.nearest import did_you_mean
from tpuswarm.config.units import check_number
from tpuswarm.config.validation_errors import describe_error
from tpuswarm.errors import InputError, TpuswarmError
from tpuswarm.train.optional import KeepsFiles, check_recipe
from tpuswarm.train.process.platform import configure_jax
from tpuswarm.train.process.stop import interruptible_imports
from tpuswarm.train.recipe import Recipe

OUR_FOLDER = Path(__file__).resolve().parents[1]
OUR_RECIPES = OUR_FOLDER / "recipes"
OUR_MODULES = "tpuswarm."
"""These import JAX where they need it."""
INSTALLED = ("site-packages", "<frozen", "dist-packages", sys.base_prefix)


class CodeLine(NamedTuple):
    """A line of a file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def require_call(function: Any, name: str, *arguments: str) -> None:
    """Raise InputError, with the function's line, unless `function` can be called as name(*arguments).

    arguments: their names, with a `=` behind those that are given by name.
    """
    call = f"{name}({', '.join(f'{each}…' if each.endswith('=') else each for each in arguments)})"
    if not callable(function):
        raise InputError(f"{name} is a {type(function).__name__}; give a function {call}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a library in C, which does not tell
        return
    try:
        by_name = {each[:-1]: each for each in arguments if each.endswith("=")}
        signature.bind(*(each for each in arguments if not each.endswith("=")), **by_name)
    except TypeError as error:
        raise InputError(f"{name} is called as {call}, but takes {signature}{line_of(function)}") from error


def line_of(function: Any) -> str:
    """` (file:line)` of a user's function, for the end of a sentence; empty for one of ours or of a library."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code and owner(code.co_filename) == "user" else ""


@contextmanager
def blame(what: str) -> Iterator[None]:
    """Turn an error raised by a user's file into InputError that names its line; let every other error pass."""
    try:
        yield
    except TpuswarmError:
        raise
    except (Exception, SystemExit) as error:  # anything can be in a user's file; what is not from one is raised again
        place = user_line(error)
        if place is None:
            raise
        if isinstance(error, SystemExit):
            raise InputError(f"{what}: it ends the program with sys.exit ({place})") from error
        message = " ".join(str(error).split()) or "no message"
        missing = isinstance(error, ModuleNotFoundError)
        help_ = f"; install it where tpuswarm is, in {sys.prefix}" if missing else ""
        raise InputError(f"{what}: {type(error).__name__}: {message[:500]} ({place}){help_}") from error


def user_line(error: BaseException) -> str | None:
    """file:line of the innermost frame outside of us and of installed packages; None where there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if owner(frame.filename) == "user":
            return f"{frame.filename}:{frame.lineno}"
    return None


@functools.cache
def owner(file: str) -> Literal["user", "us", "installed"]:
    """Whose code a file is: the user's, ours, or that of an installed package or of Python."""
    if Path(file).is_relative_to(OUR_FOLDER):
        return "us"
    return "installed" if any(part in file for part in INSTALLED) else "user"


@functools.cache
def is_recipe_file(file: str) -> bool:
    """Whether a file can hold a recipe: a user's, or one of our own recipes; not a library's."""
    return Path(file).is_relative_to(OUR_RECIPES) or owner(file) == "user"


def recipe_line(trace: Any) -> CodeLine | None:
    """The innermost line of a recipe in a JAX traceback (`equation.source_info.traceback`); None without one."""
    codes, positions = trace.raw_frames() if trace else ((), ())
    for code, position in zip(codes, positions, strict=True):
        if is_recipe_file(code.co_filename):
            return CodeLine(code.co_filename, trace.code_addr2line(code, position))
    return None


def absolute_target(target: str) -> str:
    """`file.py:Name` with the file's absolute path; a `module:Name` as it is."""
    place, _, name = target.rpartition(":")
    return f"{Path(place).resolve()}:{name}" if place.endswith(".py") else target


def file_digest(target: str) -> str:
    """SHA-256 of the file that a recipe comes from: the running program's, where `target` is empty; "" for a module."""
    place = target.rpartition(":")[0] if target else getattr(sys.modules["__main__"], "__file__", None) or ""
    return hashlib.sha256(Path(place).read_bytes()).hexdigest() if place.endswith(".py") else ""


def find_maker(target: str) -> Any:
    """The class or function at `module:Name` or `file.py:Name`; InputError where there is none."""
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise InputError(f"a recipe is a name, module:Recipe or file.py:Recipe, not {target!r}")
    if place.endswith(".py"):
        _check_file(Path(place))
    if not place.startswith(OUR_MODULES):
        configure_jax()  # the file may use JAX as it is read
    with blame(f"{place} cannot be imported"):
        module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    maker = getattr(module, name, None)
    if maker is None:
        makers = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise InputError(f"{place} has no {name}; {did_you_mean(name, makers)}")
    if not callable(maker):
        raise InputError(f"{target} is a {type(maker).__name__}, not a class or function that makes a recipe")
    return maker


def _check_file(path: Path) -> None:
    """Raise InputError for what cannot be a file of Python: its own errors name no file."""
    if not path.is_file():
        raise InputError(f"there is no recipe file {path}")
    try:
        binary = b"\0" in path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    if binary:
        raise InputError(f"{path} is binary, not a file of Python")


def _import_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise InputError(f"there is no module {error.name}, needed for the recipe in {name}") from error


def _import_file(path: Path) -> Any:
    name = f"tpuswarm_recipe_{path.stem}"  # no library's name, whatever the file is called
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        sys.path.append(folder)  # for the files beside it
    spec.loader.exec_module(module)
    return module


interruptible_imports.add(_import_file.__code__)


def option_types(maker: Any) -> dict[str, Any]:
    """Names and annotations of the options that a recipe takes."""
    parameters = inspect.signature(maker, eval_str=True).parameters.values()
    return {p.name: Any if p.annotation is p.empty else p.annotation for p in parameters}


def build_recipe(target: str, options: Mapping[str, Any], home: Path | None = None) -> Recipe:
    """The recipe at `target` with `options`; strings are read as the option's type, unknown names refused.

    home: the run in which it kept what options cannot hold.
    """
    maker = find_maker(target)
    types = option_types(maker)
    values = {}
    for name, value in options.items():
        if name not in types:
            raise InputError(f"{target.rpartition(':')[2]} has no option {name}; {did_you_mean(name, types)}")
        values[name] = typed(name, value, types[name])
    try:
        call = inspect.signature(maker).bind(**values)
    except TypeError as error:
        raise InputError(f"{target} needs more options: {error}; options are written --name value") from error
    call.apply_defaults()
    if inspect.isabstract(maker):
        raise InputError(f"{target} has no {' and no '.join(sorted(maker.__abstractmethods__))}: a Recipe needs them")
    with blame(f"{target} fails to make a recipe"):
        recipe = maker(**values)
    if not isinstance(recipe, Recipe):
        raise InputError(f"{target} makes a {type(recipe).__name__}, not a tpuswarm.Recipe; return supervised(...)")
    check_recipe(recipe, types)
    recipe.target = absolute_target(target)
    if isinstance(recipe, KeepsFiles):
        recipe.home = home
    recipe.given = values | {
        name: value for name, value in call.arguments.items() if isinstance(value, bool | int | float | str)
    }
    return recipe


def typed(name: str, value: Any, annotation: Any) -> Any:
    """An option's value as its type, a text as a person writes it; InputError for what is none."""
    adapter = TypeAdapter(annotation)
    try:
        if annotation is Any or not isinstance(value, str):
            return adapter.validate_python(value)
        found = adapter.validate_strings(value)
    except ValidationError as error:
        raise InputError(f"{option_name(name)} {describe_error(error.errors()[0])}") from error
    if isinstance(found, float):
        check_number(found, option_name(name))
    return found
