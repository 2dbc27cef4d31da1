"""The decoder against slow plain implementations of RMSNorm, RoPE, (grouped-query) attention and SwiGLU."""

import copy
import math

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from coolsd.transformer import (
    Block,
    HeadNorm,
    Linear,
    Transformer,
    TransformerConfig,
    attend,
    freeze,
    grid_rope,
    interleave,
    line_rope,
    linear,
    product,
    rotate,
)
from coolsd.tree import ancestors

PLAIN = TransformerConfig(32, 2, 4, 40)
GROUPED = TransformerConfig(32, 2, 4, 40, kv_heads=2)


@pytest.fixture
def random_transformer(rng):
    def make(config, **options):
        model = Transformer(config, **options)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(mean=float(parameter.ndim == 1), std=0.25, generator=rng)
        return model.double().eval().requires_grad_(False)  # rotate works in float32, hence the 1e-5 below

    return make


def slow_norm(x, weight, eps):
    return torch.stack([row / math.sqrt(float((row * row).mean()) + eps) * weight for row in x])


def slow_rotate(vector, angles):
    out = vector.clone()
    for i, (cosine, sine) in enumerate(angles.tolist()):
        a, b = float(vector[2 * i]), float(vector[2 * i + 1])
        out[2 * i], out[2 * i + 1] = a * cosine - b * sine, a * sine + b * cosine
    return out


def slow_block(block, x, rope, seen, input_norm=True):
    """One row x [N, H], position by position and head by head; seen [N, N] bool."""
    config = block.attention.config
    size, groups = config.head_dim, config.heads // config.key_heads
    normed = slow_norm(x, block.attention_norm.weight, config.norm_eps) if input_norm else x
    q, k, v = (normed @ block.attention.qkv.weight.T).split(
        [config.heads * size, config.key_heads * size, config.key_heads * size], dim=-1
    )
    mixed = torch.zeros_like(q)
    for head in range(config.heads):
        mine, shared = slice(head * size, (head + 1) * size), head // groups
        theirs = slice(shared * size, (shared + 1) * size)
        queries = torch.stack([slow_rotate(row, angles) for row, angles in zip(q[:, mine], rope, strict=True)])
        keys = torch.stack([slow_rotate(row, angles) for row, angles in zip(k[:, theirs], rope, strict=True)])
        for n in range(len(x)):
            visible = seen[n].nonzero().flatten()
            weights = torch.softmax(keys[visible] @ queries[n] / math.sqrt(size), 0)
            mixed[n, mine] = weights @ v[visible][:, theirs]
    x = x + mixed @ block.attention.output.weight.T
    normed = slow_norm(x, block.feed_forward_norm.weight, config.norm_eps)
    gate, up = (normed @ block.feed_forward.gate_up.weight.T).chunk(2, -1)
    return x + (gate * torch.sigmoid(gate) * up) @ block.feed_forward.down.weight.T


