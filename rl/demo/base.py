"""The model that the demo starts from: pretrained on the family's functions, then on demonstrations; made once and kept.

path = make_base("runs/base")                # 0 or some minutes
model, vocabulary, recipe = load_base(path)
"""

import hashlib
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

import mxmoe
from rl.demo.expert import demonstration, finished
from rl.demo.recipe import BaseRecipe, Demonstrations
from rl.harness.dialect import TERSE, TerseDialect, spelt
from rl.tasks.task import Task
from rl.tasks.tiny import instance
from training.base import find_base, read_model
from training.checkpoint import Checkpoints
from training.config import SIZES, Config, flat
from training.data import IGNORE
from training.data.tokenizer import OWN, Vocabulary, load_vocabulary, train_tokenizer
from training.model import Model, parameter_roles
from training.optimizer import BETAS, Muon, guarded_step, learning_rate
from training.step import forward_backward

Document = tuple[list[int], list[bool]]  # token ids, and which are learned from
Progress = Callable[[str, int, int, float], None]  # what is done, steps so far, of how many, loss
FIRST_SEED = 1_000_000  # of the tasks that are demonstrated: reinforcement learning takes others, counted from 0


def make_base(
    directory: str | Path, recipe: BaseRecipe | None = None, *, seed: int = 0, on_progress: Progress = lambda *_: None
) -> Path:
    """The directory of the base of this recipe and seed, laid out as a run of `training`: one below `directory`, made where it is
    not there yet, as a whole or not at all. Tells `on_progress` every step."""
    recipe = recipe or BaseRecipe()
    place = place_of(directory, recipe, seed)
    if place.exists():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".base-", dir=place.parent))
    try:
        start = time.monotonic()
        model, vocabulary = train_base(recipe, seed, on_progress)
        vocabulary.save(made)
        config = Config(**{name: getattr(recipe, name) for name in SIZES}, seq_len=recipe.max_length)
        state = {"model": model.state_dict(), "config": flat(config), "model_config": asdict(model.config)}
        Checkpoints(made / "checkpoints").save(recipe.pretrain_steps + recipe.sft_steps, state)
        stated = {"recipe": asdict(recipe), "seed": seed, "seconds": time.monotonic() - start}
        (made / "base.json").write_text(json.dumps(stated, indent=1) + "\n")
        try:
            os.rename(made, place)
        except OSError:
            if not place.exists():  # else: another process was faster
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return place


def place_of(directory: str | Path, recipe: BaseRecipe, seed: int = 0) -> Path:
    """Where the base of a recipe and seed is, or would be."""
    stated = json.dumps({"recipe": asdict(recipe), "seed": seed}, sort_keys=True)
    return Path(directory) / f"base-{hashlib.sha256(stated.encode()).hexdigest()[:16]}"


def load_base(path: str | Path) -> tuple[Model, Vocabulary, BaseRecipe]:
    """What `make_base` made. FileNotFoundError where there is none."""
    stated = json.loads((Path(path) / "base.json").read_text())["recipe"]
    ways = Demonstrations(**stated.pop("demonstrations"))
    recipe = BaseRecipe(**{k: tuple(v) if isinstance(v, list) else v for k, v in stated.items()}, demonstrations=ways)
    return read_model(find_base(path)), load_vocabulary(path), recipe


def tasks(recipe: BaseRecipe, first: int, count: int, split: str = "train") -> Iterable[Task]:
    """`count` tasks of the recipe's kinds and difficulties, by seeds from `first` on."""
    levels = recipe.difficulties
    return (instance(seed, split, levels[seed % len(levels)], recipe.kinds) for seed in range(first, first + count))


