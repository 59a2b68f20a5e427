"""Conversations beside transformers: token numbers, the assistant's tokens, loss and gradient."""

import json

import jax
import numpy as np
import pytest
import tokenizers
from tests.recipes.chats import CHATS, TEMPLATES, messages, without_marks, write_chats, write_tokenizer

from tpuswarm.recipes.decoder.recipe import Decoder
from tpuswarm.recipes.language.chat.conversations import COUNTED, STARTS, TOKEN_BITS, encode_conversations
from tpuswarm.recipes.language.chat.template import read_template
from tpuswarm.recipes.language.hub import Published
from tpuswarm.recipes.language.text import open_text
from tpuswarm.recipes.language.tokenizer import read_bpe
from tpuswarm.train.program.compiled import place_program
from tpuswarm.train.program.request import Request

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

MODEL = {
    "vocab_size": 266, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2, "sliding_window": 20,
}  # fmt: skip
THINKING = [
    ("user", "1+1"),
    ("assistant", "<think>\nhm\n</think>\n\n2"),
    ("user", "+1"),
    ("assistant", "<think>\nso\n</think>\n\n3"),
]


def ours(folder, data):
    place = Published("theirs", folder)
    return list(
        encode_conversations(open_text(data, "messages"), read_template(place), read_bpe(folder / "tokenizer.json"))
    )


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("where", ["marks", "prompts", "a file"])
def test_tokens_and_masks_are_those_of_transformers(tmp_path, name, where):
    text, _ = TEMPLATES[name]
    write_tokenizer(tmp_path / "theirs", name)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    write_tokenizer(
        tmp_path / "ours", name, {"marks": text, "prompts": without_marks(text), "a file": "of no use"}[where]
    )
    if where == "a file":
        (tmp_path / "ours" / "chat_template.jinja").write_text(text)
    chats = [*CHATS, *[THINKING] * (name == "qwen")]
    found = ours(tmp_path / "ours", write_chats(tmp_path / "chat.jsonl", *chats))
    assert len(found) == len(chats)
    for chat, tokens in zip(chats, found, strict=True):
        wanted = theirs.apply_chat_template(
            messages(chat), return_assistant_tokens_mask=True, return_dict=True, tokenize=True
        )
        assert (tokens & TOKEN_BITS).tolist() == wanted["input_ids"]
        assert (tokens & COUNTED != 0).astype(int).tolist() == wanted["assistant_masks"]
        assert np.flatnonzero(tokens & STARTS).tolist() == [0]


@pytest.mark.parametrize("marked", [True, False])
def test_tools_and_their_calls_are_rendered_as_in_transformers(tmp_path, marked):
    text, _ = TEMPLATES["qwen"]
    write_tokenizer(tmp_path / "theirs", "qwen")
    write_tokenizer(tmp_path / "ours", "qwen", text if marked else without_marks(text))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    tools = [{"type": "function", "function": {"name": "time", "description": "größer <b>"}}]
    chat = [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "time", "arguments": {"zone": "UTC"}}]},
        {"role": "tool", "content": "12:00"},
        {"role": "assistant", "content": "At 12:00"},
    ]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": chat, "tools": tools}))
    (tokens,) = ours(tmp_path / "ours", str(tmp_path / "chat.jsonl"))
    (tmp_path / "table.jsonl").write_text(json.dumps({"messages": chat, "tools": json.dumps(tools)}))  # as tables do
    np.testing.assert_array_equal(ours(tmp_path / "ours", str(tmp_path / "table.jsonl")), [tokens])
    wanted = theirs.apply_chat_template(chat, tools=tools, return_assistant_tokens_mask=True, return_dict=True)
    assert (tokens & TOKEN_BITS).tolist() == wanted["input_ids"]
    assert (tokens & COUNTED != 0).astype(int).tolist() == wanted["assistant_masks"]


PAIRS = [("2+2=", "4"), ("Größe? ", "3 m 🙂 "), ("", "日本"), ("Hi\n", "\nHe said<eos>"), ("a", "<think>a</think>")]


