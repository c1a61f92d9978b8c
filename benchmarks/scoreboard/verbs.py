"""What the scoreboard compares, shape by shape."""

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from itertools import cycle

import torch
from torch import Tensor, nn

from benchmarks import peers
from benchmarks.bars.cpu.generation import OURS, THEIRS, generate, model_of, profile
from benchmarks.bars.harness import Run
from benchmarks.cases import Shape
from benchmarks.scoreboard.measure import Comparison, Provider
from mxmoe import grouped_mm, grouped_mm_wgrad, moe_experts, ops, permute, quantize, route, swiglu, unpermute
from mxmoe.backends.host.extension import use_isa
from mxmoe.formats import MXTensor
from mxmoe.recipes import SwiGLU
from mxmoe.routing import Routing

RECIPES = ("bf16", "mxfp8", "nvfp4")
IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")
DECODE_TOKENS = 8  # up to here ours is moe_decode
ROTATIONS = 8
GATHERED_LIMIT = 2**31  # bytes of weights that `batched_mm` may copy
SELECTED_LIMIT = 2**35  # bytes of zeros that the backward of `eager` may write: a gradient of all experts for each of them
TOKENS = (1, 8, 64, 512, 8192)


class Layer:
    """Weights of a shape, made when first used."""

    def __init__(self, shape: Shape):
        self.shape = shape

    @cached_property
    def modules(self) -> dict[str, nn.Module]:
        return peers.experts_modules(self.shape, IMPLEMENTATIONS)

    @cached_property
    def weights(self) -> tuple[Tensor, Tensor]:
        """w13 (E, 2F, D), w2 (E, D, F), BF16: views of transformers' own."""
        module = self.modules["eager"]
        both = module.gate_up_proj.detach(), module.down_proj.detach()
        return tuple(w.transpose(1, 2) for w in both) if self.shape.gpt_oss else both

    @cached_property
    def quantized(self) -> dict[str, tuple[MXTensor, MXTensor]]:
        return {format: tuple(quantize(w, format) for w in self.weights) for format in RECIPES[1:]}

    @property
    def options(self) -> dict:
        """What `moe_experts` is told besides the weights."""
        if not self.shape.gpt_oss:
            return {}
        module = self.modules["eager"]
        biases = dict(b13=module.gate_up_proj_bias.detach(), b2=module.down_proj_bias.detach())
        return dict(activation=SwiGLU(module.alpha, module.limit, 1.0), gate_up="interleaved", **biases)

    def operands(self, recipe: str):
        return self.weights if recipe == "bf16" else self.quantized[recipe]

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16()


def expert_ids(shape: Shape, tokens: int, routing: str) -> list[Tensor]:
    """int64 (T, K) of successive calls, which take other experts each. "balanced": every expert as often, to within one token;
    "skewed": popularity falls as rank^-1.2. A token's experts are distinct."""
    g = torch.Generator().manual_seed(0)
    if routing == "balanced":
        ids = torch.arange(tokens * shape.top_k).view(tokens, -1) % shape.num_experts
    else:
        popularity = -1.2 * torch.arange(1, shape.num_experts + 1).log()
        gumbel = -torch.log(-torch.log(torch.rand(tokens, shape.num_experts, generator=g)))
        ids = (popularity + gumbel).topk(shape.top_k).indices
    names = torch.randperm(shape.num_experts, generator=g)
    return [names[(ids + i * shape.top_k) % shape.num_experts] for i in range(ROTATIONS)]


def routing_of(shape: Shape, tokens: int, routing: str) -> Routing:
    ids = expert_ids(shape, tokens, routing)[0].int()
    return Routing.from_ids(ids, torch.rand(ids.shape), shape.num_experts)


def nbytes(*tensors) -> int:
    return sum(nbytes(*t) if isinstance(t, tuple) else t.nbytes for t in tensors)


