"""Several data sets in one run: shares, order, held-out losses, and bad input."""

import json
from collections import Counter

import jax
import numpy as np
import pytest

from tests.recipes.chats import CHATS, QWEN, without_marks, write_chats, write_model
from tpuswarm.errors import InputError, NoSuchSplit
from tpuswarm.recipes.decoder.recipe import Decoder
from tpuswarm.recipes.gpt2.recipe import GPT2
from tpuswarm.recipes.language.mixture import BLOCK_ROWS, MixedSource, divide, parse_data, set_names
from tpuswarm.swarm.member import data_files
from tpuswarm.train.loop.evaluate import evaluate_run
from tpuswarm.train.recipe import Weighted
from tpuswarm.train.run.loaded import load_run
from tpuswarm.train.trainer import Trainer

FOX = "the quick brown fox jumps over the lazy dog\n"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TPUSWARM_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def place(tmp_path):
    return write_model(tmp_path / "published", template=without_marks(QWEN))


@pytest.fixture
def sets(tmp_path):
    """A text and conversations."""
    (tmp_path / "a.txt").write_text(FOX * 60)
    return str(tmp_path / "a.txt"), write_chats(tmp_path / "chat.v2.jsonl", *CHATS * 20)


def decoder(place, data, **options):
    return Decoder(**Decoder.options_at(place) | {"data": data, "context": 32} | options)


class Numbers:
    """Rows that are their own numbers."""

    def __init__(self, rows, start):
        self.rows_per_epoch, self._start, self.digest = rows, start, f"{rows} from {start}"

    def rows(self, start, count):
        return {
            "tokens": self._start
            + np.arange(start, start + count, dtype=np.int32)[:, None]
            + np.zeros((1, 3), np.int32)
        }


def test_every_block_has_the_shares_and_each_set_its_own_order():
    rng = np.random.default_rng(0)
    for weights in ([1], [0.7, 0.3], [5, 1e-9, 2], rng.uniform(0.01, 1, 7)):
        quotas = divide(BLOCK_ROWS, weights)
        assert sum(quotas) == BLOCK_ROWS and min(quotas) >= 1
        assert np.abs(np.array(quotas) - BLOCK_ROWS * np.array(weights) / sum(weights)).max() <= 1.01
        source = MixedSource([Numbers(10, 10**6 * number) for number in range(len(quotas))], quotas, 3, False)
        rows = source.rows(0, 3 * BLOCK_ROWS)
        for block in np.split(rows["set"], 3):
            assert Counter(block.tolist()) == dict(enumerate(quotas))
        for number, quota in enumerate(quotas):
            own = rows["tokens"][rows["set"] == number, 0]
            assert own.tolist() == [10**6 * number + row for row in range(3 * quota)]
        for start, count in [(0, 1), (1023, 2), (1024, 1), (500, 1800), *rng.integers(1, 1000, (20, 2))]:
            part = source.rows(int(start), int(count))
            for name, array in rows.items():
                np.testing.assert_array_equal(part[name], array[start : start + count])
        if len(quotas) > 1:  # mixed, not one set after the other
            assert len({*rows["set"][:40].tolist()}) > 1


def test_shares_are_exact_where_they_can_be():
    assert divide(12, [3, 4, 5]) == (3, 4, 5) and divide(10, [0, 1, 1]) == (0, 5, 5)
    assert divide(5, [1, 1, 1]) in {(2, 2, 1), (2, 1, 2), (1, 2, 2)} and divide(3, [1e9, 1, 1]) == (1, 1, 1)


