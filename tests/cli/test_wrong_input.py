"""Wrong input is answered in one sentence with exit code 2, leaves nothing, and waits for no library."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import my_recipe
from tests.journeys.documents import ROOT
from tpuswarm.swarm.supervision import start
from tpuswarm.train.run.directory import Run

HEAVY = ("jax", "ray", "optax", "orbax", "matplotlib")
"""Libraries that take a second or more to import, the first two alone or together."""
MODEL = ROOT / "tests" / "recipes" / "golden" / "model"
BAD_RUN = "does not exist; `tpuswarm status` lists the runs in ./runs"
TOKEN = "--token-file token"
HOSTS = f"join 127.0.0.1:1 {TOKEN} --hosts 2"
LINE = "train my_recipe.py:line --steps 4 --batch 8"
TINY = "train gpt2-tiny --data fake --layers 1 --width 16 --heads 1 --context 8 --steps 4 --run new"

AT_ONCE = [
    ("trian gpt2-tiny", "Did you mean 'train'? See `tpuswarm --help`"),
    ("ledger shwo", "Did you mean 'show'? See `tpuswarm ledger --help`"),
    ("ledger", "missing command"),
    ("train", "name a recipe first: tpuswarm train RECIPE"),
    ("train nope.py", "there is no file nope.py"),
    ("train --run new", "new has not begun, so name a recipe first"),
    ("train gpt2-tiny --devices some", "devices is all, a number such as 8, or indices such as [5]"),
    ("train gpt2-tny", "unknown recipe 'gpt2-tny'; did you mean gpt2-tiny?"),
    ("train gpt2-tny --detach", "unknown recipe 'gpt2-tny'; did you mean gpt2-tiny?"),
    ("train my_recipe.py", "name the one you mean: my_recipe.py:NAME"),
    ("train nowhere.py:line", "there is no recipe file nowhere.py"),
    ("train nowhere.toml", "there is no file nowhere.toml"),
    ("train --lr 1 gpt2-tiny", "the recipe comes first"),
    ("train gpt2-tiny --stepz 5", "has an option --stepz; did you mean --steps?"),
    *(
        (f"train gpt2-tiny {theirs} 1", f"neither train nor gpt2-tiny has an option {theirs}; did you mean {ours}?")
        for theirs, ours in (
            ("--max_iters", "--steps"), ("--block_size", "--context"), ("--n_layer", "--layers"),
            ("--n_embd", "--width"), ("--learning_rate", "--lr"), ("--learning-rate", "--lr"),
            ("--min_lr", "--lr-end"), ("--grad_clip", "--clip"), ("--out_dir", "--run"), ("--dtype", "--precision"),
            ("--max_epochs", "--epochs"), ("--tpu-cores", "--devices"), ("--output_dir", "--run"),
            ("--per_device_train_batch_size", "--batch"), ("--eval_every", "--eval-every"),
        )
    ),
    ("train gpt2-tiny --accelerator tpu", "has an option --accelerator; `tpuswarm train gpt2-tiny --help` lists them"),
    ("sample new --max_new_tokens 5", "there is no option --max_new_tokens; did you mean --tokens?"),
    ("up v5litepod-8", "v5litepod-8 is a type of TPU, not a file: `tpuswarm up --type v5e-8`"),
    ("up --accelerator-type v5e-8", "there is no option --accelerator-type; did you mean --type?"),
    ("train gpt2-tiny --bogus 1", "has an option --bogus; `tpuswarm train gpt2-tiny --help` lists them"),
    ("train gpt2-tiny --width", "--width needs a value"),
    ("train gpt2-tiny 5", "unexpected argument '5'"),
    ("train gpt2-tiny --steps 0 --detach", "steps must be a whole number above 0"),
    ("train gpt2-tiny --steps 5 --tokens 10K", "give one of steps, tokens and epochs, not steps and tokens"),
    ("train gpt2-tiny --data nowhere.txt", "nowhere.txt; --data takes a path or URL"),
    ("train gpt2-tiny --shard replikate", "shard is auto, replicate or fsdp, not 'replikate'"),
    ("train gpt2-tiny --init-from nowhere", "nowhere is neither a run nor a published model"),
    ("train gpt2-tiny --run token", "token is a file, not a run directory"),
    ("train gpt2-tiny --run .", ". is not empty and is not a run"),
    ("train gpt2-tiny --run s3://bucket/run", "takes a local directory or gs://BUCKET/FOLDER, not s3://bucket/run"),
    ("train gpt2-tiny --run runs/used", "runs/used is in use by process"),
    ("train gpt2-tiny --cycle 20", "--cycle needs --members"),
    ("train gpt2-tiny --dashboard", "--dashboard needs --members"),
    ("train gpt2-tiny --members 2 --outer avrage", "outer is average or nesterov, not 'avrage'"),
    ("train gpt2-tiny --members 2 --quantize int9", "quantize is int8 or int4, not 'int9'"),
    ("train gpt2-tiny --members 2 --overlap 3", "overlap is auto or 0, not '3'"),
    ("train gpt2-tiny --members 2 --profile", "--profile is for one process; trace a member with"),
    ("train gpt2-tiny --members 2 --fast-dev-run", "check a model in one process; leave --members out"),
    ("train gpt2-tiny --members 2 --keep-best eval_loss", "--keep-best does not work with --members"),
    ("train gpt2-tiny --members 2 --lr auto", "--lr auto works in one process"),
    ("train gpt2-tiny --hosts 2", "a run over 2 hosts also needs --host and --hosts-at"),
    ("train gpt2-tiny --hosts 2 --host 0 --hosts-at localhost:1 --run new --detach", "exclude each other"),
    ("plan gpt2-tiny --batch many", "batch is a number such as"),
    ("plan gpt2-tiny --hedas 2", "did you mean --heads?"),
    ("sample nowhere", BAD_RUN),
    ("sample new --grid 8", "grid is ROWSxCOLUMNS, each from 1 to 99, such as 8x8, not '8'"),
    ("sample new --grid 2x2 --truncation 2", "truncation must be at least 0 and at most 1, not 2.0"),
    ("sample new --grid 2x2 --out grid.txt", "--out grid.txt needs one of the extensions .png, .jpg, .webp"),
    ("sample new --grid 2x2 --out nowhere/grid.png", "there is no folder nowhere for --out nowhere/grid.png"),
    ("sample new --interpolate 1", "interpolate must be at least 2, not 1"),
    ("sample new --interpolate 9 --out walk.jpg", "--out walk.jpg needs one of the extensions .gif, .png, .webp"),
    ("project new nowhere.png", "there is no picture nowhere.png"),
    ("project new token --steps 0", "steps must be at least 1, not 0"),
    ("project new token --out a.gif", "--out a.gif needs one of the extensions .png, .jpg, .webp"),
    ("evaluate nowhere", BAD_RUN),
    ("export nowhere out --format hf", BAD_RUN),
    ("export nowhere .", ". already exists; use a new or empty folder"),
    ("export nowhere gs://bucket/out --format hf", "gs:/bucket/out is not a local folder"),
    ("export nowhere out --format onnx", "'onnx' is not one of 'hf'"),
    ("export nowhere", "missing argument 'out'. See `tpuswarm export --help`"),
    ("profile nowhere", BAD_RUN),
    ("ledger verify nowhere", BAD_RUN),
    ("ledger show nowhere", BAD_RUN),
    ("doctor nowhere/run", BAD_RUN),
    ("status nowhere", BAD_RUN),
    ("status .", ". is not a run"),
    ("status --jsn", "there is no option --jsn; did you mean --json?"),
    ("status --watch --json", "--watch and --json exclude each other"),
    ("logs nowhere", BAD_RUN),
    ("stop nowhere", BAD_RUN),
    (f"join nowhere {TOKEN}", "prints is HOST:PORT, with a port up to 65535, not 'nowhere'"),
    ("join 127.0.0.1:1 --token-file nowhere", "nowhere cannot be read"),
    ("join 127.0.0.1:1 --token-file empty.txt", "empty.txt is empty"),
    (f"join 127.0.0.1:1 {TOKEN}", "nothing answers at 127.0.0.1:1"),
    (HOSTS, "also needs --host and --hosts-at"),
    ("simulate nowhere.toml", "there is no file nowhere.toml"),
]  # fmt: skip

ONCE_LOADED = [
    ("doctor cloud --fix", "--fix is for machines only"),
    ("doctor cloud --report", "--report is for machines only"),
    ("doctor --report --fix", "--fix, --report and --run are different things"),
    (f"{HOSTS} --host 1", "also needs --hosts-at"),
    (f"{HOSTS} --host 0 --hosts-at 192.0.2.1:9", "host 0 cannot listen on 192.0.2.1:9"),
    (f"{HOSTS} --host 1 --hosts-at 127.0.0.1:9", "nothing answers at 127.0.0.1:1"),
    ("train my_recipe.py:needs_width --steps 4", "missing a required argument: 'width'"),
    ("train my_recipe.py:exits", "fails to make a recipe: it ends the program with sys.exit ("),
    ("train my_recipe.py:wrong_shapes --steps 4 --batch 8", "the loss of my_recipe fails: TypeError"),
    ("train my_recipe.py:no_data --steps 4", "KeyError: 'no such table' ("),
    (f"{LINE} --data token", "takes no --data"),
    (f"{LINE} --run token/run", "token/run cannot be a run directory: Not a directory"),
    (f"{LINE} --init-from nowhere", "nowhere is not a tpuswarm run"),
    (f"{TINY} --decay 0.1", "(its rate is --weight-decay)"),
    (f"{TINY} --lr auto --batch auto", "--lr auto needs the batch of the run"),
    (f"{TINY} --members 2 --devices 4", "this machine has no TPU or GPU to share out"),
    (f"{TINY} --members 2 --batch 12 --devices-per-member 5", "12 rows does not divide evenly over devices (5)"),
    (f"{TINY} --members 2 --outer average --outer-lr 0.5", "--outer average takes no --outer-lr (0.5)"),
    (f"{TINY} --members 2 --outer nesterov --outer-lr -1", "outer-lr must be above 0, not -1"),
    (f"{TINY} --members 2 --eval-every 5m", "in a swarm --eval-every counts steps"),
    (f"{TINY} --members 2 --init-from hf:{MODEL}", "is a different GPT-2: it has layers 2, heads 2, this one has"),
    (f"{TINY} --members 2 --dashboard --ray-address auto", "--dashboard and --ray-address exclude each other"),
    (f"{TINY} --members 2 --ray-address nowhere", "ray-address is HOST:PORT, with a port up to 65535"),
    (f"{TINY} --members 2 --ray-address 127.0.0.1:99999", "ray-address is HOST:PORT, with a port up to 65535"),
    (f"{TINY} --members 10000", "members need about"),
    (
        "train my_recipe.py:running_mean --steps 4 --batch 4 --members 2 --quantize int8",
        "could make a variance negative",
    ),
]

ONE_AFTER_ANOTHER = f"""
import contextlib, io, json, sys
from tpuswarm.cli import main
for line in json.loads(sys.argv[1]):
    sys.argv[1:] = line.split()
    with contextlib.redirect_stderr(io.StringIO()):
        try: main()
        except SystemExit: pass
    print(json.dumps([line, [name for name in {HEAVY} if name in sys.modules]]))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copyfile(my_recipe.__file__, "my_recipe.py")
    Path("token").write_text("0" * 64)
    Path("empty.txt").touch()
    held = Run(Path("runs/used"))
    yield tmp_path
    held.close()


@pytest.mark.parametrize(("line", "words"), AT_ONCE + ONCE_LOADED)
def test_one_sentence_and_nothing_left(folder, typed, monkeypatch, line, words):
    monkeypatch.setattr(start, "Cluster", lambda *arguments: pytest.fail("a cluster was about to be started"))
    before = sorted(folder.rglob("*"))
    code, out, err = typed(*line.split())
    assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1, err
    assert words in err and sorted(folder.rglob("*")) == before


def test_a_user_errs_before_anything_heavy_is_loaded(folder):
    lines = [line for line, _ in AT_ONCE]
    done = subprocess.run([sys.executable, "-c", ONE_AFTER_ANOTHER, json.dumps(lines)], capture_output=True, text=True)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [[line, []] for line in lines], done.stderr