@pytest.mark.parametrize("config", [PLAIN, GROUPED], ids=["all heads", "grouped queries"])
@pytest.mark.parametrize("input_norm", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_block_equals_the_plain_one(rng, random_transformer, config, input_norm, masked):
    block = random_transformer(config, first_input_norm=input_norm).layers[0]
    assert isinstance(block, Block)
    x = torch.randn(2, 7, 32, generator=rng).double()
    rope = grid_rope(3, 2, 2, config.head_dim)
    seen = torch.ones(7, 7, dtype=torch.bool).tril()
    if masked:
        seen &= (torch.rand(7, 7, generator=rng) < 0.6) | torch.eye(7, dtype=torch.bool)
    fast = block(x, rope[None], seen.expand(2, 1, -1, -1) if masked else None)
    slow = torch.stack([slow_block(block, row, rope, seen, input_norm) for row in x])
    torch.testing.assert_close(fast, slow, rtol=0, atol=1e-5)


def test_interleaved_rows_turn_as_llama_turns_halves(rng):
    heads, size, x = 3, 8, torch.randn(1, 5, 24, generator=rng)
    weights = [torch.randn(heads * size, 24, generator=rng) for _ in range(2)]
    rope = line_rope(5, size)

    def halves(weight):
        y = (x @ weight.T).unflatten(-1, (heads, size))
        cosine, sine = (torch.cat([rope[..., i]] * 2, -1)[None, :, None] for i in (0, 1))
        first, second = y.chunk(2, -1)
        return y * cosine + torch.cat([-second, first], -1) * sine

    def pairs(weight):
        return rotate((x @ interleave(weight, heads).T).unflatten(-1, (heads, size)), rope[None])

    products = [torch.einsum("bnhd,bmhd->bhnm", *map(turn, weights)) for turn in (halves, pairs)]
    torch.testing.assert_close(products[1], products[0], rtol=0, atol=1e-4)
    shifted = rotate(pairs(weights[0]), line_rope(6, size)[None, 5:])  # only differences of positions matter
    again = rotate(pairs(weights[1]), line_rope(6, size)[None, 5:])
    torch.testing.assert_close(torch.einsum("bnhd,bmhd->bhnm", shifted, again), products[0], rtol=0, atol=1e-4)


def test_each_head_has_a_norm_of_its_own(rng):
    norm, x = HeadNorm(3, 8), torch.randn(2, 5, 3, 8, generator=rng)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_(generator=rng)
        for head in range(3):
            wanted = torch.nn.functional.layer_norm(x[:, :, head], (8,), norm.weight[head], norm.bias[head], 1e-5)
            torch.testing.assert_close(norm(x)[:, :, head], wanted)


def test_grid_rope_follows_its_formula():
    prefix, height, width, size = 3, 2, 4, 12  # head_dim 12: six pairs, three by row and three by column
    table = grid_rope(prefix, height, width, size)
    assert table.shape == (prefix + height * width, 6, 2)
    assert not table[:prefix].any()
    for n in range(height * width):
        row, column = divmod(n, width)
        for pair in range(6):
            angle = (row if pair < 3 else column) * 10000.0 ** (-2 * (pair % 3) / 6)
            wanted = torch.tensor([math.cos(angle), math.sin(angle)])
            torch.testing.assert_close(table[prefix + n, pair], wanted, rtol=0, atol=1e-6)


def test_rotation_keeps_lengths_and_only_differences_of_position_matter(rng):
    rope = grid_rope(0, 6, 6, 8)
    q, k = torch.randn(2, 1, 1, 1, 8, generator=rng).unbind(0)

    def score(a, b):
        one, other = rotate(q, rope[None, a : a + 1]), rotate(k, rope[None, b : b + 1])
        torch.testing.assert_close(one.norm(), q.norm())
        return float((one * other).sum())

    base = score(0 * 6 + 1, 2 * 6 + 3)  # rows differ by 2, columns by 2
    assert abs(score(3 * 6 + 2, 5 * 6 + 4) - base) < 1e-5
    assert abs(score(3 * 6 + 2, 5 * 6 + 3) - base) > 1e-3
    assert not rotate(q, torch.zeros(1, 1, 4, 2)).any()  # a zero row of the table: text


def test_rotation_is_done_in_float32(rng):
    x, rope = torch.randn(2, 36, 3, 8, generator=rng), grid_rope(0, 6, 6, 8)
    half = rotate(x.bfloat16(), rope[None])
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, rotate(x.bfloat16().float(), rope[None]).bfloat16())


@pytest.mark.parametrize("config", [PLAIN, GROUPED], ids=["all heads", "grouped queries"])
def test_cached_equals_uncached(rng, random_transformer, config):
    model = random_transformer(config).float()
    x = torch.randn(2, 9, 32, generator=rng)
    rope = grid_rope(0, 3, 3, config.head_dim)[None]
    whole = model(x, rope)
    cache, parts, start = model.new_cache(2, 12), [], 0
    for count in (4, 1, 3, 1):
        flat, mask = cache.place(count)
        parts.append(model(x[:, start : start + count], rope[:, start : start + count], mask, cache, flat))
        start += count
        cache.keep(None, torch.tensor([count, count]), start)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-4)


def test_tree_output_equals_each_path_alone(rng, random_transformer):
    model = random_transformer(PLAIN).float()
    parent = (-1, 0, 0, 1, 1, 2)
    depth = torch.tensor([0, 1, 1, 2, 2, 2])
    prefix, nodes = torch.randn(1, 3, 32, generator=rng), torch.randn(1, 6, 32, generator=rng)
    rope = grid_rope(0, 3, 3, 8)
    cache = model.new_cache(1, 12)
    flat, mask = cache.place(3)
    model(prefix, rope[None, :3], mask, cache, flat)
    cache.keep(None, torch.tensor([3]), 3)
    flat, mask = cache.place(6, ancestors(parent, torch.device("cpu")))
    tree = model(nodes, rope[None, 3 + depth], mask, cache, flat)
    for node in range(6):
        path = ancestors(parent, torch.device("cpu"))[node].nonzero().flatten()
        alone = model(torch.cat([prefix, nodes[:, path]], 1), rope[None, : 3 + len(path)])
        torch.testing.assert_close(tree[0, node], alone[0, -1], rtol=0, atol=1e-4)


def test_impossible_shapes_are_refused():
    with pytest.raises(ValueError, match="hidden_size 30 is not a multiple of heads 4"):
        TransformerConfig(30, 1, 4, 8)
    with pytest.raises(ValueError, match="heads 4 is not a multiple of kv_heads 3"):
        TransformerConfig(32, 1, 4, 8, kv_heads=3)


