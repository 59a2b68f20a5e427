"""Run a Llama's step in transformers on a CPU, as a worker of `peers.py`; it does not need tpuswarm.

python transformers_llama.py eager|compile '{"hidden_size": 320, …}' ROWS
"""

import json
import sys
import time
from typing import Any

import torch
import transformers


def main(form: str, shape: dict[str, Any], rows: int) -> None:
    """Serve blocks of steps on one random batch."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(shape.pop("model_type"), **shape)
    model = transformers.AutoModelForCausalLM.from_config(config)
    large = [p for p in model.parameters() if p.dim() == 2]
    small = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": large, "weight_decay": 0.1}, {"params": small, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-5, betas=(0.9, 0.95))
    forward = torch.compile(model) if form == "compile" else model
    tokens = torch.randint(shape["vocab_size"], (rows, shape["max_position_embeddings"]))

    def step() -> None:
        loss = forward(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    step()  # compiles
    ready = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
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
    main(sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]))