def experts(layer: Layer, tokens: int, routing: str) -> dict[str, Provider | str]:
    """The experts' forward; ours with weights quantized before, as for inference."""
    s, calls = layer.shape, expert_ids(layer.shape, tokens, routing)
    x, weights, out = layer.random(tokens, s.dim), torch.rand(tokens, s.top_k), layer.random(tokens, s.dim)
    used = len(calls[0].unique()) / s.num_experts
    decode = tokens <= DECODE_TOKENS

    def ours(recipe: str) -> Provider:
        w13, w2 = layer.operands(recipe)
        turn = cycle([ids.int() for ids in calls])

        @torch.no_grad()
        def call():
            options = dict(recipe=recipe, **layer.options)
            if decode:
                return ops.moe_decode(x, next(turn), weights, w13, w2, activations="bf16", out=out, **options)
            return moe_experts(x, next(turn), weights, w13, w2, **options)

        return Provider(call, 2 * x.nbytes + used * nbytes(w13, w2), decode)

    def theirs(name: str) -> Provider | str:
        gathered = tokens * s.top_k * s.expert_bytes
        if name == "batched_mm" and gathered > GATHERED_LIMIT:
            return f"too large: copies {gathered / 2**30:.0f} GiB of weights"
        turn, rounded = cycle(calls), weights.bfloat16()
        call = torch.no_grad()(lambda: layer.modules[name](x, next(turn), rounded))
        return Provider(call, 2 * x.nbytes + used * nbytes(*layer.weights))

    return {f"ours {r}": ours(r) for r in RECIPES} | {f"transformers {name}": theirs(name) for name in IMPLEMENTATIONS}


def step(layer: Layer, tokens: int, routing: str) -> dict[str, Provider | str]:
    """Forward and backward of the experts; ours quantizes the weights each time, as after an optimizer step."""
    s, calls = layer.shape, expert_ids(layer.shape, tokens, routing)
    x, dy = (layer.random(tokens, s.dim).requires_grad_(r) for r in (True, False))
    weights = torch.rand(tokens, s.top_k).requires_grad_()
    size = 4 * x.nbytes + 2 * nbytes(*layer.weights)

    def provider(forward: Callable[[Tensor], Tensor], parameters) -> Provider:
        turn = cycle(calls)

        def call():
            forward(next(turn)).backward(dy)
            for p in (x, weights, *parameters):
                p.grad = None

        return Provider(call, size)

    def ours(recipe: str) -> Provider:
        leaves = [w.detach().requires_grad_() for w in layer.weights]
        return provider(lambda ids: moe_experts(x, ids, weights, *leaves, recipe=recipe, **layer.options), leaves)

    def theirs(name: str) -> Provider | str:
        gathered, selected = tokens * s.top_k * s.expert_bytes, s.num_experts**2 * s.expert_bytes
        if name == "batched_mm" and gathered > GATHERED_LIMIT:
            return f"too large: copies {gathered / 2**30:.0f} GiB of weights"
        if name == "eager" and selected > SELECTED_LIMIT:
            return f"too slow: backward writes {selected / 2**30:.0f} GiB of zeros"
        module = layer.modules[name].requires_grad_()
        return provider(lambda ids: module(x, ids, weights.bfloat16()), list(module.parameters()))

    return {f"ours {r}": ours(r) for r in RECIPES} | {f"transformers {name}": theirs(name) for name in IMPLEMENTATIONS}


def up_product(layer: Layer, tokens: int, routing: str) -> dict[str, Provider | str]:
    """grouped_mm with w13: rows of D to 2F; quantized operands exist, packing is part of the time."""
    s, r = layer.shape, routing_of(layer.shape, tokens, routing)
    a, w = layer.random(tokens * s.top_k, s.dim), layer.weights[0]
    out = torch.empty(a.shape[0], w.shape[1], dtype=a.dtype)
    ends, w_t = r.offs.tolist(), w.transpose(1, 2)
    used = int((r.counts > 0).sum()) / s.num_experts

    def ours(format: str) -> Provider:
        pair = (a, w) if format == "bf16" else (quantize(a, format), layer.quantized[format][0])
        return Provider(lambda: grouped_mm(*pair, r.offs, out=out), nbytes(pair[0], out) + used * nbytes(pair[1]), True)

    def loop():
        for e, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            if begin < end:
                torch.mm(a[begin:end], w_t[e], out=out[begin:end])

    size = nbytes(a, out) + used * w.nbytes
    theirs = {
        "torch._grouped_mm": Provider(lambda: torch._grouped_mm(a, w_t, offs=r.offs), size),
        "loop of torch.mm": Provider(loop, size, True),
    }
    return {f"ours {f}": ours(f) for f in RECIPES} | theirs


