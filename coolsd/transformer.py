"""The one Llama-style decoder that every target and draft head is made of.

Knows attention, RoPE and caches; knows no token, caption or image. Rows R = B * G are (image, branch) pairs.
Projections that read the same input are one matrix: at batch 1 a decoder is a list of matrix-vector products,
and fewer, larger ones are faster.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coolsd.kv_cache import KVCache

MOST_LAYERS = 1 << 10
# Larger weights are not kept twice; in bfloat16 the models are large.
PACKED_BYTES = {torch.float32: 1 << 24, torch.bfloat16: 2 << 20}
SMALL = 1 << 20  # multiplications that another library ends before oneDNN begins (measured on one AMD with AVX2)
EMULATED_ROWS, PART = 6, 512  # see `product`
GRAPHS = 256  # compiled shapes before torch gives up and runs them uncompiled; its own 8 do for two drafters


@dataclass(frozen=True)
class TransformerConfig:
    """Shape of a decoder. kv_heads = heads unless grouped-query attention; head_dim = hidden_size / heads.

    qk_norm: every head's queries and keys go through a LayerNorm of its own before they are rotated (Chameleon).
    """

    hidden_size: int
    layers: int
    heads: int
    intermediate_size: int
    kv_heads: int = 0
    norm_eps: float = 1e-5
    qk_norm: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden_size", "layers", "heads", "intermediate_size", "kv_heads"):
            value, least = getattr(self, name), int(name != "kv_heads")
            if type(value) is not int or not least <= value < 1 << 31:
                raise ValueError(f"transformer: {name} is {value!r}, but must be an integer >= {least}")
        if self.layers > MOST_LAYERS:  # each takes memory, weights or not
            raise ValueError(f"transformer: layers is {self.layers}, but must be at most {MOST_LAYERS}")
        if type(self.norm_eps) not in (int, float) or not 0 < self.norm_eps < 1:
            raise ValueError(f"transformer: norm_eps is {self.norm_eps!r}, but must be a number between 0 and 1")
        if self.hidden_size % self.heads:
            raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of heads {self.heads}")
        if self.kv_heads and self.heads % self.kv_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.heads

    @property
    def key_heads(self) -> int:
        return self.kv_heads or self.heads


def grid_rope(prefix: int, height: int, width: int, head_dim: int, base: float = 10000.0) -> Tensor:
    """LlamaGen's 2-D rotary table, float32 [prefix + height * width, head_dim / 2, 2] (cosine, sine).

    The first half of the pairs turns with the row, the second with the column. Prefix rows are all zero,
    which makes queries and keys there zero: text is attended uniformly (reference: LlamaGen, gpt.py).
    """
    frequencies = base ** -(torch.arange(0, head_dim // 2, 2).float() / (head_dim // 2))  # [head_dim / 4]
    rows = torch.outer(torch.arange(height).float(), frequencies)
    columns = torch.outer(torch.arange(width).float(), frequencies)
    angles = torch.cat(
        [rows[:, None].expand(-1, width, -1), columns[None].expand(height, -1, -1)], dim=-1
    ).flatten(0, 1)  # fmt: skip
    table = torch.stack([angles.cos(), angles.sin()], dim=-1)
    return torch.cat([table.new_zeros(prefix, *table.shape[1:]), table])


def line_rope(length: int, head_dim: int, base: float = 10000.0) -> Tensor:
    """Llama's rotary table of positions 0, 1, 2, ..., float32 [length, head_dim / 2, 2] (cosine, sine), on the CPU.

    Llama pairs x[i] with x[i + D / 2], `rotate` x[2i] with x[2i + 1]: see `interleave`.
    """
    frequencies = 1.0 / base ** (torch.arange(0, head_dim, 2, device="cpu").float() / head_dim)
    angles = torch.outer(torch.arange(length, device="cpu").float(), frequencies)
    return torch.stack([angles.cos(), angles.sin()], dim=-1)


def interleave(rows: Tensor, heads: int) -> Tensor:
    """Rows [heads * D, ...] of a query or key projection made for x[i], x[i + D / 2] -> the same for x[2i], x[2i + 1].

    What attention sees of queries and keys, their products, stays the same.
    """
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate interleaved pairs (x[2i], x[2i+1]) in float32: x [R, N, heads, D], rope [R or 1, N, D / 2, 2]."""
    pairs = x.float().unflatten(-1, (-1, 2))
    if torch.compiler.is_compiling():  # compilers fuse real numbers only, while without one fewer calls are faster
        (a, b), (cosine, sine) = pairs.unbind(-1), rope.unsqueeze(2).unbind(-1)
        turned = torch.stack([a * cosine - b * sine, a * sine + b * cosine], dim=-1)
    else:
        turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(rope).unsqueeze(2))
    return turned.flatten(-2).to(x.dtype)


