"""Time the training step of another project's own code for `gpu_all`, and print a JSON object; needs no tpuswarm.

    python gpu_peers.py nanogpt|stylegan3|llmc|transformers FOLDER cuda|cpu '{"batch": 64, …}'

FOLDER is a clone of the project; transformers needs none. Losses, networks and optimizers are the project's, and the
loops follow its train.py.
"""

import importlib.util
import json
import re
import subprocess
import sys
import time
import types
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch.torch_version import TorchVersion

STARTED = time.perf_counter()


def nanogpt(
    folder: Path, device: str, *, batch: int, layers: int, heads: int, width: int, context: int, vocab: int,
    rounds: int, steps: int,
) -> None:  # fmt: skip
    """Time model.py with its optimizer, as train.py: bfloat16 autocast, TF32, torch.compile, fused AdamW."""
    sys.path.insert(0, str(folder))
    module = importlib.import_module("model")
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    with redirect_stdout(sys.stderr):
        config = module.GPTConfig(context, vocab, layers, heads, width, 0.0, True)
        model = module.GPT(config).to(device)
        optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), device)
    compiled = torch.compile(model) if device == "cuda" else model
    rows = torch.randint(vocab, (batch, context + 1), device=device)
    tokens, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def step(_: int) -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            _, loss = compiled(tokens, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    about = f"torch {torch.__version__}, batch {batch}, {'torch.compile' if device == 'cuda' else 'eager'}"
    _time(step, device, rounds, steps, items=batch * context, unit="tokens", about=about)


def stylegan3(
    folder: Path, device: str, *, resolution: int, latent: int, mapping: int, channels: int, most_channels: int,
    group: int, batch: int, rounds: int, steps: int,
) -> None:  # fmt: skip
    """Time its StyleGAN2 (cfg stylegan2, without augmentation) as training_loop.py does, with TF32 on."""
    sys.path.insert(0, str(folder))
    if importlib.util.find_spec("pkg_resources") is None:  # it reads torch's version with it; setuptools 82 has none
        module = sys.modules["pkg_resources"] = types.ModuleType("pkg_resources")
        module.__dict__["parse_version"] = TorchVersion
    networks = importlib.import_module("training.networks_stylegan2")
    losses = importlib.import_module("training.loss")
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    shape = {"c_dim": 0, "img_resolution": resolution, "img_channels": 3, "channel_base": channels * resolution,
             "channel_max": most_channels}  # fmt: skip
    generator = networks.Generator(
        z_dim=latent, w_dim=latent, mapping_kwargs={"num_layers": mapping}, fused_modconv_default="inference_only",
        **shape,
    )  # fmt: skip
    discriminator = networks.Discriminator(epilogue_kwargs={"mbstd_group_size": group}, **shape)
    nets = {
        name: net.train().requires_grad_(False).to(device) for name, net in (("G", generator), ("D", discriminator))
    }
    average = [leaf.clone() for leaf in nets["G"].parameters()]
    loss = losses.StyleGAN2Loss(
        device, nets["G"], nets["D"], r1_gamma=0.0002 * resolution**2 / batch, style_mixing_prob=0.9, pl_weight=2,
        pl_no_weight_grad=True,
    )  # fmt: skip
    intervals = {"G": 4, "D": 16}
    optimizers = {}
    for name, interval in intervals.items():
        share = interval / (interval + 1)
        optimizers[name] = torch.optim.Adam(nets[name].parameters(), 0.0025 * share, (0.0, 0.99**share), eps=1e-8)
    real = torch.rand(batch, 3, resolution, resolution, device=device) * 2 - 1
    labels = torch.zeros(batch, 0, device=device)

    def update(name: str, phase: str, gain: int) -> None:
        optimizers[name].zero_grad(set_to_none=True)
        nets[name].requires_grad_(True)
        codes = torch.randn(batch, latent, device=device)
        loss.accumulate_gradients(name + phase, real, labels, codes, labels, gain, 0)
        nets[name].requires_grad_(False)
        for leaf in nets[name].parameters():
            if leaf.grad is not None:
                torch.nan_to_num(leaf.grad, nan=0.0, posinf=1e5, neginf=-1e5, out=leaf.grad)
        optimizers[name].step()

    def step(number: int) -> None:
        for name, interval in intervals.items():
            update(name, "main", 1)
            if number % interval == 0:
                update(name, "reg", interval)
        with torch.no_grad():
            torch._foreach_lerp_(average, list(nets["G"].parameters()), 0.002)

    about = f"torch {torch.__version__}, batch {batch}, {steps} steps a round"
    _time(step, device, rounds, steps, items=batch, unit="pictures", about=about)


def transformers(
    _: Path, device: str, *, facts: dict[str, Any], rank: int | None, batch: int, context: int, rounds: int, steps: int
) -> None:
    """Time a causal language model in bfloat16 autocast; with a rank, peft's adapters on a bfloat16 base."""
    library: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    config = library.AutoConfig.for_model(**facts, attn_implementation="sdpa")
    model = library.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if rank else torch.float32)
    about = f"torch {torch.__version__}, transformers {library.__version__}"
    if rank:
        peft: Any = importlib.import_module("peft")
        modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        form = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=modules, task_type="CAUSAL_LM")
        model, about = peft.get_peft_model(model, form), f"{about}, peft {peft.__version__}"
    model.to(device).train()
    compiled = torch.compile(model) if device == "cuda" else model
    trained = [leaf for leaf in model.parameters() if leaf.requires_grad]
    optimizer = torch.optim.AdamW(trained, 2e-5, (0.9, 0.95), fused=device == "cuda")
    tokens = torch.randint(facts["vocab_size"], (batch, context), device=device)

    def step(_: int) -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda" or rank is not None):
            loss = compiled(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    about = f"{about}, batch {batch}, {'torch.compile' if device == 'cuda' else 'eager'}"
    _time(step, device, rounds, steps, items=batch * context, unit="tokens", about=about)


def llmc(folder: Path, device: str, *, batch: int, context: int) -> None:
    """Time its binary train_gpt2cu, a fresh 124M model on the text of its starter pack."""
    counts = {"-e": "d12", "-b": batch, "-t": context, "-x": 30, "-v": 0, "-s": 0, "-h": 0}
    arguments = [str(text) for option in counts.items() for text in option]
    done = subprocess.run([folder / "train_gpt2cu", *arguments], cwd=folder, text=True, capture_output=True)
    took = [float(ms) / 1e3 for ms in re.findall(r"\| ([\d.]+) ms \|", done.stdout)]
    if done.returncode or len(took) < 10:
        sys.exit(f"train_gpt2cu: {(done.stderr or done.stdout).strip().splitlines()[-1]}")
    _print(seconds=took[5:], items=batch * context, unit="tokens", about=f"train_gpt2cu, batch {batch}, a step a round")


def _time(step: Callable[[int], None], device: str, rounds: int, steps: int, **result: Any) -> None:
    done = 0

    def run(count: int) -> float:
        nonlocal done
        start = time.perf_counter()
        for _ in range(count):
            step(done)
            done += 1
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    run(1)
    ready_s = time.perf_counter() - STARTED
    if device == "cuda":
        result["memory"] = torch.cuda.max_memory_allocated()
    done = 0
    run(steps)
    _print(ready_s=ready_s, seconds=[run(steps) / steps for _ in range(rounds)], **result)


def _print(**result: Any) -> None:
    print(json.dumps(result), flush=True)


PEERS: dict[str, Callable[..., None]] = {
    "nanogpt": nanogpt, "stylegan3": stylegan3, "llmc": llmc, "transformers": transformers
}  # fmt: skip

if __name__ == "__main__":
    PEERS[sys.argv[1]](Path(sys.argv[2]), sys.argv[3], **json.loads(sys.argv[4]))
