"""The Routing carrier: its worked example, losses, storage, and the selection bias."""

import copy
import doctest
import io
import pickle

import pytest
import torch
from torch.utils import _pytree as pytree
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

import mxmoe
import mxmoe.routing
from mxmoe import MXTensor, Routing
from mxmoe.routing import update_selection_bias_
from tests.helpers import assert_same_bits

PARTS = ("ids", "weights", "counts", "offs", "permutation", "inverse", "probs_mean", "z")


def assert_equal(a: Routing, b: Routing):
    for name in PARTS:
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None) == (y is None)
        if x is not None:
            assert_same_bits(x.detach(), y.detach())


@pytest.fixture(params=["routed", "from ids", "no tokens", "one expert"])
def routing(request) -> Routing:
    if request.param == "from ids":
        return Routing.from_ids(torch.tensor([[0, -1], [2, 2]]), torch.rand(2, 2), 3)
    if request.param == "one expert":  # counts and offs may be the same tensor
        one = torch.ones(1, dtype=torch.int32)
        return Routing(torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1), one, one, one - 1, (one - 1)[None])
    return mxmoe.route(torch.randn(0 if request.param == "no tokens" else 9, 6, requires_grad=True), 2)


def test_docstring_example():
    assert doctest.testmod(mxmoe.routing, extraglobs=dict(torch=torch, mxmoe=mxmoe)).failed == 0


def test_load_balance_loss_is_transformers_divided_by_top_k():
    logits = torch.randn(50, 8)
    for top_k in (1, 3):
        theirs = load_balancing_loss_func((logits,), 8, top_k)
        torch.testing.assert_close(mxmoe.route(logits, top_k).load_balance_loss(), theirs / top_k)


def test_load_balance_loss_equals_deepseek_v3s_sequence_wise_loss():
    logits, bias = torch.randn(50, 8), torch.randn(8) * 0.1
    routing = mxmoe.route(logits, 3, score="sigmoid", bias=bias)
    scores = logits.sigmoid()
    chosen = torch.zeros(50, 8).scatter_(1, routing.ids.long(), 1.0)
    fraction = 8 / (3 * 50) * chosen.sum(0)  # f_i
    mean = (scores / scores.sum(-1, keepdim=True)).mean(0)  # P_i
    torch.testing.assert_close(routing.load_balance_loss(), (fraction * mean).sum())


def test_losses_at_balance_at_collapse_and_without_tokens():
    balanced = mxmoe.route(torch.eye(4) * 50, 1)
    torch.testing.assert_close(balanced.load_balance_loss(), torch.tensor(1.0))
    assert balanced.max_violation() == 0
    collapsed = mxmoe.route(torch.tensor([[50.0, 0, 0, 0]]).expand(8, 4), 1)
    torch.testing.assert_close(collapsed.load_balance_loss(), torch.tensor(4.0))
    assert collapsed.max_violation() == 3
    torch.testing.assert_close(collapsed.z_loss(), torch.tensor(2500.0))
    empty = mxmoe.route(torch.empty(0, 4), 1)
    assert [t.item() for t in (empty.load_balance_loss(), empty.z_loss(), empty.max_violation())] == [0.0, 0.0, 0.0]


def test_losses_of_given_ids_are_refused():
    routing = Routing.from_ids(torch.tensor([[0]]), torch.ones(1, 1), 2)
    for loss in (routing.load_balance_loss, routing.z_loss):
        with pytest.raises(ValueError, match="made by"):
            loss()