@pytest.mark.parametrize("small", [0, 1 << 20])
def test_frozen_products_are_the_same_and_thaw(rng, monkeypatch, small):
    monkeypatch.setattr("coolsd.transformer.SMALL", small)
    model = Transformer(TransformerConfig(32, 2, 2, 48)).eval().requires_grad_(False)
    x, rope = torch.randn(3, 5, 32, generator=rng), grid_rope(0, 3, 3, 16)[None, :5]
    plain = model(x, rope)
    freeze(model)
    with torch.inference_mode():
        frozen = model(x, rope)
        assert any(part.product is not None for part in model.modules() if hasattr(part, "product"))
        torch.testing.assert_close(frozen, plain, rtol=0, atol=1e-5)
    other = Transformer(model.config).eval().requires_grad_(False)
    for changed in (copy.deepcopy(model), model):
        changed.load_state_dict(other.state_dict())
        with torch.inference_mode():  # a copy and loaded weights are not what was frozen
            torch.testing.assert_close(changed(x, rope), other(x, rope), rtol=0, atol=1e-5)
    freeze(model)
    with torch.no_grad():
        model.layers[0].attention.qkv.weight.add_(1)
        assert not torch.allclose(model.train()(x, rope), other(x, rope))  # training reads the weights themselves


def test_a_compiled_product_is_the_weights_own(rng):
    first, x = Linear(8, 5).requires_grad_(False), torch.randn(2, 8, generator=rng)
    first.freeze()
    second = copy.deepcopy(first)
    first.train()
    first.weight.add_(1)
    first.freeze()
    with torch.inference_mode():
        for linear in (first, second):
            given = torch.ops.coolsd.frozen_linear(x, linear.weight)
            torch.testing.assert_close(given, x @ linear.weight.T, rtol=0, atol=1e-6)
            torch.testing.assert_close(linear(x), given, rtol=0, atol=1e-6)


@pytest.mark.parametrize("one_tensor", [False, True])
def test_a_compiler_copies_no_cache_and_keeps_frozen_products(rng, one_tensor):
    """In the graph that a compiler gets, only what becomes of a layer is of the layer's size. The control, layers that
    are parts of one tensor, makes more of that size: copies."""
    model = Transformer(TransformerConfig(32, 2, 2, 48)).eval().requires_grad_(False)
    freeze(model)
    x, rope, graphs = torch.randn(3, 5, 32, generator=rng), grid_rope(0, 3, 3, 16)[None, :5], []

    def collect(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    def run(forward):
        cache = model.new_cache(3, 40)
        if one_tensor:
            cache.stores = torch.stack(cache.stores)
        flat, mask = cache.place(5)
        return forward(x, rope, mask, cache, flat)

    torch._dynamo.reset()
    with torch.inference_mode():
        found = run(torch.compile(model, backend=aot_autograd(fw_compiler=collect), dynamic=False, fullgraph=True))
        torch.testing.assert_close(found, run(model), rtol=0, atol=1e-5)
    nodes, size = list(graphs[0].graph.nodes), 3 * 40 * 4 * 16
    assert sum(node.target == torch.ops.coolsd.frozen_linear.default for node in nodes) == 2 * 4
    made = [
        node.meta["val"] for node in nodes if node.op == "call_function" and not getattr(node.target, "is_view", True)
    ]
    large = sum(isinstance(value, torch.Tensor) and value.numel() >= size for value in made)
    assert (large == 2) != one_tensor


@pytest.mark.parametrize("rows", [1, 6, 50])
def test_emulated_bfloat16_products_are_rounded_once(rng, monkeypatch, rows):
    """Where the CPU has no bfloat16: float32 sums of the bfloat16 numbers, in more than one part, in every shape."""
    monkeypatch.setattr("coolsd.transformer.bfloat16_on_cpu", lambda: False)
    monkeypatch.setattr("coolsd.transformer.PART", 5)
    weight, x = torch.randn(13, 8, generator=rng).bfloat16(), torch.randn(2, rows, 8, generator=rng).bfloat16()
    exact = x.double() @ weight.double().T
    found = product(weight)(x)
    assert found.dtype == torch.bfloat16 and found.shape == exact.shape
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-5)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(found.double(), exact, rtol=2**-11, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 6, 50])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 2**-8)])
def test_products_of_frozen_weights_are_exact_to_one_rounding(rng, monkeypatch, rows, dtype, most):
    """Packed and not, on whatever this machine is."""
    weight, x = torch.randn(70, 40, generator=rng).to(dtype), torch.randn(2, rows, 40, generator=rng).to(dtype)
    exact = x.double() @ weight.double().T
    for packed in (dict.fromkeys((torch.float32, torch.bfloat16), 1 << 20), {}):
        monkeypatch.setattr("coolsd.transformer.PACKED_BYTES", packed)
        found = product(weight)(x)
        assert found.dtype == dtype and found.shape == exact.shape
        torch.testing.assert_close(found.double(), exact, rtol=most, atol=1e-5)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(found.double(), exact.roll(1, -1), rtol=most, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("nodes", [1, 3])
def test_attention_is_its_formula_in_every_dtype(rng, nodes, dtype):
    queries, keys, values = (torch.randn(2, heads, count, 8, generator=rng).to(dtype)
                             for heads, count in ((4, nodes), (2, 11), (2, 11)))  # fmt: skip
    hidden = torch.rand(2, 1, nodes, 11, generator=rng) < 0.3
    mask = torch.zeros(2, 1, nodes, 11, dtype=dtype).masked_fill_(hidden, -1e4)
    wide_keys, wide_values = (tensor.double().repeat_interleave(2, 1) for tensor in (keys, values))
    scores = queries.double() @ wide_keys.mT / math.sqrt(8)
    exact, unmasked = ((scores + add).softmax(-1) @ wide_values for add in (mask.double(), 0))
    found, error = attend(queries, keys, values, mask), 8 * torch.finfo(dtype).eps
    assert found.shape == (2, 4, nodes, 8) and found.dtype == dtype
    assert (found - exact).abs().max() < error < (found - unmasked).abs().max()


@pytest.fixture
def multiplied(monkeypatch):
    """The dtypes in which F.linear multiplies, on a CPU without bfloat16."""
    monkeypatch.setattr("coolsd.transformer.bfloat16_on_cpu", lambda: False)
    seen, plain = [], torch.nn.functional.linear

    def spy(x, weight, bias=None):
        seen.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else weight.dtype)
        return plain(x, weight, bias)

    monkeypatch.setattr("coolsd.transformer.F.linear", spy)
    return seen


