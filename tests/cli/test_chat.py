"""`tpuswarm chat` in a terminal and in a pipe, and how `sample` draws."""

import io
import signal
import sys

import pytest

from tests.recipes.chats import write_model
from tests.terminal import terminal
from tpuswarm.recipes.language.chat import reply


@pytest.fixture
def place(tmp_path):
    return write_model(tmp_path / "published")


def test_each_line_of_a_pipe_is_answered_and_ctrl_c_ends_an_answer(place, typed, monkeypatch):
    asked = []

    def answer(recipe, params, messages, tokens, sampling, seed, stop):
        asked.append([message["content"] for message in messages])
        yield f"answer {len(asked)}"
        if len(asked) == 1:
            signal.raise_signal(signal.SIGINT)
        yield ", more"
        yield " and the rest"

    monkeypatch.setattr(reply, "reply", answer)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n\nAgain"))
    code, out, _ = typed("chat", place, "--tokens", "5")
    assert code == 0 and out == "answer 1\nanswer 2, more and the rest\n"
    assert asked == [["Hi"], ["Hi", "answer 1", "Again"]]


def test_termination_during_an_answer_ends_the_chat(place, typed, monkeypatch):
    def answer(*args):
        yield "begun"
        signal.raise_signal(signal.SIGTERM)
        yield " and the rest"

    monkeypatch.setattr(reply, "reply", answer)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\nAgain\n"))
    code, out, _ = typed("chat", place)
    assert code == 128 + signal.SIGTERM and out == "begun\n"


def test_message_without_room_for_an_answer_is_refused_and_the_next_one_answered(place, typed, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{'x' * 300}\nHi\n"))
    code, out, err = typed("chat", place, "--tokens", "4", "--temperature", "0")
    assert code == 0 and out.endswith("\n") and "error: your message has 3" in err


def test_prompt_waits_for_a_line_and_ctrl_d_leaves(place, tmp_path):
    with terminal(["chat", place, "--tokens", "3", "--temperature", "0"], tmp_path) as shell:
        shell.asked("> ")
        shell.send(b"Hi\n")
        shell.wait(lambda shell: b"Hi\r\n" in shell.written)
        shell.asked("> ")
        shell.send(b"\x04")
        shell.finish()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["chat", "RUN"], "has no chat template, so it cannot chat; use `tpuswarm sample`"),
        (["chat", "hf:no/folder/here"], "there is no folder no/folder/here"),
        (["chat", "RUN", "--tokens", "0"], "tokens must be at least 1"),
        (["sample", "RUN", "--top-k", "0"], "top_k must be at least 1"),
        (["sample", "RUN", "--top-p", "1.5"], "top_p must be above 0 and at most 1"),
        (["sample", "RUN", "--repetition-penalty", "0"], "repetition_penalty must be above 0"),
        (["sample", "RUN", "--stop", ""], "--stop is empty: leave it out"),
    ],
)
def test_impossible_choices_are_refused(finished_run, typed, words, message):
    code, _, err = typed(*(str(finished_run.run) if word == "RUN" else word for word in words))
    assert code == 2 and message in err, err


def test_sample_ends_before_a_text_and_draws_as_asked(finished_run, typed):
    words = ["sample", str(finished_run.run), "--prompt", "line", "--tokens", "40"]
    greedy = typed(*words, "--temperature", "0")[1]
    assert typed(*words, "--top-k", "1")[1] == typed(*words, "--top-p", "0.000001")[1] == greedy
    stop = greedy.rstrip("\n")[20:24]
    short = typed(*words, "--temperature", "0", "--stop", stop)[1]
    assert len(short) < len(greedy) and greedy.startswith(short.rstrip("\n")) and stop not in short[4:]
    assert typed(*words, "--temperature", "0", "--repetition-penalty", "2")[1] != greedy
