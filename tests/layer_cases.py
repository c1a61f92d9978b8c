"""Random layers and their FP32 truth: plain torch loops over the experts, independent of mxmoe's verbs."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu


@dataclass
class Layer:
    """Leaf tensors of one layer, in the order of `leaves()`."""

    x: Tensor
    router: Tensor
    w13: Tensor
    w2: Tensor
    b13: Tensor | None = None
    b2: Tensor | None = None
    shared: tuple[Tensor, Tensor] | None = None

    def leaves(self) -> list[Tensor]:
        named = [self.x, self.router, self.w13, self.w2, self.b13, self.b2, *(self.shared or ())]
        return [t for t in named if t is not None]


def random_layer(tokens, dim, width, experts, *, bias=False, shared=0, dtype=torch.float32, seed=0) -> Layer:
    g = torch.Generator().manual_seed(seed)

    def leaf(*shape, fan_in=1):
        return (torch.randn(*shape, generator=g) / fan_in**0.5).to(dtype).requires_grad_()

    layer = Layer(
        leaf(tokens, dim), leaf(experts, dim, fan_in=dim), leaf(experts, 2 * width, dim, fan_in=dim),
        leaf(experts, dim, width, fan_in=width),
    )  # fmt: skip
    if bias:
        layer.b13, layer.b2 = leaf(experts, 2 * width), leaf(experts, dim)
    if shared:
        layer.shared = (leaf(2 * shared, dim, fan_in=dim), leaf(dim, shared, fan_in=shared))
    return layer


def swiglu_truth(h, activation=None, interleaved=False):
    g, u = (h[..., ::2], h[..., 1::2]) if interleaved else h.chunk(2, -1)
    if activation is None:
        return silu(g) * u
    if activation.limit is not None:
        g, u = g.clamp(max=activation.limit), u.clamp(-activation.limit, activation.limit)
    return g * torch.sigmoid(activation.alpha * g) * (u + activation.offset)


def experts_truth(x, ids, weights, layer: Layer, activation=None, interleaved=False):
    y = torch.zeros_like(x)
    for e in range(layer.w13.shape[0]):
        t, k = (ids == e).nonzero(as_tuple=True)
        h = x[t] @ layer.w13[e].T
        if layer.b13 is not None:
            h = h + layer.b13[e]
        out = swiglu_truth(h, activation, interleaved) @ layer.w2[e].T
        if layer.b2 is not None:
            out = out + layer.b2[e]
        y = y.index_add(0, t, out * weights[t, k, None].to(out.dtype))
    return y


def layer_truth(layer: Layer, ids, *, score="softmax", scale=1.0, activation=None, interleaved=False):
    """The layer in the dtype of its tensors, with the given expert ids."""
    logits = layer.x @ layer.router.T
    scores = logits.sigmoid() if score == "sigmoid" else logits.softmax(-1)
    weights = scores.gather(1, ids.long())
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * scale
    y = experts_truth(layer.x, ids, weights, layer, activation, interleaved)
    if layer.shared is not None:
        y = y + swiglu_truth(layer.x @ layer.shared[0].T) @ layer.shared[1].T
    return y


def gradients(y: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    """[y, dy/dleaf ...] for a fixed, uneven upstream gradient."""
    dy = torch.sin(torch.arange(y.numel(), dtype=torch.float32) * 0.7).view_as(y).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def relative_error(got: Tensor, truth: Tensor) -> float:
    return ((got.double() - truth.double()).norm() / truth.double().norm()).item()
