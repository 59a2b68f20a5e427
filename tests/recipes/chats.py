"""Tiny published models with a chat template, written like those of Qwen, Llama and Gemma, and conversations."""

import json
import re
from pathlib import Path

import jax
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from tpuswarm.recipes.decoder import export, model
from tpuswarm.recipes.decoder.recipe import Decoder
from tpuswarm.recipes.language.tokenizer import read_bpe

QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools' }}
    {%- for tool in tools %}
        {{- '\\n' }}{{ tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {%- set ns.last = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}
            {%- if loop.index0 > ns.last %}
                {{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
            {%- endif %}
            {{- content }}
            {%- for call in message.tool_calls or [] %}
                {{- '<tool_call>' + call | tojson + '</tool_call>' }}
            {%- endfor %}
            {{- '<|im_end|>' }}
        {%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{%- set date = strftime_now('%d %b %Y') if with_date is defined else '26 Jul 2024' %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: ' + date + '\\n\\n' + system_message + '<|eot_id|>' }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {%- if message['role'] == 'assistant' %}
        {%- generation %}
            {{- message['content'] | trim + '<|eot_id|>' }}
        {%- endgeneration %}
    {%- else %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
GEMMA = """\
{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first = messages[0]['content'] + '\\n\\n' -%}
    {%- set rest = messages[1:] -%}
{%- else -%}
    {%- set first = '' -%}
    {%- set rest = messages -%}
{%- endif -%}
{%- for message in rest -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif -%}
    {%- if message['role'] == 'assistant' -%}
        {{ '<start_of_turn>model\\n' -}}
        {%- generation -%}{{ message['content'] | trim + '<end_of_turn>' }}{%- endgeneration -%}
        {{ '\\n' -}}
    {%- else -%}
        {{ '<start_of_turn>user\\n' + (first if loop.first else '') + message['content'] | trim + '<end_of_turn>\\n' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\\n' -}}
{%- endif -%}
"""
TEMPLATES = {
    "qwen": (QWEN, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]),
    "llama": (
        LLAMA,
        ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    ),
    "gemma": (GEMMA, ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]),
}
CHATS = [
    [("user", "Hi"), ("assistant", "Hello, you!")],
    [
        ("system", "Be short."),
        ("user", "Größe?\n"),
        ("assistant", " 3 m 🙂 "),
        ("user", "And 3 m more?"),
        ("assistant", "6"),
    ],
    [("user", "a"), ("assistant", "a"), ("user", "a"), ("assistant", "a\n\nb")],
    [("user", "日本"), ("assistant", "日本 <|not a token|> 日")],
]
FACTS = {
    "model_type": "qwen3", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip


def without_marks(template: str) -> str:
    """The template as published models have it."""
    return re.sub(r" (end)?generation ", lambda mark: " endif " if mark[1] else " if true ", template)


def write_tokenizer(folder: Path, name: str, template: str | None = None) -> None:
    """Write a tokenizer of bytes with the special tokens of a template, and the template."""
    text, special = TEMPLATES[name]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("l", "l"), ("H", "e"), ("ð", "Ł")]
    vocab = {token: number for number, token in enumerate([*alphabet, *map("".join, merges)])}
    library = Library(models.BPE(vocab, merges))
    library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    library.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    library.add_tokens([AddedToken(token, normalized=False) for token in ("<think>", "</think>")])
    folder.mkdir(exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": special[0],
        "eos_token": {"__type": "AddedToken", "content": special[1]},
        "chat_template": text if template is None else template,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))


def write_model(folder: Path, name: str = "qwen", template: str | None = None) -> str:
    """Write a published model with random weights and return its name."""
    write_tokenizer(folder, name, template)
    tokenizer, facts = read_bpe(folder / "tokenizer.json"), (folder / "tokenizer_config.json").read_text()
    shape = FACTS | {"vocab_size": tokenizer.vocab}
    recipe = Decoder(architecture=json.dumps(shape), data="fake")
    export.write(model.init(jax.random.key(3), recipe.config), recipe.config, shape, tokenizer, folder)
    (folder / "tokenizer_config.json").write_text(facts)
    return f"hf:{folder}"


def messages(chat: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in chat]


def write_chats(path: Path, *chats: list[tuple[str, str]]) -> str:
    path.write_text("".join(json.dumps({"messages": messages(chat)}) + "\n" for chat in chats))
    return str(path)
