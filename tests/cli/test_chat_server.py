"""`tpuswarm chat --port`: OpenAI's chat completions, over HTTP on loopback."""

import http.client
import json
import threading
from contextlib import contextmanager

import pytest
import uvicorn

from tests.recipes.chats import write_model
from tpuswarm.cli.train.chat import _load
from tpuswarm.cli.train.chat_server import make_app
from tpuswarm.recipes.language.chat.reply import reply
from tpuswarm.recipes.language.sampling import make_sampling
from tpuswarm.train.supervised_program import inference_params
from tpuswarm.watch.page.server import open_listener

HI = [{"role": "user", "content": "Hi"}]
OPTIONS = {
    "temperature": 0.8, "top_k": None, "top_p": None, "repetition_penalty": None, "tokens": 6, "seed": 0, "stop": [],
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    place = write_model(tmp_path_factory.mktemp("model") / "published")
    recipe, state = _load(place, False, False)
    return recipe, inference_params(state)


@pytest.fixture(scope="module")
def port(model):
    listener = open_listener(0)
    number = listener.getsockname()[1]
    config = uvicorn.Config(
        make_app(*model, "mine", number, OPTIONS), log_level="critical", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    yield number
    server.should_exit = True
    thread.join()


@contextmanager
def response(port, body, method="POST", path="/v1/chat/completions", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    text = body if isinstance(body, bytes) else json.dumps(body)
    connection.request(method, path, text, {"Content-Type": "application/json"} | headers)
    yield connection.getresponse()
    connection.close()


def ask(port, body, **how):
    with response(port, body, **how) as answer:
        return answer.status, json.loads(answer.read())


def expected(model, messages=HI, tokens=6, temperature=0.8, seed=0, stop=()):
    return "".join(reply(*model, messages, tokens, make_sampling(temperature), seed, stop))


def test_answer_is_that_of_chat_and_fields_of_the_request_win(model, port):
    status, answer = ask(port, {"model": "any", "messages": HI})
    [choice] = answer["choices"]
    assert status == 200 and answer["object"] == "chat.completion" and answer["model"] == "mine"
    assert choice["message"] == {"role": "assistant", "content": expected(model)}
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": " there"}]}]
    more = {"messages": parts, "temperature": 0, "max_completion_tokens": 3, "seed": 5, "stop": None, "n": 1}
    content = ask(port, more)[1]["choices"][0]["message"]["content"]
    assert content == expected(model, [{"role": "user", "content": "Hi there"}], 3, 0.0, 5)
    assert ask(port, None, method="GET", path="/v1/models")[1]["data"][0]["id"] == "mine"


def test_stream_ends_with_its_reason_and_has_the_same_text(model, port):
    with response(port, {"messages": HI, "stream": True, "temperature": 0, "max_tokens": 20}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.read().decode().split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line)["choices"][0] for line in lines]
    assert chunks[0]["delta"]["role"] == "assistant"
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == expected(model, tokens=20, temperature=0.0)
    assert chunks[-1]["finish_reason"] in ("stop", "length")
    assert {chunk["finish_reason"] for chunk in chunks[:-1]} == {None}


def test_client_that_leaves_does_not_block_the_next_one(port):
    with response(port, {"messages": HI, "stream": True, "max_tokens": 200}) as answer:
        answer.read(10)
    assert ask(port, {"messages": HI})[0] == 200


@pytest.mark.parametrize(
    ("body", "headers", "words"),
    [
        (b"{", {}, "the request is no JSON object"),
        (b"[]", {}, "the request is no JSON object"),
        ({}, {}, "the request has no list of messages"),
        ({"messages": []}, {}, "the request has no list of messages"),
        ({"messages": "Hi"}, {}, "the request has no list of messages"),
        ({"messages": [{"role": "boss", "content": "a"}]}, {}, "the role 'boss', which is unknown"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, {}, "whose content is not text"),
        ({"messages": HI, "n": 2}, {}, "n is not supported; leave it out"),
        ({"messages": HI, "tools": [{}]}, {}, "tools is not supported"),
        ({"messages": HI, "max_tokens": 0}, {}, "max_tokens must be at least 1"),
        ({"messages": HI, "max_tokens": 1.5}, {}, "max_tokens is 1.5, not a whole number"),
        ({"messages": HI, "temperature": True}, {}, "temperature is True, not a number"),
        ({"messages": HI, "top_p": 2}, {}, "top_p must be above 0 and at most 1"),
        ({"messages": HI, "stop": 5}, {}, "stop is neither a text nor a list of texts"),
        ({"messages": [{"role": "user", "content": "x" * 400}]}, {}, "needs room for an answer"),
        ({"messages": HI}, {"Content-Type": "text/plain"}, "with the content type application/json"),
        ({"messages": HI}, {"Host": "evil.example"}, "requests go to 127.0.0.1:"),
    ],
)
def test_request_that_cannot_be_answered_is_refused_in_openai_s_form(port, body, headers, words):
    status, answer = ask(port, body, **headers)
    assert status == 400 and words in answer["error"]["message"]


def test_port_in_use_is_refused_before_anything_else(port, tmp_path, typed):
    code, _, err = typed("chat", write_model(tmp_path / "published"), "--port", str(port))
    assert code == 2 and f"port {port} of this computer is in use" in err
    assert typed("chat", "hf:no/folder", "--port", "70000")[0] == 2