def product(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """x -> x W^T, fast, for a weight that no longer changes; no gradients.

    On a CPU it goes through a copy in oneDNN's own layout: with few rows, which decoding is made of, that takes a
    third less time than x W^T (AMD with AVX2, float32, 12 rows, 256 x 1408: 0.19 ms against 0.29; AMD with AVX-512
    BF16, bfloat16, 2 rows, 256 x 1536: 0.016 against 0.025), but in float32 with AVX2 never less than 0.07 ms; W x^T
    takes half of that where a product is `SMALL` (2 rows, 256 x 256: 0.03 ms). An x86 that does not multiply bfloat16
    itself reads the weight once for each row; from `EMULATED_ROWS` on parts of it are made float32 instead, each small
    enough to stay in the processor's cache (1280 x 3840: 12 rows in 0.6 of the time, 240 in 0.17).
    """
    emulated = "AVX" in torch.backends.cpu.get_cpu_capability() and not bfloat16_on_cpu()
    if weight.device.type == "cpu" and weight.dtype in (torch.bfloat16, torch.float16) and emulated:
        return lambda x: F.linear(x, weight) if x.numel() < EMULATED_ROWS * x.shape[-1] else _by_parts(x, weight)
    packs = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()
    packs = packs and (weight.dtype == torch.float32 or bfloat16_on_cpu())
    if not packs or weight.nbytes > PACKED_BYTES.get(weight.dtype, 0):
        return lambda x: F.linear(x, weight)
    weight = weight.detach()
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    small = SMALL if weight.dtype == torch.float32 else 0

    def multiply(x: Tensor) -> Tensor:
        if x.numel() * len(weight) < small:
            return (weight @ x.reshape(-1, x.shape[-1]).T).T.contiguous().view(*x.shape[:-1], len(weight))
        return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")

    return multiply


@functools.cache
def bfloat16_on_cpu() -> bool:
    """Whether the CPU multiplies bfloat16 itself (AVX-512 BF16 or AMX)."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b with gradients, in autocast's dtype.

    A CPU that does not multiply bfloat16 itself does it in float32, on the same bfloat16 numbers and to a bfloat16
    result: torch's own way back takes 100 times as long there (AMD with AVX2, 256 rows, 1280 x 3840: 10.8 s, 0.1 s).
    """
    if weight.device.type != "cpu" or torch.compiler.is_compiling():
        return F.linear(x, weight, bias)
    autocast = torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu") if autocast else x.dtype if x.dtype == weight.dtype else None
    if dtype != torch.bfloat16 or bfloat16_on_cpu() or not (autocast or torch.is_grad_enabled()):
        return F.linear(x, weight, bias)
    product = _EmulatedProduct.apply(x, weight)
    return product.to(dtype) if bias is None else (product + bias.to(dtype)).to(dtype)


class _EmulatedProduct(torch.autograd.Function):
    """x W^T in float32 of numbers rounded to bfloat16; keeps no float32 copy for the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        x = x.bfloat16()
        ctx.save_for_backward(x, weight)
        with torch.autocast("cpu", enabled=False):
            return F.linear(x.float(), weight.bfloat16().float())

    @staticmethod
    def backward(ctx: Any, ahead: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rows, columns = ahead.reshape(-1, len(weight)), x.reshape(-1, x.shape[-1])
        with torch.autocast("cpu", enabled=False):
            back = ahead @ weight.bfloat16().float() if ctx.needs_input_grad[0] else None
            return back, rows.T @ columns.float() if ctx.needs_input_grad[1] else None


def _by_parts(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T, computed in float32, PART rows of W at a time."""
    wide, out = x.float().flatten(0, -2), x.new_empty(x.shape[:-1].numel(), len(weight))
    part = torch.empty(PART, weight.shape[1], dtype=torch.float32, device=weight.device)
    for start in range(0, len(weight), PART):
        some = part[: len(weight) - start].copy_(weight[start : start + PART])
        out[:, start : start + PART] = wide @ some.T
    return out.view(*x.shape[:-1], -1)


class Linear(nn.Linear):
    """x W^T; `freeze` makes it faster without gradients, until the weight moves, is loaded, trained or copied."""

    product: Callable[[Tensor], Tensor] | None = None

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def freeze(self) -> None:
        self.product = product(self.weight)
        FROZEN[self.weight.data_ptr()] = self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "product": None}  # of a copy

    def _load_from_state_dict(self, *arguments: Any) -> None:
        self.product = None
        super()._load_from_state_dict(*arguments)

    def _apply(self, fn: Any, recurse: bool = True) -> Linear:
        self.product = None
        return super()._apply(fn, recurse)

    def train(self, mode: bool = True) -> Linear:
        self.product = None if mode else self.product
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        if self.product is None or torch.is_grad_enabled():
            return linear(x, self.weight)
        if not torch.compiler.is_compiling():
            return self.product(x)
        if self.weight.device.type != "cpu":
            return super().forward(x)
        return torch.ops.coolsd.frozen_linear(x, self.weight)


# Compilers cannot look into oneDNN's layout: to them a frozen product on the CPU is one opaque operation.
FROZEN: WeakValueDictionary[int, Linear] = WeakValueDictionary()  # by where the weight lies
OPERATIONS = torch.library.Library("coolsd", "DEF")
OPERATIONS.define("frozen_linear(Tensor x, Tensor weight) -> Tensor")