def weight_gradient(layer: Layer, tokens: int, routing: str) -> dict[str, Provider | str]:
    """grouped_mm_wgrad of w13, into BF16."""
    s, r = layer.shape, routing_of(layer.shape, tokens, routing)
    dh, x = layer.random(tokens * s.top_k, 2 * s.expert_dim), layer.random(tokens * s.top_k, s.dim)
    out = torch.empty(s.num_experts, dh.shape[1], x.shape[1], dtype=x.dtype)
    ends, dh_t = r.offs.tolist(), dh.T

    def ours(format: str) -> Provider:
        pair = (dh, x) if format == "bf16" else tuple(quantize(t, format, "column", offs=r.offs) for t in (dh, x))
        return Provider(lambda: grouped_mm_wgrad(*pair, r.offs, out=out), nbytes(*pair, out), True)

    def loop():
        for e, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            torch.mm(dh_t[:, begin:end], x[begin:end], out=out[e])

    theirs = {
        "torch._grouped_mm": Provider(lambda: torch._grouped_mm(dh_t, x, offs=r.offs), nbytes(dh, x, out)),
        "loop of torch.mm": Provider(loop, nbytes(dh, x, out), True),
    }
    return {f"ours {f}": ours(f) for f in ("bf16", "mxfp8")} | theirs


def casts(format: str, layer: Layer, tokens: int, _: str) -> dict[str, Provider | str]:
    """quantize of the tokens, row copy; torchao's NVFP4 has one global scale, ours one per token."""
    x = layer.random(tokens, layer.shape.dim)
    out = quantize(x, format)
    eager = {"mxfp8": peers.torchao_mxfp8, "nvfp4": peers.torchao_nvfp4}[format]
    compiled = torch.compile(eager, dynamic=False)
    return {
        "ours": Provider(lambda: quantize(x, format, out=out), nbytes(x, out), True),
        "torchao eager": Provider(lambda: eager(x), nbytes(x, out)),
        "torchao compiled": Provider(lambda: compiled(x), nbytes(x, out)),
    }


def both_copies(layer: Layer, tokens: int, routing: str) -> dict[str, Provider | str]:
    """Row and column copies of the routed rows, each group as if alone; torchao's of the rows and of their transpose, made
    before."""
    r = routing_of(layer.shape, tokens, routing)
    x = layer.random(tokens * layer.shape.top_k, layer.shape.dim)
    out, turned = quantize(x, "mxfp8", "both", offs=r.offs), x.T.contiguous()
    compiled = torch.compile(peers.torchao_mxfp8, dynamic=False)
    size = nbytes(x, out)
    return {
        "ours": Provider(lambda: quantize(x, "mxfp8", "both", offs=r.offs, out=out), size, True),
        "torchao compiled": Provider(lambda: (compiled(x), compiled(turned)), size),
    }


def activation(layer: Layer, tokens: int, routing: str) -> dict[str, Provider | str]:
    s, r = layer.shape, routing_of(layer.shape, tokens, routing)
    h = layer.random(tokens * s.top_k, 2 * s.expert_dim)
    out, copies = torch.empty(h.shape[0], s.expert_dim, dtype=h.dtype), swiglu(h, format="mxfp8", axis="both", offs=r.offs)
    options = dict(format="mxfp8", axis="both", offs=r.offs, out=copies)
    return {
        "ours": Provider(lambda: swiglu(h, out=out), nbytes(h, out), True),
        "ours to mxfp8 copies": Provider(lambda: swiglu(h, **options), nbytes(h, copies), True),
        "torch eager": Provider(lambda: peers.swiglu(h), nbytes(h, out)),
    }


def move_to_experts(layer: Layer, tokens: int, routing: str) -> dict[str, Provider | str]:
    r, x = routing_of(layer.shape, tokens, routing), layer.random(tokens, layer.shape.dim)
    out = torch.empty(r.permutation.shape[0], x.shape[1], dtype=x.dtype)
    tokens_of = r.permutation.long() // layer.shape.top_k
    return {
        "ours": Provider(lambda: permute(x, r, out=out), 2 * out.nbytes, True),
        "torch eager": Provider(lambda: torch.index_select(x, 0, tokens_of, out=out), 2 * out.nbytes, True),
    }


