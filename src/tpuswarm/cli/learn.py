"""`tpuswarm demo`: the whole thing in three minutes."""

import shutil
from pathlib import Path

import typer

STEPS = 1_200
LR = 3e-3
"""Higher than a long run wants: the demo has a minute and a half."""
SAMPLE_EVERY = 100
PROMPT = '"""Return the '
FOLDER = Path("runs/demo")


def demo() -> None:
    """Train a small GPT-2 on Python's own source code, here and now; leaves runs/demo/."""
    from tpuswarm.cli.train import print_result
    from tpuswarm.recipes.gpt2.recipe import GPT2
    from tpuswarm.train.display import auto_display
    from tpuswarm.train.run import Run, append_event
    from tpuswarm.train.trainer import Trainer

    if FOLDER.exists():
        held = Run(FOLDER)  # raises, naming the pid, while a living process uses it
        shutil.rmtree(FOLDER)
        held.close()
    display = auto_display()
    recipe = GPT2(size="tiny", lr=LR)
    loop = Trainer(save_every="30s", eval_every=STEPS // 4, display=display).steps(recipe, steps=STEPS, run=FOLDER)
    while True:
        try:
            row, state = next(loop)
        except StopIteration as end:
            result = end.value
            break
        if "loss" in row and (row["step"] == 1 or row["step"] % SAMPLE_EVERY == 0):
            text = PROMPT + recipe.sample(state, PROMPT, tokens=160, temperature=0.5, seed=1)
            append_event(FOLDER, "sample", step=row["step"], text=text)
            display.show(f"what it writes after step {row['step']}", text)
    print_result(result, as_json=False)
    if result.signal is not None:
        raise typer.Exit(128 + result.signal)
    print('next: tpuswarm sample runs/demo --prompt "import "')