def test_copies_and_storage_keep_every_bit(routing, tmp_path):
    assert_equal(copy.deepcopy(routing), routing)
    assert copy.deepcopy(routing).ids.data_ptr() != routing.ids.data_ptr() or routing.ids.numel() == 0
    assert_equal(pickle.loads(pickle.dumps(routing)), routing)
    buffer = io.BytesIO()
    torch.save({"routing": routing}, buffer)
    buffer.seek(0)
    assert_equal(torch.load(buffer, weights_only=True)["routing"], routing)
    routing.save(tmp_path / "a b.safetensors")
    assert_equal(Routing.load(tmp_path / "a b.safetensors"), routing)
    assert [p.name for p in tmp_path.iterdir()] == ["a b.safetensors"]
    assert_equal(routing.to("cpu"), routing)
    assert_equal(pytree.tree_map(lambda t: t.clone(), routing), routing)
    assert routing.to("meta").device.type == "meta"
    assert "tokens" in repr(routing)


def test_damaged_and_foreign_files_are_named(tmp_path):
    path = tmp_path / "routing.safetensors"
    mxmoe.route(torch.randn(9, 6), 2).save(path)
    good = path.read_bytes()
    for damaged in (good[:100], good[:-1] + bytes([good[-1] ^ 1]), b"", b"no safetensors"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"routing\.safetensors"):
            Routing.load(path)
        assert path.read_bytes() == damaged
    with pytest.raises(FileNotFoundError, match="other"):
        Routing.load(tmp_path / "other")
    mxmoe.quantize(torch.randn(2, 32), "mxfp8", backend="reference").save(path)
    with pytest.raises(ValueError, match="Routing"):
        Routing.load(path)
    mxmoe.route(torch.randn(9, 6), 2).save(path)
    with pytest.raises(ValueError, match="MXTensor"):
        MXTensor.load(path)


def test_parts_that_do_not_fit_are_refused():
    r = mxmoe.route(torch.randn(4, 3), 2)
    parts = {name: getattr(r, name) for name in PARTS}
    with pytest.raises(TypeError, match=r"ids must be int32, got int64"):
        Routing(**parts | {"ids": r.ids.long()})
    with pytest.raises(ValueError, match=r"offs must have shape \(3,\), got \(2,\)"):
        Routing(**parts | {"offs": r.offs[:2]})
    with pytest.raises(ValueError, match="permutation"):
        Routing(**parts | {"permutation": r.permutation[:-1]})
    with pytest.raises(TypeError, match="weights must be float32"):
        Routing(**parts | {"weights": r.weights.bfloat16()})


def test_from_ids_equals_the_routers_own_order():
    r = mxmoe.route(torch.randn(20, 5), 3)
    again = Routing.from_ids(r.ids.long(), r.weights, 5)
    assert_equal(Routing(*(getattr(again, name) for name in PARTS[:6]), r.probs_mean, r.z), r)


def test_r09_selection_bias_moves_by_the_speed_and_stays_fp32():
    bias = torch.ones(4)
    counts = torch.tensor([0, 2, 2, 4], dtype=torch.int32)
    assert update_selection_bias_(bias, counts) is bias
    torch.testing.assert_close(bias, torch.tensor([1.001, 1.0, 1.0, 0.999]), rtol=0, atol=1e-7)
    update_selection_bias_(bias, counts, speed=0.5)
    torch.testing.assert_close(bias, torch.tensor([1.501, 1.0, 1.0, 0.499]), rtol=0, atol=1e-6)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        with pytest.raises(TypeError, match="bias must be float32"):
            update_selection_bias_(torch.ones(4, dtype=dtype), counts)
    with pytest.raises(ValueError, match="counts"):
        update_selection_bias_(bias, counts[:3])


def test_selection_bias_balances_a_skewed_router():
    logits = torch.randn(512, 8) + torch.linspace(0, 2, 8)
    bias = torch.zeros(8)
    before = mxmoe.route(logits, 2, score="sigmoid", bias=bias).max_violation()
    for _ in range(300):
        update_selection_bias_(bias, mxmoe.route(logits, 2, score="sigmoid", bias=bias).counts, speed=3e-3)
    after = mxmoe.route(logits, 2, score="sigmoid", bias=bias).max_violation()
    assert after < 0.1 < before  # measured 0.03 and 1.2