def move_back(layer: Layer, tokens: int, routing: str) -> dict[str, Provider | str]:
    r, y = routing_of(layer.shape, tokens, routing), layer.random(tokens * layer.shape.top_k, layer.shape.dim)
    out = torch.empty(tokens, y.shape[1], dtype=y.dtype)
    return {
        "ours": Provider(lambda: unpermute(y, r, r.weights, out=out), nbytes(y, out), True),
        "torch eager": Provider(lambda: peers.weighted_sum(y, r.inverse, r.weights), nbytes(y, out)),
    }


def router(layer: Layer, tokens: int, _: str) -> dict[str, Provider | str]:
    """Sigmoid with a selection bias; ids, weights, offsets and the permutation."""
    num_experts, top_k = layer.shape.router if any(layer.shape.router) else (layer.shape.num_experts, layer.shape.top_k)
    logits, bias = torch.randn(tokens, num_experts), torch.randn(num_experts) / 16
    size = logits.nbytes + 16 * tokens * top_k
    return {
        "ours": Provider(lambda: route(logits, top_k, score="sigmoid", bias=bias), size),
        "torch eager": Provider(lambda: peers.torch_route(logits, bias, top_k), size),
    }


def instruction_sets(format: str, layer: Layer, tokens: int, routing: str) -> dict[str, Provider | str]:
    """The same product on each instruction set of this machine, into the same bytes."""
    from mxmoe import _C

    whole = up_product(layer, tokens, routing)[f"ours {format}"]

    def on(isa: str):
        with use_isa(isa):
            whole.call()

    return {f"ours {isa}": Provider(partial(on, isa), whole.bytes, True) for isa in reversed(_C.isas())}


def comparisons(layer: Layer, tokens: tuple[int, ...] = TOKENS) -> Iterator[Comparison]:
    s, most, some = layer.shape, tokens[-1], tokens[-2]
    product = 2.0 * s.top_k * s.dim * s.expert_dim  # operations of a token with one matrix (F, D) per expert

    def compare(verb: str, t: int, routing: str, matrices: int, build) -> Comparison:
        return Comparison(verb, s.name, t, routing, t * matrices * product, partial(build, layer, t, routing))

    for t in tokens:
        yield compare("experts forward", t, "balanced", 3, experts)
        if t >= some:
            yield compare("experts forward", t, "skewed", 3, experts)
    for routing in ("balanced", "skewed"):
        yield compare("experts forward + backward", some, routing, 9, step)
    for t in tokens[1::2] + tokens[-1:]:
        yield compare("grouped_mm", t, "balanced", 2, up_product)
    yield compare("grouped_mm", most, "skewed", 2, up_product)
    yield compare("grouped_mm_wgrad", some, "balanced", 2, weight_gradient)
    for format in ("mxfp8", "nvfp4"):
        yield compare(f"quantize {format}", most, "-", 0, partial(casts, format))
    moving = {"quantize mxfp8, row and column copies": both_copies, "swiglu": activation, "permute": move_to_experts}
    for verb, build in (moving | {"unpermute": move_back, "route": router}).items():
        yield compare(verb, some if verb == "quantize mxfp8, row and column copies" else most, "balanced", 0, build)
    for format in ("bf16", "mxfp8"):
        yield compare(f"grouped_mm {format} by instruction set", some, "balanced", 2, partial(instruction_sets, format))


def generation(new_tokens: int, quick: bool) -> Comparison:
    """A whole model of transformers; the notes say where the time goes."""

    def build() -> dict[str, Provider | str]:
        from mxmoe.integrations.transformers import register

        register()
        model = torch.no_grad()(model_of)(Run(quick=quick))
        names = {"ours nvfp4": OURS, "ours bf16": "mxmoe"} | {f"transformers {name}": name for name in THEIRS}
        return {
            name: Provider(partial(generate, model, theirs, new_tokens), 0.0, note=partial(profile, model, theirs, new_tokens))
            for name, theirs in names.items()
        }

    shape = "Qwen3-MoE, 24 layers, D 1024, F 512, E 64"
    return Comparison(f"generation of {new_tokens} tokens after a prompt", shape, 128, "-", 0.0, build)