def test_place_may_end_with_a_weight_and_hold_colons(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes:2").write_text("a")
    for text, place, weight in [
        ("a.txt:0.7", "a.txt", 0.7), ("a:b.txt:3", "a:b.txt", 3.0), ("notes:2", "notes:2", None),
        ("notes:2:5e-1", "notes:2", 0.5), ("a:b.txt", "a:b.txt", None), ("gs://bucket/a:0.5", "gs://bucket/a", 0.5),
        ("http://host:8080/a.txt:2", "http://host:8080/a.txt", 2.0), ("http://host:8080", "http://host:8080", None),
    ]:  # fmt: skip
        other = "other" if weight is None else "other:1"
        assert parse_data([text, other])[0] == (place, weight) and parse_data(f"{text}\n{other}")[0] == (place, weight)
        assert parse_data(text) == [(place, None)]
    assert set_names(["/x/a.txt", "gs://y/a.jsonl.gz", "b-c", "/x/a.txt"]) == ["a", "a_2", "b_c", "a_3"]


def test_text_and_conversations_are_mixed_by_weight_and_measured_apart(place, sets, tmp_path, capsys):
    text, chat = sets
    recipe = decoder(place, [f"{text}:3", f"{chat}:1"])
    rows = recipe.data("train").rows(0, BLOCK_ROWS)
    assert Counter(rows["set"].tolist()) == {0: 768, 1: 256}
    is_text = rows["set"] == 0
    assert rows["counted"][is_text].all() and (rows["segments"][is_text] == 1).all()
    alone = [decoder(place, text), decoder(place, chat)]
    np.testing.assert_array_equal(rows["tokens"][is_text], alone[0].data("train").rows(0, 768)["tokens"])
    for name, array in alone[1].data("train").rows(0, 256).items():
        np.testing.assert_array_equal(rows[name][~is_text], array)

    run = tmp_path / "run"
    result = Trainer(devices=1, eval_every=2).fit(recipe, steps=4, batch=4, run=run)
    assert "a (75.0%): " in capsys.readouterr().err
    losses = {name: value for name, value in result.metrics.items() if name.startswith("eval_loss")}
    assert losses.keys() == {"eval_loss", "eval_loss_a", "eval_loss_chat"}
    loaded = load_run(run, jax.devices()[:1])
    assert loaded.recipe.options()["data"] == f"{text}:3.0\n{chat}:1.0"
    weights = []
    for name, single in zip(("a", "chat"), alone, strict=True):
        program = single.program(loaded.placed.program._options)
        source = single.data("validation")
        batch = source.rows(0, source.rows_per_epoch)
        found = program.evaluate(loaded.state, batch)["loss"]
        weights.append(batch["counted"].sum() if "counted" in batch else batch["tokens"][:, 1:].size)
        assert losses[f"eval_loss_{name}"] == pytest.approx(
            float(found.mean if isinstance(found, Weighted) else found), rel=1e-5
        )
    both = [losses["eval_loss_a"], losses["eval_loss_chat"]]
    assert losses["eval_loss"] == pytest.approx(np.average(both, weights=weights), rel=1e-6)
    values, count = evaluate_run(loaded, "validation")
    assert values["loss_chat"] == pytest.approx(both[1], rel=1e-6)
    assert count == sum(single.data("validation").rows_per_epoch for single in alone)
    other = decoder(place, [f"{text}:2", f"{chat}:1"])
    with pytest.raises(InputError, match="the data has changed"):
        Trainer(devices=1).fit(other, steps=4, batch=4, run=run)


def test_without_weights_every_row_is_once_in_an_epoch(place, sets):
    recipe = decoder(place, [*sets])
    for split in ("train", "validation", "all"):
        alone = [decoder(place, one).data(split) for one in sets]
        source = recipe.data(split)
        assert source.rows_per_epoch == sum(one.rows_per_epoch for one in alone)
        found = source.rows(0, source.rows_per_epoch)["tokens"]
        wanted = np.concatenate([one.rows(0, one.rows_per_epoch)["tokens"] for one in alone])
        assert sorted(found.tolist()) == sorted(wanted.tolist())


def test_members_of_a_swarm_read_the_same_rows_from_the_copied_tokens(place, sets, tmp_path):
    recipe = decoder(place, [f"{sets[0]}:3", f"{sets[1]}:1"])
    shared = recipe.share(tmp_path / "shared")
    files = data_files.describe(tmp_path / "shared")
    assert {*files} == {
        f"{name}/{file}" for name in ("a", "chat") for file in ("about.json", "tokenizer.json", "tokens.bin")
    }
    assert not data_files.missing(tmp_path / "shared", files)
    member = Decoder(**recipe.options() | shared)
    assert member.set_names == recipe.set_names and member.data("train").digest == recipe.data("train").digest
    for name, array in recipe.data("train").rows(7, 40).items():
        np.testing.assert_array_equal(member.data("train").rows(7, 40)[name], array)


def test_gpt2_measures_sets_of_text_apart(tmp_path):
    (tmp_path / "a.txt").write_text(FOX * 30)
    (tmp_path / "b.txt").write_text("x" * 3000)
    options = {"layers": 1, "heads": 1, "width": 8, "context": 16, "tokenizer": "bytes"}
    recipe = GPT2(data=[str(tmp_path / "a.txt"), str(tmp_path / "b.txt")], **options)
    result = Trainer(devices=1, eval_every=5).fit(recipe, steps=10, batch=4, run=tmp_path / "run")
    losses = result.metrics
    assert min(losses["eval_loss_a"], losses["eval_loss_b"]) < losses["eval_loss"]
    assert losses["eval_loss"] < max(losses["eval_loss_a"], losses["eval_loss_b"])


def test_set_that_is_too_short_to_hold_out_is_not_measured(tmp_path):
    (tmp_path / "a.txt").write_text(FOX * 30)
    (tmp_path / "b.txt").write_text("x" * 40)
    options = {"layers": 1, "heads": 1, "width": 8, "context": 16, "tokenizer": "bytes"}
    recipe = GPT2(data=[str(tmp_path / "a.txt"), str(tmp_path / "b.txt")], **options)
    assert {*recipe.data("validation").rows(0, 8)["set"].tolist()} == {0}
    with pytest.raises(NoSuchSplit):
        recipe.data("test")
    with pytest.raises(NoSuchSplit):
        GPT2(data=[str(tmp_path / "b.txt")] * 2, **options).data("validation")


def test_several_sets_are_shown_as_the_model_sees_them(place, sets, typed):
    text, chat = sets
    code, out, err = typed(
        "train", place, "--data", f"{text}:0.7", "--data", f"{chat}:0.3", "--context", "32", "--dry-run"
    )
    assert code == 0, err
    assert f"{text}:0.7, {chat}:0.3" in " ".join(out.split())
    assert "\n  a: [[the quick brown fox" in out and "\n  chat: <|im_start|>user" in out
    text_row, chat_row = decoder(place, [text, chat]).preview()
    assert text_row == [("a: ", False), (FOX[:32], True)]
    assert chat_row[0] == ("chat: ", False) and chat_row[1:] == decoder(place, chat).preview()[0]


def test_data_of_a_file_may_be_a_list(place, sets, tmp_path, typed):
    file = tmp_path / "train.toml"
    file.write_text(f"[train]\nrecipe = {json.dumps(place)}\ndata = {json.dumps([*sets])}\noptions.context = 32\n")
    code, out, err = typed("train", str(file), "--dry-run")
    assert code == 0 and f"{sets[0]}, {sets[1]}" in " ".join(out.split()), err


@pytest.mark.parametrize("data", [["--data", ""], ["--data", "a.txt", "--data", ""]])
def test_empty_name_of_data_is_refused(data, typed):
    code, _, err = typed("train", "gpt2-tiny", *data)
    assert code == 2 and "--data is empty; give it a value" in err


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        (["{a}:0", "{b}:1"], {}, r"a.txt:0 has the weight 0: it must be a number above 0"),
        (["{a}:nan", "{b}:1"], {}, "has the weight nan"),
        (["{a}:-1", "{b}:1"], {}, "has the weight -1"),
        (["{a}:1", "{b}"], {}, r"chat.v2.jsonl has no weight, and other data has one: write --data .*jsonl:WEIGHT"),
        (["{a}", "fake"], {}, "fake data is not mixed"),
        (["{a}", "{a}.missing"], {}, "there is no file or folder .*a.txt.missing"),
        (["{a}", "{empty}"], {}, "empty.txt is empty; give --data something to train on"),
        (["{a}", "{short}"], {}, r"the train part of .*short.txt has \d+ tokens, fewer than one row of context"),
        (["{a}", "{a}"], {"tokenizer": "bpe"}, "several data sets need one tokenizer, and bpe are made from one set"),
        (["{a}", "{a}"], {"tokenizer": "characters"}, "need one tokenizer, and characters are made"),
        (["{a}", "{b}"], {"tokenizer": "bytes"}, "holds conversations, which need a published tokenizer"),
    ],
)
def test_data_that_cannot_be_mixed_is_refused(data, options, words, sets, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("x")
    names = {"a": sets[0], "b": sets[1], "empty": tmp_path / "empty.txt", "short": tmp_path / "short.txt"}
    place = write_model(tmp_path / "published")
    with pytest.raises(InputError, match=words):
        recipe = decoder(place, [text.format(**names) for text in data], **options)
        recipe.require_data()
        recipe.data("train")
