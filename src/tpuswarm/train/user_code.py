"""Find and build a user's recipe, and report the errors of users' code with their lines."""

import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter, ValidationError

from tpuswarm.config.limits import option_name
from tpuswarm.config.nearest import did_you_mean
from tpuswarm.config.units import check_number
from tpuswarm.config.validation_errors import describe_error
from tpuswarm.errors import InputError, TpuswarmError, message_of
from tpuswarm.train.process.platform import configure_jax
from tpuswarm.train.process.stop import find_interrupt, interruptible_imports
from tpuswarm.train.recipe import Recipe, State, check_recipe, how_to_make_recipe, supports

OUR_FOLDER = Path(__file__).resolve().parents[1]
OUR_RECIPES = OUR_FOLDER / "recipes"
INSTALLED = ("site-packages", "<frozen", "dist-packages", sys.base_prefix)
MAX_MESSAGE_CHARS = 500
FILE_MODULE = "tpuswarm_recipe_"
"""Begins the names of modules of recipes' files."""


class CodeLine(NamedTuple):
    """A line of a file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def require_call(function: Any, name: str, *arguments: str) -> None:
    """Raise InputError, with the function's line, unless `function` can be called as name(*arguments).

    arguments: names of arguments; a keyword argument ends with `=`.
    """
    call = f"{name}({', '.join(f'{argument}…' if argument.endswith('=') else argument for argument in arguments)})"
    if not callable(function):
        raise InputError(f"{name} is a {type(function).__name__}; give a function {call}")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a C function has no signature
        return
    try:
        by_name = {argument[:-1]: None for argument in arguments if argument.endswith("=")}
        signature.bind(*[None] * (len(arguments) - len(by_name)), **by_name)
    except TypeError as error:
        raise InputError(f"{name} is called as {call}, but takes {signature}{line_of(function)}") from error


def line_of(function: Any) -> str:
    """Return ` (file:line)` of a user's function, to end a sentence; empty for other functions."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code and code_owner(code.co_filename) == "user" else ""


@contextmanager
def blame(failure: str, every_error: bool = False) -> Iterator[None]:
    """Turn an error raised in a user's file into InputError that names its line; let every other error pass.

    every_error: also of libraries, because only the user's objects are called.
    """
    try:
        yield
    except (TpuswarmError, KeyboardInterrupt):
        raise
    except BaseException as error:
        if interrupt := find_interrupt(error):
            raise interrupt from None
        if user_line(error) is None and not every_error:
            raise
        raise InputError(describe_failure(failure, error)) from error


def describe_failure(failure: str, error: BaseException) -> str:
    """Return a sentence about an error, with the user's line if there is one; our own errors are sentences."""
    if isinstance(error, TpuswarmError):
        return message_of(error)
    line = user_line(error)
    place = f" ({line})" if line else ""
    if isinstance(error, SystemExit):
        return f"{failure}: it ends the program with sys.exit{place}"
    message = " ".join(message_of(error).split()) or "no message"
    if len(message) > MAX_MESSAGE_CHARS:
        half = MAX_MESSAGE_CHARS // 2
        message = f"{message[:half]} … {message[-half:]}"  # a worker's traceback has the error itself last
    is_missing = isinstance(error, ModuleNotFoundError)
    help_ = f"; install it where tpuswarm is, in {sys.prefix}" if is_missing else ""
    return f"{failure}: {type(error).__name__}: {message}{place}{help_}"


def user_line(error: BaseException) -> str | None:
    """Return file:line of the innermost frame in a user's file, of the error or of its causes; None if there is none.

    Python and libraries raise errors of their own from a user's error.
    """
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, SyntaxError) and cause.filename:
            return f"{cause.filename}:{cause.lineno}"
        for frame in reversed(traceback.extract_tb(cause.__traceback__)):
            if code_owner(frame.filename) == "user":
                return f"{frame.filename}:{frame.lineno}"
        seen.add(id(cause))
        cause = cause.__cause__
        if type(cause).__name__ == "UnfilteredStackTrace":  # of JAX: the whole stack of calls
            break
    return None


def sample_for_report(recipe: Recipe, state: State) -> str | None:
    """Return a sample of 200 tokens, or the error of the user's `sample`; None if the model writes no text."""
    if not supports(recipe, "sample"):
        return None
    try:
        return recipe.sample(state, "", tokens=200, temperature=0.8, seed=0)
    except InputError:
        return None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  # the run has succeeded anyway
        return describe_failure("no sample", error)


@functools.cache
def code_owner(file: str) -> Literal["user", "us", "installed"]:
    """Return the owner of a code file; `installed` is a package or Python."""
    if Path(file).is_relative_to(OUR_FOLDER):
        return "us"
    return "installed" if any(part in file for part in INSTALLED) else "user"


@functools.cache
def is_recipe_file(file: str) -> bool:
    """Return whether a file may hold a recipe: a user's file, or one of our recipes."""
    return Path(file).is_relative_to(OUR_RECIPES) or code_owner(file) == "user"


def users_line(place: CodeLine | None) -> CodeLine | None:
    """Return a line of a recipe if the user may change it: not one of our own recipes."""
    return None if place is None or Path(place.file).is_relative_to(OUR_RECIPES) else place


def recipe_line(trace: Any) -> CodeLine | None:
    """Return the innermost line of a recipe in a JAX traceback (`equation.source_info.traceback`), if any."""
    codes, positions = trace.raw_frames() if trace else ((), ())
    for code, position in zip(codes, positions, strict=True):
        if is_recipe_file(code.co_filename):
            return CodeLine(code.co_filename, trace.code_addr2line(code, position))
    return None


