"""Load a published model and generate tokens on a CPU, as a worker of `peers.py`: with tpuswarm or with transformers.

python first_token.py tpuswarm|transformers FOLDER

It prints a line of JSON: seconds until its libraries are imported, until the weights are loaded, until the first token,
and of each later token.
"""

import json
import sys
import time
from collections.abc import Callable
from typing import Any

PROMPT = [*range(1, 65)]
MORE_TOKENS = 64


def main(form: str, folder: str) -> None:
    start = time.perf_counter()
    imported, generate = {"tpuswarm": _tpuswarm, "transformers": _transformers}[form](folder)
    loaded = time.perf_counter()
    generate(1)
    first = time.perf_counter()
    generate(MORE_TOKENS + 1)  # compiles, if another length needs that
    again = time.perf_counter()
    generate(1)
    one = time.perf_counter() - again
    again = time.perf_counter()
    generate(MORE_TOKENS + 1)
    each = (time.perf_counter() - again - one) / MORE_TOKENS
    times = {"import": imported - start, "load": loaded - imported, "first": first - loaded, "each": each}
    print(json.dumps(times), flush=True)


def _tpuswarm(folder: str) -> tuple[float, Callable[[int], Any]]:
    import jax

    from tpuswarm.recipes.decoder import model, sample
    from tpuswarm.recipes.decoder.recipe import Decoder
    from tpuswarm.recipes.language.sampling import make_sampling
    from tpuswarm.train.recipe import Options

    imported = time.perf_counter()
    recipe = Decoder(architecture=f"hf:{folder}", data="fake")
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), recipe.config))
    place = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes)
    params, sampling = recipe.load_shared(f"hf:{folder}", like), make_sampling(0.0)
    return imported, lambda count: list(
        sample.generate(params, PROMPT, count, sampling, 0, recipe.config, Options(precision="f32"))
    )


def _transformers(folder: str) -> tuple[float, Callable[[int], Any]]:
    import torch
    import transformers

    imported = time.perf_counter()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = torch.tensor([PROMPT])
    return imported, lambda count: model.generate(
        prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
