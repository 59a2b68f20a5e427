"""Serve a model's answers to this computer, in the form of OpenAI's chat completions."""

import json
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tpuswarm.cli.train.trained import check_sampling
from tpuswarm.config.limits import check_settings
from tpuswarm.config.units import check_number
from tpuswarm.errors import InputError
from tpuswarm.recipes.language.chat.conversations import check_messages
from tpuswarm.recipes.language.chat.reply import reply
from tpuswarm.recipes.language.sampling import make_sampling
from tpuswarm.train.process.terminal import echo
from tpuswarm.watch.page.guard import LOOPBACK
from tpuswarm.watch.page.server import open_listener

PLAIN: dict[str, tuple[Any, ...]] = {
    "n": (1,), "tools": ([],), "functions": ([],), "logprobs": (False,), "logit_bias": ({},),
    "response_format": ({"type": "text"},), "presence_penalty": (0,), "frequency_penalty": (0,),
}  # fmt: skip
"""Fields that change the answer → the values with which they are supported, besides null."""


def serve(recipe: Any, params: Any, name: str, port: int, options: Mapping[str, Any]) -> None:
    """Answer requests until a signal ends it; options: of `tpuswarm chat`, for fields that a request does not have."""
    listener = open_listener(port)
    port = listener.getsockname()[1]
    echo(f"{name} answers OpenAI's clients at http://{LOOPBACK}:{port}/v1 until Ctrl-C")
    app = make_app(recipe, params, name, port, options)
    config = uvicorn.Config(app, log_level="critical", access_log=False, timeout_graceful_shutdown=1)
    uvicorn.Server(config).run([listener])


def make_app(recipe: Any, params: Any, name: str, port: int, options: Mapping[str, Any]) -> Starlette:
    """Return the web application."""

    def answer(asked: Mapping[str, Any]) -> Iterator[str]:
        sampling = make_sampling(*(asked[name] for name in ("temperature", "top_k", "top_p", "repetition_penalty")))
        return reply(recipe, params, asked["messages"], asked["max_tokens"], sampling, asked["seed"], asked["stop"])

    async def complete(request: Request) -> Response:
        # A web page can only send plain text here, or name another host.
        is_ours = request.headers.get("host") in {f"{host}:{port}" for host in (LOOPBACK, "localhost")}
        if not is_ours or not request.headers.get("content-type", "").startswith("application/json"):
            raise InputError(f"requests go to {LOOPBACK}:{port}, with the content type application/json")
        asked = read_request(await request.body(), options)
        pieces = answer(asked)
        texts = [await run_in_threadpool(next, pieces, "")]  # raises an error before the answer begins
        about = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": name}

        def body(kind: str, part: str, content: Mapping[str, str], is_last: bool) -> dict[str, Any]:
            reason = None
            if is_last:
                is_cut = len(recipe.tokenizer.encode("".join(texts))) >= asked["max_tokens"]
                reason = "length" if is_cut else "stop"
            choice = {"index": 0, part: content, "logprobs": None, "finish_reason": reason}
            return {**about, "object": kind, "choices": [choice]}

        def events() -> Iterator[str]:
            parts: list[dict[str, str]] = [{"role": "assistant", "content": texts[0]}]
            while parts:
                yield f"data: {json.dumps(body('chat.completion.chunk', 'delta', parts.pop(), False))}\n\n"
                if (piece := next(pieces, None)) is not None:
                    texts.append(piece)
                    parts.append({"content": piece})
            yield f"data: {json.dumps(body('chat.completion.chunk', 'delta', {}, True))}\n\ndata: [DONE]\n\n"

        if asked.get("stream"):
            return StreamingResponse(events(), media_type="text/event-stream")
        await run_in_threadpool(lambda: texts.extend(pieces))
        message = {"role": "assistant", "content": "".join(texts)}
        return JSONResponse(body("chat.completion", "message", message, True))

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": name, "object": "model", "owned_by": "tpuswarm"}]})

    async def refuse(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": {"message": str(error), "type": "invalid_request_error"}}, 400)

    routes = [Route("/v1/chat/completions", complete, methods=["POST"]), Route("/v1/models", models)]
    return Starlette(routes=routes, exception_handlers={InputError: refuse})


def read_request(body: bytes, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request, `options` where it has none. Raise InputError for what is not supported."""
    try:
        given = {name: value for name, value in json.loads(body).items() if value is not None}
    except (ValueError, AttributeError) as error:
        raise InputError(f"the request is no JSON object: {error}") from error
    for name, plain in PLAIN.items():
        if given.get(name) not in (None, *plain):
            raise InputError(f"{name} is not supported; leave it out")
    asked = {
        **options,
        **given,
        "max_tokens": given.get("max_completion_tokens", given.get("max_tokens", options["tokens"])),
    }
    messages = asked.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and isinstance(parts := message.get("content"), list):
            is_text = all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts)
            message["content"] = "".join(part["text"] for part in parts) if is_text else None
    check_messages(messages or None, "list of messages", "the request")
    for name, kinds in {
        "max_tokens": (int,),
        "seed": (int,),
        "temperature": (int, float),
        "top_p": (int, float),
    }.items():
        if asked[name] is not None and type(asked[name]) not in kinds:
            raise InputError(f"{name} is {asked[name]!r}, not {'a whole number' if float not in kinds else 'a number'}")
    check_number(asked["max_tokens"], "max_tokens", least=1)
    check_settings({"seed": asked["seed"]})
    asked["stop"] = [asked["stop"]] if isinstance(asked["stop"], str) else asked["stop"]
    if not isinstance(asked["stop"], list) or not all(isinstance(text, str) for text in asked["stop"]):
        raise InputError("stop is neither a text nor a list of texts")
    check_sampling(asked["temperature"], asked["top_k"], asked["top_p"], asked["repetition_penalty"], asked["stop"])
    return asked