def absolute_target(target: str) -> str:
    """Make the path of `file.py:Name` absolute; return `module:Name` unchanged."""
    place, _, name = target.rpartition(":")
    return f"{Path(place).resolve()}:{name}" if place.endswith(".py") else target


def file_digest(target: str) -> str:
    """Return the SHA-256 of a recipe's file, by default the running program's; "" for a module."""
    place = target.rpartition(":")[0] if target else getattr(sys.modules["__main__"], "__file__", None) or ""
    return hashlib.sha256(Path(place).read_bytes()).hexdigest() if place.endswith(".py") else ""


def find_maker(target: str) -> Any:
    """Return the class or function at `module:Name` or `file.py:Name`; InputError if there is none."""
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise InputError(f"a recipe is a name, module:Recipe or file.py:Recipe, not {target!r}")
    if place.endswith(".py"):
        check_recipe_file(Path(place))
    if not place.startswith("tpuswarm."):
        configure_jax()  # the import may use JAX
    with blame(f"{place} cannot be imported"):
        module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place)
    maker = getattr(module, name, None)
    if maker is None:
        makers = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise InputError(f"{place} has no {name}; {did_you_mean(name, makers)}")
    if not callable(maker):
        way_out = f": write `def {name}(): return …`" if isinstance(maker, Recipe) else ""
        raise InputError(f"{target} is a {type(maker).__name__}, not a class or function that makes a recipe{way_out}")
    return maker


def check_recipe_file(path: Path) -> None:
    """Raise InputError for a file that Python cannot read: Python's own errors name no file."""
    if not path.is_file():
        raise InputError(f"there is no recipe file {path}")
    try:
        if b"\0" in path.read_bytes():
            raise InputError(f"{path} is binary, not a file of Python")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


def _import_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise InputError(f"there is no module {error.name}, needed for the recipe in {name}") from error


_imported: dict[str, tuple[str, Any]] = {}
"""Digest and module of each recipe file, by path: a file may print, load data, or count calls."""
_importing: list[Path] = []


def _import_file(path: Path) -> Any:
    """Import a recipe file once, and again only after it has changed."""
    place, digest = str(path.resolve()), hashlib.sha256(path.read_bytes()).hexdigest()
    name = f"{FILE_MODULE}{path.stem}"  # a file may have the name of a library
    if place in _imported and _imported[place][0] == digest:
        sys.modules[name] = _imported[place][1]
        return _imported[place][1]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        sys.path.append(folder)  # the file may import its neighbours
    _importing.append(path)
    try:
        spec.loader.exec_module(module)
    finally:
        _importing.pop()
    _imported[place] = digest, module
    return module


def refuse_while_importing() -> None:
    """Raise InputError if a recipe file trains while it is imported."""
    if _importing:
        raise InputError(
            f"{_importing[-1]} trains when it is imported: run `python {_importing[-1]}`, or put that call under "
            '`if __name__ == "__main__":`'
        )


interruptible_imports.add(_import_file.__code__)


def imported_files() -> list[str]:
    """Return the files of recipes that this process has imported; another process imports them with `import_files`."""
    return [str(module.__file__) for name, module in sys.modules.items() if name.startswith(FILE_MODULE)]


def import_files(files: Iterable[str]) -> None:
    for file in files:
        _import_file(Path(file))


def option_types(maker: Any) -> dict[str, Any]:
    """Return the annotations of a recipe's options, by name."""
    parameters = inspect.signature(maker, eval_str=True).parameters.values()
    return {p.name: Any if p.annotation is p.empty else p.annotation for p in parameters}


def build_recipe(
    target: str, options: Mapping[str, Any], home: Path | None = None, named_by_user: bool = True
) -> Recipe:
    """Build the recipe at `target` with `options`, whose strings are parsed as the option's type.

    home: see Recipe.home. named_by_user: False for a target that a file names; it must be marked as a recipe.
    Raises InputError for a wrong target or option.
    """
    maker = find_maker(target)
    if not (named_by_user or is_marked(maker, target)):
        raise InputError(
            f"{target} is neither a recipe class, nor a function of the recipe's own file, nor one that is declared "
            "`-> tpuswarm.Recipe`, so it is not called"
        )
    types = option_types(maker)
    values = {}
    for name, value in options.items():
        if name not in types:
            raise InputError(f"{target.rpartition(':')[2]} has no option {name}; {did_you_mean(name, types)}")
        values[name] = parse_option(name, value, types[name])
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
        raise InputError(
            f"{target} makes a {type(recipe).__name__}, not a tpuswarm.Recipe; {how_to_make_recipe(recipe)}"
        )
    check_recipe(recipe, types)
    recipe.target = absolute_target(target)
    if supports(recipe, "keep"):
        recipe.home = home
    recipe.given = values | {
        name: value for name, value in call.arguments.items() if isinstance(value, bool | int | float | str)
    }
    return recipe


def is_marked(maker: Any, target: str) -> bool:
    """Return whether a class or function says that it makes recipes; `os:system` for example does not."""
    if inspect.isclass(maker):
        return issubclass(maker, Recipe)
    function, place = inspect.unwrap(maker), target.rpartition(":")[0]
    if not inspect.isfunction(function):
        return False
    return function.__code__.co_filename == place or function.__annotations__.get("return") in (Recipe, "Recipe")


def parse_option(name: str, value: Any, annotation: Any) -> Any:
    """Parse an option's value as its type; raise InputError if it has another type."""
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
