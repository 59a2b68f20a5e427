"""Run GPT-2's step in plain PyTorch on a CPU, as a worker of `torch_speed.py`; it does not need tpuswarm.

python torch_model.py eager|compile '{"layers": 4, "heads": 4, "width": 128, "context": 64, …}'
"""

import json
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  # the common name


class Block(nn.Module):  # type: ignore[misc]  # types are checked without torch
    """A pre-norm layer."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: B, T, D."""
        B, T, D = x.shape
        q, k, v = (y.view(B, T, self.heads, -1).transpose(1, 2) for y in self.qkv(self.ln_1(x)).split(D, dim=2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(B, T, D))
        return x + self.out(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):  # type: ignore[misc]
    """Learned positions, tied head; returns the mean cross-entropy."""

    def __init__(self, layers: int, heads: int, width: int, context: int, vocab: int):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """tokens, targets: B, T."""
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main(form: str, shape: dict[str, int]) -> None:
    """Serve blocks of steps on one random batch."""
    batch = shape.pop("batch")
    torch.manual_seed(0)
    model = GPT2(**shape)
    large = [p for p in model.parameters() if p.dim() == 2]
    small = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": large, "weight_decay": 0.1}, {"params": small, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99))
    loss_of = torch.compile(model) if form == "compile" else model
    rows = torch.randint(shape["vocab"] // 2, (batch, shape["context"] + 1))
    tokens, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def step() -> None:
        loss = loss_of(tokens, targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    step()  # compiles
    ready = {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    print(json.dumps(ready), flush=True)
    for line in sys.stdin:
        start = time.perf_counter()
        for _ in range(int(line)):
            step()
        print(time.perf_counter() - start, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
