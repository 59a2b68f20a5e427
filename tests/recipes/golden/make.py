"""Make the golden files in this folder with torch and transformers, without tpuswarm.

    .venv-oracle/bin/python tests/recipes/golden/make.py make FOLDER
    .venv-oracle/bin/python tests/recipes/golden/make.py read FOLDER...

`make`: a random GPT-2 as transformers stores it, its logits, loss and gradients, and a tokenizer of GPT-2's kind with
its numbers for some texts. `read`: the results of the model in FOLDER/model, and its tokenizer's numbers.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, GPT2Tokenizer

SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 12, "vocab_size": 300}
END = "<|endoftext|>"
ENDS = {"bos_token_id": 0, "eos_token_id": 0}
CORPUS = [
    "The quick brown fox jumps over the lazy dog; the dog doesn't mind, it's asleep.",
    "def the_function(x):\n    return [each for each in x if each != 'the end']\n" * 2,
    "In 1986 there were 42 of them, and by 2019 there'd be 1,337.",
]
TEXTS = [
    "",
    " ",
    "\n\n  two spaces, then \t a tab   \n",
    "The dog's asleep; they'll see it isn't, won't they?",
    "def f(x):\n        return x  # eight spaces\n\n\n",
    "naïve café, 中文字符, Ελληνικά, 🙂👩‍🚀, e\u0301, \u00a0no-break\u2003em",
    f"one{END}two {END} three{END}",
    "123456789 1,000.50 x1y2",
    "\x1cseparator\x85next\u2028line\u200bzero",
    "'S 't 're 'LL ''ve",
]


def model(seed: int, shape: dict[str, int]) -> GPT2LMHeadModel:
    """A GPT-2 with random numbers everywhere, biases and scales too, so that none can be left out unnoticed."""
    torch.manual_seed(seed)
    made = GPT2LMHeadModel(GPT2Config(**shape, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **ENDS))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return made.eval()


def write(made: GPT2LMHeadModel, seed: int, folder: Path) -> None:
    """The model, and its results on two random rows."""
    made.save_pretrained(folder / "model")
    (folder / "model" / "generation_config.json").unlink()
    length = made.config.n_positions + 1
    tokens = np.random.default_rng(seed).integers(made.config.vocab_size, size=(2, length)).astype(np.int32)
    save_file(results(made, tokens), folder / "results.safetensors")


def results(made: GPT2LMHeadModel, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Logits (rows, tokens, vocabulary), mean loss of the next tokens and its gradients, by name."""
    ids = torch.from_numpy(tokens.astype(np.int64))
    logits = made(ids[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    made.zero_grad()
    loss.backward()
    grads = {f"grad/{name}": each.grad.numpy() for name, each in made.named_parameters()}
    return {"tokens": tokens, "logits": logits.detach().numpy(), "loss": loss.detach().numpy(), **grads}


def make(folder: Path) -> None:
    """Write all golden files into `folder`."""
    write(model(0, SHAPE), 0, folder)
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(CORPUS, vocab_size=SHAPE["vocab_size"], special_tokens=[END], show_progress=False)
    trained.save_model(str(folder / "model"))
    tokenizer = GPT2Tokenizer.from_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    ids = {text: tokenizer(text)["input_ids"] for text in TEXTS}
    (folder / "tokens.json").write_text(json.dumps(ids, indent=0) + "\n")


def make_random(folder: Path) -> None:
    """Write models of random shapes and their results into folders below `folder`."""
    for seed in range(4):
        random = np.random.default_rng(seed)
        heads = int(random.integers(1, 5))
        shape = {
            "n_layer": int(random.integers(1, 5)), "n_head": heads, "n_embd": heads * int(random.integers(4, 20)),
            "n_positions": int(random.integers(4, 40)), "vocab_size": int(random.integers(5, 400)),
        }  # fmt: skip
        write(model(seed, shape), seed, folder / f"{seed}")


def read(folder: Path) -> None:
    """Results of FOLDER/model on the tokens in FOLDER/tokens.safetensors, numbers of the texts in FOLDER/texts.json."""
    made = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    save_file(results(made, load_file(folder / "tokens.safetensors")["tokens"]), folder / "results.safetensors")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    ids = {text: tokenizer(text)["input_ids"] for text in json.loads((folder / "texts.json").read_text())}
    assert all(tokenizer.decode(each, clean_up_tokenization_spaces=False) == text for text, each in ids.items())
    (folder / "tokens.json").write_text(json.dumps(ids))


if __name__ == "__main__":
    for target in sys.argv[2:]:
        {"make": make, "random": make_random, "read": read}[sys.argv[1]](Path(target))