def trl_tokens(tokenizer, prompt, completion):
    """The rule of TRL's SFTTrainer: tokens of prompt + completion, of which those behind the prompt's count."""
    if isinstance(prompt, str):
        before = tokenizer(prompt)["input_ids"]
        end = tokenizer.eos_token
        whole = tokenizer(prompt + completion + ("" if completion.endswith(end) else end))["input_ids"]
    else:
        options = {"tokenize": True, "return_dict": False}
        before = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, **options)
        whole = tokenizer.apply_chat_template(prompt + completion, **options)
    assert whole[: len(before)] == before
    return whole, [0] * len(before) + [1] * (len(whole) - len(before))


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("begins", [True, False])
def test_completions_are_tokenised_and_counted_as_in_trl(tmp_path, name, begins):
    write_tokenizer(tmp_path / "theirs", name)
    if begins:  # as Llama 3's tokenizer
        file, begin = tmp_path / "theirs" / "tokenizer.json", TEMPLATES[name][1][0]
        library = tokenizers.Tokenizer.from_file(str(file))
        number = library.token_to_id(begin)
        library.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, number)]
        )
        split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r" ?\w+| ?[^\s\w]+|\s+"), "isolated")
        byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        library.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([split, byte_level])
        library.save(str(file))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    pairs = [*PAIRS, *((messages(chat[:-1]), messages(chat[-1:])) for chat in CHATS)]
    lines = [json.dumps({"prompt": prompt, "completion": completion}) for prompt, completion in pairs]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    found = ours(tmp_path / "theirs", str(tmp_path / "pairs.jsonl"))
    assert len(found) == len(pairs)
    for (prompt, completion), tokens in zip(pairs, found, strict=True):
        ids, counted = trl_tokens(theirs, prompt, completion)
        assert (tokens & TOKEN_BITS).tolist() == ids
        assert (tokens & COUNTED != 0).astype(int).tolist()[1:] == counted[1:]  # nothing predicts the first


def test_token_across_the_end_of_a_prompt_counts(tmp_path):
    """TRL warns, and counts tokens of the whole from the prompt's number of tokens on."""
    write_tokenizer(tmp_path / "theirs", "gemma")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "Hel", "completion": "lo"}))
    (tokens,) = ours(tmp_path / "theirs", str(tmp_path / "pairs.jsonl"))
    assert theirs.convert_ids_to_tokens((tokens & TOKEN_BITS).tolist()) == ["He", "ll", "o", "<eos>"]
    assert (tokens & COUNTED != 0).tolist() == [False, True, True, True]


def test_loss_and_gradient_of_packed_conversations_are_those_of_labels_in_transformers(tmp_path, monkeypatch):
    monkeypatch.setenv("TPUSWARM_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("mistral", **MODEL, attn_implementation="eager")
    made = transformers.AutoModelForCausalLM.from_config(config).eval()
    made.save_pretrained(tmp_path / "theirs")
    write_tokenizer(tmp_path / "theirs", "llama")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    place = f"hf:{tmp_path / 'theirs'}"
    data = write_chats(tmp_path / "chat.jsonl", *CHATS)
    recipe = Decoder(**Decoder.options_at(place) | {"data": data, "context": 256})
    placed = place_program(recipe, Request(2, precision="highest"), jax.devices()[:1])
    state = placed.init(jax.random.key(0), recipe.load_shared(place, placed.program.exchange().get(placed.state)))
    rows = recipe.data("all").rows(0, 2)
    assert recipe.data("all").rows_per_epoch == 2 and rows["segments"].max() > 1
    total, weight = placed.evaluate(state, rows)["loss"]
    expected, count = torch.zeros(()), 0
    for chat in CHATS:
        found = tokenizer.apply_chat_template(
            messages(chat), return_assistant_tokens_mask=True, return_dict=True, return_tensors="pt"
        )
        ids, mask = found["input_ids"], torch.as_tensor(found["assistant_masks"]).reshape(1, -1)
        labels = torch.where(mask > 0, ids, -100)
        count += int(mask.sum())
        logits = made(ids).logits[:, :-1]
        expected = expected + torch.nn.functional.cross_entropy(logits[0], labels[0, 1:], reduction="sum")
    expected.backward()
    assert float(weight) == count and float(total) == pytest.approx(float(expected.detach()), rel=1e-5)
    gradient = np.asarray(placed.program.batch_gradient(state, rows, jax.random.key(0))["embed"])
    wanted = made.get_input_embeddings().weight.grad.numpy()
    np.testing.assert_allclose(gradient[: len(wanted)], wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())