def train_base(recipe: BaseRecipe, seed: int, on_progress: Progress) -> tuple[Model, Vocabulary]:
    r = random.Random(f"base {seed}")
    first = FIRST_SEED * (1 + seed)
    talks = [demonstration(task, r, recipe.demonstrations) for task in tasks(recipe, first, recipe.num_demonstrations)]
    first += recipe.num_demonstrations
    modules = [finished(task) for task in tasks(recipe, first, recipe.num_modules)]
    vocabulary = vocabulary_of(recipe, modules, talks)
    model = Model(recipe.model, seed=seed)
    optimizers = optimizers_of(model, recipe)
    plain = [[vocabulary.bos, *ids, vocabulary.eos] for ids in vocabulary.encode_batch(modules)]
    dialect = TerseDialect(vocabulary)
    phases = {
        "pretraining": (recipe.pretrain_steps, [(ids, [True] * len(ids)) for ids in plain]),
        "demonstrations": (recipe.sft_steps, [encoded(dialect, talk) for talk in talks]),
    }
    steps, done = recipe.pretrain_steps + recipe.sft_steps, 0
    for name, (count, documents) in phases.items():
        source = batches([d for d in documents if len(d[0]) <= recipe.max_length], recipe.batch_tokens, r)
        for _ in range(count):
            ids, targets = next(source)
            loss, loads = forward_backward(model, [(ids, targets)])
            for optimizer, lr in optimizers:
                guarded_step(optimizer, learning_rate(done, lr, recipe.warmup_steps, steps, "linear"), recipe.clip_norm)
            for layer, load in zip(model.moe_layers, loads, strict=True):
                mxmoe.update_selection_bias_(layer.selection_bias, load, recipe.bias_speed)
            done += 1
            on_progress(name, done, steps, loss)
    return model, vocabulary


def optimizers_of(model: Model, recipe: BaseRecipe) -> list[tuple[torch.optim.Optimizer, float]]:
    """Muon for the matrices inside the layers, AdamW for the rest, with their peak learning rates."""
    roles = parameter_roles(model)
    inside = {name for name, p in model.named_parameters() if p.dim() > 1 and roles[name] not in ("embedding", "head", "router")}
    matrices = [p for name, p in model.named_parameters() if name in inside]
    rest = [p for name, p in model.named_parameters() if name not in inside]
    return [(Muon(matrices), recipe.muon_lr), (torch.optim.AdamW(rest, betas=BETAS, weight_decay=0.0), recipe.lr)]


def vocabulary_of(recipe: BaseRecipe, modules: list[str], talks: list[list[dict]]) -> Vocabulary:
    """A tokenizer trained on what the model reads and writes."""
    said = [message for talk in talks[:4000] for message in talk]
    calls = [call["function"] for message in said for call in message.get("tool_calls", ())]
    texts = [message["content"] for message in said] + [
        spelt({name: verb for verb, name in TERSE.items()}, c["name"], c["arguments"]) for c in calls
    ]
    return Vocabulary(train_tokenizer(texts + modules[:2000], recipe.vocab_size, OWN.special), OWN)


def encoded(dialect: TerseDialect, talk: list[dict]) -> Document:
    """A conversation that ends with a reply, or with what its last call gave, which is left out. Replies are learned from."""
    ids, learned = [], []
    for i, message in enumerate(talk):
        if message["role"] == "assistant":
            (call,) = message["tool_calls"]
            said = dialect.vocabulary.encode(spelt(dialect.verb_of, call["function"]["name"], call["function"]["arguments"]))
            ids += [*said, dialect.turn]
            learned += [True] * (len(said) + 1)
        elif i + 1 < len(talk):
            new = dialect.more([message]) if ids else dialect.prompt([message], [])
            ids += new
            learned += [False] * len(new)
    return ids, learned


def batches(documents: list[Document], tokens: int, r: random.Random) -> Iterable[tuple[Tensor, Tensor]]:
    """ids, targets (B, S) without end: rows of like length, filled up behind their ends; about so many tokens."""
    if not documents:
        raise ValueError("expected documents of at most max_length tokens, got none")
    while True:
        order = sorted(range(len(documents)), key=lambda i: (len(documents[i][0]), r.random()))
        rows, longest, made = [], 0, []
        for i in order:
            longest = len(documents[i][0])
            if rows and (len(rows) + 1) * longest > tokens:
                made.append(rows)
                rows = []
            rows.append(i)
        made.append(rows)
        r.shuffle(made)
        for rows in made:
            longest = max(len(documents[i][0]) for i in rows)
            ids = torch.zeros(len(rows), longest, dtype=torch.int64)
            targets = torch.full((len(rows), longest), IGNORE)
            for row, i in enumerate(rows):
                tokens_of, learned = documents[i]
                ids[row, : len(tokens_of)] = torch.tensor(tokens_of)
                wanted = [t if is_learned else IGNORE for t, is_learned in zip(tokens_of, learned, strict=True)]
                targets[row, : len(tokens_of) - 1] = torch.tensor(wanted[1:])
            yield ids, targets
