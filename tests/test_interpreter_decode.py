"""moe_decode's GPU kernels under the interpreter: the reference's bytes where every sum is exact, near them elsewhere."""

import pytest
import torch

from mxmoe import ops
from mxmoe.backends.device.decode import FORMATS
from mxmoe.recipes import SwiGLU
from tests.interpreter_cases import INTERPRETER, check_decode, decode_operands, run_decode


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("tokens", "top_k", "width", "hidden", "experts"),
    [(1, 2, 128, 64, 4), (7, 3, 96, 48, 3), (6, 2, 37, 35, 5), (9, 1, 64, 32, 1), (4, 2, 1056, 16, 3), (0, 2, 64, 32, 3)],
    ids=["one", "several_of_an_expert", "tails", "all_on_one", "long", "none"],
)
def test_moe_decode_is_the_references(tokens, top_k, width, hidden, experts, format):
    check_decode(tokens, top_k, width, hidden, experts, format)
    check_decode(tokens, top_k, width, hidden, experts, format, bias=False, dtype=torch.bfloat16, interleaved=True)


def test_a_token_does_not_depend_on_its_batch():
    x, ids, weights, *experts = decode_operands(7, 2, 96, 48, 5, "nvfp4", whole=False)
    y = run_decode(INTERPRETER, x, ids, weights, *experts, SwiGLU(), False, torch.float32)
    for rows in ([3], [6, 0], [4, 1, 5]):
        got = run_decode(INTERPRETER, x[rows], ids[rows], weights[rows], *experts, SwiGLU(), False, torch.float32)
        assert torch.equal(got, y[rows])


def test_quantized_activations_go_through_the_other_verbs():
    x, ids, weights, w13, _, w2, _ = decode_operands(5, 2, 128, 64, 3, "mxfp8", whole=True)
    w13, w2 = (w[0].to(torch.bfloat16) for w in (w13, w2))
    got, want = (ops.moe_decode(x, ids, weights, w13, w2, recipe="mxfp8", backend=name) for name in ("interpreter", "reference"))
    torch.testing.assert_close(got, want, rtol=0.0, atol=2**-6 * float(want.abs().max()))
