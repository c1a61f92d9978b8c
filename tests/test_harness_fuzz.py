"""Random calls in a real sandbox, the work directory's border, and the loop over the built-in sampler."""

import pytest

from rl.harness.builtin import SamplerModel, Shared
from rl.harness.dialect import ChatDialect
from rl.harness.loop import LoopLimits, run
from rl.harness.model import Call, ModelError, Reply
from rl.harness.session import Session
from rl.harness.toolsets import ALL, tool_set
from rl.sampler import Sampler
from tests import sandbox_cases, tool_calls
from training.data.tokenizer import FAMILIES, Vocabulary, train_tokenizer
from training.model import Model, ModelConfig


@pytest.fixture(scope="module")
def backend():
    with sandbox_cases.open_or_skip("namespaces") as made:
        yield made


@pytest.mark.parametrize("strict", [True, False])
def test_no_call_raises_or_leaves_the_work_directory(backend, strict):
    tools = tool_set([tool.name for tool in ALL], strict=strict)
    with backend.create(sandbox_cases.spec(backend)) as sandbox:
        assert tool_calls.faults_of(sandbox, tools, 250, seed=int(strict)) == []


def test_files_outside_are_not_written(backend):
    tools = tool_set()
    with backend.create(sandbox_cases.spec(backend)) as sandbox:
        sandbox.exec("mkdir -p /workspace/sub /tmp/x; cd /workspace; ln -s /etc out; ln -s sub in; ln -s /tmp/x/new a")
        session = Session(sandbox, "/workspace")
        for path in ("out/new", "/etc/new", "../etc/new", "a", "in/../../etc/new"):
            refused = tools.call(session, "write_file", {"path": path, "content": "x"})
            assert (refused.kind, "outside" in refused.text) == ("error", True), path
        assert "outside" in tools.call(session, "delete_file", {"path": "out/hosts"}).text
        assert "outside" in tools.call(session, "apply_patch", {"patch": "--- /dev/null\n+++ b/out/new\n@@ -0,0 +1 @@\n+x\n"}).text
        moves = [("f", "out/new"), ("f", "out/hosts"), ("f", "a"), ("out/hosts", "g"), ("out/hosts", "f")]
        sandbox.exec("echo 1 > f", cwd="/workspace")
        for old, new in moves:
            for patch in (f"--- a/{old}\n+++ b/{new}\n", f"diff --git a/{old} b/{new}\nrename from {old}\nrename to {new}\n"):
                refused = tools.call(session, "apply_patch", {"patch": patch})
                assert (refused.kind, "outside" in refused.text) == ("error", True), patch
        assert tools.call(session, "delete_file", {"path": "f"}).kind == "ok"
        assert tools.call(session, "write_file", {"path": "in/new/b", "content": "x"}).kind == "ok"
        assert tools.call(session, "delete_file", {"path": "out"}).kind == "ok"  # the link itself
        assert sandbox.exec("cat /workspace/sub/new/b; ls /etc/new /tmp/x/new; ls /workspace").stdout == b"xa\nin\nsub\n"


CONFIG = ModelConfig(
    vocab_size=512, dim=32, num_layers=2, num_heads=2, dense_dim=64, num_experts=4, top_k=2, expert_dim=32, kv_lora_rank=16,
    qk_nope_dim=16, qk_rope_dim=16, v_dim=16, q_lora_rank=16, max_positions=8192,
)  # fmt: skip


def vocabulary(family):
    return Vocabulary(train_tokenizer(["def f(x): return x"] * 9, 256 + len(family.special) + 4, family.special), family)


@pytest.mark.parametrize("family", FAMILIES, ids=["own", "deepseek", "kimi", "qwen"])
def test_the_built_in_sampler_drives_the_loop(backend, family):
    shared = Shared(Sampler(Model(CONFIG), num_slots=4, capacity=6000))
    words = vocabulary(family)
    model = SamplerModel(shared, ChatDialect(words), temperature=1.0, seed=3)
    with backend.create(sandbox_cases.spec(backend)) as sandbox:
        done = run(model, Session(sandbox, "/tmp"), tool_set(["read_file"]), "Hi.", LoopLimits(turns=3, reply_tokens=8))
    assert done.end in ("answered", "turns"), done.error
    for reply, answer in zip(done.replies, model.answers, strict=True):
        assert reply.completion_token_ids == tuple(answer.ids)
        assert len(reply.logprobs) == reply.completion_tokens == len(answer.ids)
        assert all(value <= 0 for value in reply.logprobs)
    for before, after in zip(done.replies, done.replies[1:], strict=False):
        known = before.prompt_token_ids + before.completion_token_ids
        assert after.prompt_token_ids[: len(known)] == known  # what was sampled is never encoded again


def test_calls_are_read_in_the_tokenizers_own_format():
    for family in FAMILIES:
        words = vocabulary(family)
        model = SamplerModel(Shared(Sampler(Model(CONFIG), num_slots=1, capacity=64)), ChatDialect(words))
        said = Reply("I look.", (Call("0", "read_file", '{"path": "a"}'),)).message | {"role": "assistant"}
        ids = model.dialect._render([said])
        begin = words.encode_template(family.messages["assistant"][0])
        text = model.dialect._text(ids[1 + len(begin) :][: -len(begin) or None])
        assert "I look.<tool_call>" in text.replace("\n", "")
        assert '{"name": "read_file", "arguments": {"path": "a"}}' in text
        with pytest.raises(ModelError, match="the cache holds 64"):
            model.reply([{"role": "user", "content": "x" * 100}], [], 5, 5)