def test_emulated_bfloat16_has_the_gradients_of_exact_products(rng, multiplied):
    """Autocast where the CPU has no bfloat16: bfloat16 numbers in, float32 sums, the result rounded once."""
    x, weight, bias, ahead = (torch.randn(*shape, generator=rng) for shape in ((2, 3, 8), (5, 8), (5,), (2, 3, 5)))
    learned = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    with torch.autocast("cpu", torch.bfloat16):
        found = linear(x, weight, bias)
    assert multiplied == [torch.float32]
    found.backward(ahead.bfloat16())
    rounded = [tensor.detach().bfloat16().double().requires_grad_() for tensor in learned]
    exact = rounded[0] @ rounded[1].T + rounded[2]
    exact.backward(ahead.bfloat16().double())
    assert found.dtype == torch.bfloat16 and all(tensor.grad.dtype == torch.float32 for tensor in learned)
    pairs = [(found, exact), *((a.grad, b.grad) for a, b in zip(learned, rounded, strict=True))]
    for one, other in pairs:
        torch.testing.assert_close(one.double(), other, rtol=2**-8, atol=1e-5)
    with pytest.raises(AssertionError):  # not of the numbers before they were rounded
        torch.testing.assert_close(weight.grad, ahead.flatten(0, 1).T @ x.detach().flatten(0, 1), rtol=1e-4, atol=1e-5)


def test_emulation_keeps_nothing_in_float32(rng, multiplied):
    """What the way back needs: bfloat16 numbers and the weight itself."""
    kept = []
    x, weight = torch.randn(6, 8, generator=rng), torch.randn(5, 8, generator=rng).requires_grad_()
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    )
    with hooks, torch.autocast("cpu", torch.bfloat16):
        linear(x, weight)
    assert [tensor.dtype == torch.bfloat16 or tensor is weight for tensor in kept] == [True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_emulation_is_for_gradients_and_autocast_alone(rng, multiplied, dtype):
    """Frozen bfloat16 weights are not made float32 for each token, and what is float32 stays as it is."""
    x, weight = torch.randn(2, 8, generator=rng), torch.randn(5, 8, generator=rng)
    with torch.inference_mode():
        assert linear(x.to(dtype), weight.to(dtype)).dtype == dtype
    exact = linear(x, weight)
    torch.testing.assert_close(exact, x @ weight.T)
    assert multiplied == [dtype, torch.float32]


def test_autocast_leaves_a_compiled_training_whole(rng):
    """Emulation is for what is not compiled; a compiler finds nothing in its way."""
    module = Transformer(TransformerConfig(8, 1, 2, 12))
    with torch.autocast("cpu", torch.bfloat16):
        found = torch._dynamo.explain(module)(torch.randn(1, 3, 8, generator=rng), torch.ones(1, 3, 2, 2))
    assert found.graph_count == 1
