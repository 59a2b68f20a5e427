"""`tpuswarm chat`: talk with a trained or published model in the terminal."""

import sys
from contextlib import suppress
from signal import SIGINT
from typing import Annotated, Any

import typer

from tpuswarm import recipes
from tpuswarm.cli.completion import complete_runs
from tpuswarm.cli.console import RUN_HELP, Best, Trust
from tpuswarm.cli.train.trained import (
    RepetitionPenalty,
    Stop,
    Temperature,
    TopK,
    TopP,
    check_sampling,
    load,
)
from tpuswarm.config.limits import check_settings
from tpuswarm.config.units import check_number
from tpuswarm.errors import InputError
from tpuswarm.recipes.language.hub import PREFIX
from tpuswarm.train.process import platform
from tpuswarm.train.process.stop import StopSignals, end_quietly
from tpuswarm.train.process.terminal import echo
from tpuswarm.train.process.waiting import waiting


def chat(
    run: Annotated[str, typer.Argument(help=f"{RUN_HELP} Or hf:ORG/NAME or hf:DIR.", autocompletion=complete_runs)],
    tokens: Annotated[int, typer.Option(help="At most this many tokens per answer.")] = 512,
    temperature: Temperature = 0.8,
    top_k: TopK = None,
    top_p: TopP = None,
    repetition_penalty: RepetitionPenalty = None,
    stop: Stop = None,
    seed: Annotated[int, typer.Option(help="Another seed gives other answers.")] = 0,
    port: Annotated[int | None, typer.Option(help="Answer OpenAI's clients on this port of 127.0.0.1.")] = None,
    best: Best = False,
    trust: Trust = False,
) -> None:
    """Talk with a model: each line is a message. Ctrl-C ends an answer, Ctrl-D leaves."""
    if port is not None:
        check_number(port, "port", least=0, most=65_535)
    check_number(tokens, "tokens", least=1)
    check_sampling(temperature, top_k, top_p, repetition_penalty, stop)
    check_settings({"seed": seed})
    recipe, state = _load(run, best, trust)
    from tpuswarm.recipes.language.chat.reply import reply
    from tpuswarm.recipes.language.language_model import LanguageModel
    from tpuswarm.recipes.language.sampling import make_sampling
    from tpuswarm.train.supervised_program import inference_params

    if not isinstance(recipe, LanguageModel) or recipe.chat_template is None:
        raise InputError(f"{run} has no chat template, so it cannot chat; use `tpuswarm sample`")
    if port is not None:
        from tpuswarm.cli.train.chat_server import serve

        drawing = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "repetition_penalty": repetition_penalty}
        options = drawing | {"tokens": tokens, "seed": seed, "stop": stop or []}
        serve(recipe, inference_params(state), run.rstrip("/").rpartition("/")[2], port, options)
        return
    params, sampling = inference_params(state), make_sampling(temperature, top_k, top_p, repetition_penalty)
    prompt = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""
    messages = list[dict[str, str]]()
    end_quietly()
    while (line := _read_line(prompt)) is not None:
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line})
        answer = ""
        try:
            with StopSignals() as signals:
                for text in reply(recipe, params, messages, tokens, sampling, seed + len(messages), stop or ()):
                    if signals.requested:
                        break
                    print(text, end="", flush=True)
                    answer += text
        except InputError as error:
            echo(f"error: {error}", err=True)
            messages.pop()
            continue
        print(flush=True)
        if signals.requested not in (None, SIGINT):
            raise typer.Exit(128 + signals.requested)
        messages.append({"role": "assistant", "content": answer})


def _read_line(prompt: str) -> str | None:
    """Return the next line; None at the end."""
    with suppress(ImportError):
        import readline  # noqa: F401  # edits the line
    try:
        return input(prompt)
    except EOFError:
        print(end="\n" if prompt else "", flush=True)
        return None


def _load(place: str, best: bool, trust: bool) -> tuple[Any, Any]:
    """Return the recipe and the state of a run, or of a published model without its optimizer."""
    if not place.startswith(PREFIX):
        loaded = load(place, None, best, trust)
        return loaded.recipe, loaded.state
    with waiting(f"reading {place}", delay_s=0.0):
        from tpuswarm.train.user_code import find_maker

        maker: Any = find_maker(recipes.find(place)[0])
        recipe = maker(**maker.options_at(place))
        platform.load_jax()
        from tpuswarm.train.program.compiled import place_program
        from tpuswarm.train.program.request import default_request

        placed = place_program(recipe, default_request(recipe), platform.local_devices())
        exchange = placed.program.exchange()
        return recipe, exchange.put(placed.state, recipe.load_shared(place, exchange.get(placed.state)))