@torch.library.impl(OPERATIONS, "frozen_linear", "CPU")
def _frozen_linear(x: Tensor, weight: Tensor) -> Tensor:
    linear = FROZEN.get(weight.data_ptr())
    if linear is None or linear.product is None or linear.weight.data_ptr() != weight.data_ptr():
        return F.linear(x, weight)  # a copy, or another weight in its place
    return linear.product(x)


@torch.library.register_fake("coolsd::frozen_linear", lib=OPERATIONS)
def _frozen_linear_shape(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def freeze(model: nn.Module) -> None:
    """`Linear.freeze` everywhere in a model that no longer trains."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.freeze()


class HeadNorm(nn.Module):
    """LayerNorm of each head's D numbers, with a weight and a bias [heads, D] of its own."""

    def __init__(self, heads: int, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, head_dim))
        self.bias = nn.Parameter(torch.zeros(heads, head_dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], eps=1e-5) * self.weight + self.bias


def attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """softmax(Q K^T / sqrt(D) + mask) V: queries [R, heads, N, D], keys and values [R, kv_heads, S, D]; None = causal.

    On a CPU in half precision one query takes twice the time of two (torch 2.14, AVX-512 BF16, 160 slots: 0.071 ms
    against 0.034): there it is asked twice.
    """
    one, heads, key_heads = queries.shape[2] == 1, queries.shape[1], keys.shape[1]
    twice = one and mask is not None and queries.device.type == "cpu" and queries.dtype != torch.float32
    if twice and mask is not None:
        queries, mask = queries.expand(-1, -1, 2, -1), mask.expand(-1, -1, 2, -1)
    mixed = F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=heads != key_heads
    )
    return mixed[:, :, :1] if twice else mixed


class Attention(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        heads = config.heads + 2 * config.key_heads
        self.qkv = Linear(config.hidden_size, heads * config.head_dim)
        self.qk_norm = HeadNorm(config.heads + config.key_heads, config.head_dim) if config.qk_norm else None
        self.output = Linear(config.hidden_size, config.hidden_size)

    def forward(
        self, x: Tensor, rope: Tensor, mask: Tensor | None, cache: KVCache | None, layer: int, flat: Tensor | None
    ) -> Tensor:
        heads, key_heads = self.config.heads, self.config.key_heads
        qkv = self.qkv(x).unflatten(-1, (-1, self.config.head_dim))  # [R, N, heads + 2 * key_heads, D]
        turned = qkv[:, :, : heads + key_heads]
        turned = rotate(turned if self.qk_norm is None else self.qk_norm(turned), rope)
        queries, keys, values = turned[:, :, :heads], turned[:, :, heads:], qkv[:, :, heads + key_heads :]
        queries = queries.transpose(1, 2)
        if cache is None:
            keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        else:
            assert flat is not None and mask is not None
            keys, values = cache.write(layer, torch.cat([keys, values], dim=2), flat, mask.shape[-1])
        mixed = attend(queries, keys, values, mask)
        return self.output(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), gate and up one matrix."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.gate_up = Linear(config.hidden_size, 2 * config.intermediate_size)
        self.down = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """Pre-norm block. input_norm = False leaves the first norm out, as EAGLE's first layer does."""

    def __init__(self, config: TransformerConfig, input_norm: bool = True) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, config.norm_eps) if input_norm else nn.Identity()
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(
        self,
        x: Tensor,
        rope: Tensor,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
        layer: int = 0,
        flat: Tensor | None = None,
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rope, mask, cache, layer, flat)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Transformer(nn.Module):
    """A stack of blocks. With final_norm the output is normalised (a target); without it is not (a draft head)."""

    def __init__(self, config: TransformerConfig, final_norm: bool = True, first_input_norm: bool = True) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Block(config, input_norm=first_input_norm or i > 0) for i in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.norm_eps) if final_norm else nn.Identity()

    def forward(
        self,
        x: Tensor,
        rope: Tensor,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
        flat: Tensor | None = None,
        shown: dict[int, Tensor] | None = None,
    ) -> Tensor:
        """x [R, N, H], rope [R or 1, N, D / 2, 2] -> [R, N, H].

        Without a cache: mask additive or bool [R, 1, N, N], None = causal. With one: mask and flat from `cache.place`.
        shown: where given, what comes out of the layers that are its keys, numbered from 1, is put into it.
        """
        for index, block in enumerate(self.layers):
            x = block(x, rope, mask, cache, index, flat)
            if shown is not None and index + 1 in shown:
                shown[index + 1] = x
        return self.norm(x)

    def compile_shapes(self) -> None:
        """torch.compile, each shape of input a graph, of which all transformers of the process share `GRAPHS`."""
        from torch._dynamo import config

        config.recompile_limit = max(config.recompile_limit, GRAPHS)
        self.compile(dynamic=False)

    def new_cache(self, rows: int, slots: int, valid: Tensor | None = None) -> KVCache:
        weight = next(self.parameters())
        cache = KVCache(
            self.config.layers, rows, slots, self.config.key_heads, self.config.head_dim, valid,
            dtype=weight.dtype, device=weight.device,
        )  # fmt: skip
        if self._compiled_call_impl is not None:
            cache.step = slots
        return cache
