"""Corpus, tokenizer, cache and windows."""

import numpy as np
import pytest
from tokenizers import Tokenizer

from training.data import Windows, load_tokens, read_corpus
from training.tokenizer import END, train_tokenizer


@pytest.fixture
def corpus(tmp_path):
    """Forty modules: files, and packages with a test directory that must not be read."""
    root = tmp_path / "corpus"
    root.mkdir()
    for i in range(40):
        text = f"def function_{i}(x):\n    return x + {i}  # naïve → done\n" * 5
        if i % 4:
            (root / f"module_{i}.py").write_text(text)
        else:
            (root / f"package_{i}" / "tests").mkdir(parents=True)
            (root / f"package_{i}" / "__init__.py").write_text(text)
            (root / f"package_{i}" / "tests" / "test_it.py").write_text("SECRET")
    return root


def test_split_is_by_module_and_skips_tests(corpus):
    texts = read_corpus(corpus)
    assert (len(texts["train"]), len(texts["heldout"])) == (38, 2)
    assert not set(texts["train"]) & set(texts["heldout"])
    assert "SECRET" not in "".join(texts["train"] + texts["heldout"])
    assert texts == read_corpus(corpus)


def test_corpus_is_cut_at_the_size_limit(corpus):
    texts = read_corpus(corpus, max_bytes=1000)
    assert 1000 <= sum(map(len, texts["train"] + texts["heldout"])) < 1500
    assert texts["heldout"] == read_corpus(corpus)["heldout"]


def test_corpus_of_one_module_is_refused(tmp_path):
    (tmp_path / "only.py").write_text("x = 1")
    with pytest.raises(ValueError, match=r"at least 2 Python modules .* got 1"):
        load_tokens(str(tmp_path), 300, str(tmp_path / "cache"))


def test_tokens_decode_to_the_documents(corpus, tmp_path):
    tokens = load_tokens(str(corpus), 300, str(tmp_path / "cache"))
    tokenizer = Tokenizer.from_file(str(tokens.directory / "tokenizer.json"))
    text = tokenizer.decode(tokens.heldout.tolist(), skip_special_tokens=False)
    assert text.split(END)[:-1] == read_corpus(corpus)["heldout"]
    assert text.endswith(END)
    assert isinstance(tokens.train, np.memmap)
    assert tokens.train.max() < 300


def test_tokenizer_round_trips_text_it_never_saw():
    tokenizer = train_tokenizer(["for i in range(10):\n"], 300)
    text = "\tif 漢字 != '\\x00':\r\n        pass  \U0001f600\n\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    with pytest.raises(ValueError, match=r"at least 257 .* got 256"):
        train_tokenizer(["x"], 256)


def test_cache_is_used_again_and_follows_the_contents(corpus, tmp_path):
    cache = str(tmp_path / "cache")
    first = load_tokens(str(corpus), 300, cache)
    written = (first.directory / "train.bin").stat().st_mtime_ns
    again = load_tokens(str(corpus), 300, cache)
    assert (again.key, (again.directory / "train.bin").stat().st_mtime_ns) == (first.key, written)
    (corpus / "module_1.py").write_text("changed = True\n")
    keys = {first.key, load_tokens(str(corpus), 300, cache).key, load_tokens(str(corpus), 301, cache).key}
    assert len(keys) == 3
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == sorted(keys)  # nothing half built is left


@pytest.mark.parametrize("name", ["train.bin", "tokenizer.json", "sha256.json"])
def test_damaged_cache_is_named_and_left_untouched(corpus, tmp_path, name):
    tokens = load_tokens(str(corpus), 300, str(tmp_path / "cache"))
    damaged = tokens.directory / name
    damaged.write_bytes(damaged.read_bytes()[:-7])
    before = damaged.read_bytes()
    with pytest.raises(ValueError, match=str(damaged)):
        load_tokens(str(corpus), 300, str(tmp_path / "cache"))
    assert damaged.read_bytes() == before


def test_vocabulary_that_does_not_fit_the_files_is_refused():
    with pytest.raises(ValueError, match="at most 65536"):
        load_tokens("", 70000, "unused")


def test_windows_cover_every_token_once_per_epoch():
    windows = Windows(np.arange(101, dtype=np.uint16), seq_len=10, seed=3)
    ids, targets = windows.next_batch(10)
    assert sorted(ids.flatten().tolist()) == list(range(100))
    assert (targets == ids + 1).all()
    second, _ = windows.next_batch(10)
    assert sorted(second.flatten().tolist()) == list(range(100))
    assert not (second == ids).all()


def test_order_depends_on_the_seed_alone():
    tokens = np.arange(1000, dtype=np.uint16)
    first, same, other = (Windows(tokens, 10, seed).next_batch(50)[0] for seed in (1, 1, 2))
    assert (first == same).all()
    assert not (first == other).all()


@pytest.mark.parametrize("batches_before", [0, 1, 3, 5, 7, 10])  # 5 and 10 end exactly with an epoch
def test_t01_t03_resumed_order_equals_the_uninterrupted_one(batches_before):
    tokens = np.arange(201, dtype=np.uint16)
    uninterrupted = Windows(tokens, 10, seed=7)
    expected = [uninterrupted.next_batch(4)[0].tolist() for _ in range(15)]
    interrupted = Windows(tokens, 10, seed=7)
    got = [interrupted.next_batch(4)[0].tolist() for _ in range(batches_before)]
    resumed = Windows(tokens, 10, seed=7)
    resumed.load_state_dict(interrupted.state_dict())
    got += [resumed.next_batch(4)[0].tolist() for _ in range(15 - batches_before)]
    assert got == expected


def test_position_of_other_data_is_refused():
    state = Windows(np.arange(200, dtype=np.uint16), 10, seed=7).state_dict()
    with pytest.raises(ValueError, match="seed 7, got 8"):
        Windows(np.arange(200, dtype=np.uint16), 10, seed=8).load_state_dict(state)
    with pytest.raises(ValueError, match="num_windows 19, got 9"):
        Windows(np.arange(100, dtype=np.uint16), 10, seed=7).load_state_dict(state)


@pytest.mark.parametrize("length", [0, 1, 10, 16])
def test_t19_data_shorter_than_one_window_is_refused(length):
    with pytest.raises(ValueError, match=rf"seq_len \+ 1 = 17 tokens, got a data set of {length}"):
        Windows(np.arange(length, dtype=np.uint16), seq_len=16)


def test_t19_data_of_exactly_one_window():
    ids, targets = Windows(np.arange(17, dtype=np.uint16), seq_len=16).next_batch(2)
    assert ids.tolist() == [list(range(16))] * 2
    assert targets.tolist() == [list(range(1, 17))] * 2


def test_spread_windows_reach_both_ends():
    windows = Windows(np.arange(101, dtype=np.uint16), seq_len=10)
    assert [int(w[0]) for w in windows.spread(4)] == [0, 30, 60, 90]
    assert len(windows.spread(99)) == 10
