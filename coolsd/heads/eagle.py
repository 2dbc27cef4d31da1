"""EAGLE-1's draft head: one decoder layer that predicts the target's next hidden state (Li et al. 2024, 2401.15077).

Used unchanged by training and decoding. Knows hidden states and tokens; knows no target, cache format or rule.

    pair       i = (token i + 1, hidden state i)  ->  hidden state i + 1  ->  target's lm_head  ->  token i + 2
    position   i  ->  row i + 1 of the target's rotary table: the pair with image token 0 sits where that token sits
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from coolsd.interfaces import TargetOutput
from coolsd.kv_cache import KVCache
from coolsd.transformer import Linear, Transformer, TransformerConfig, freeze, linear, product

PAIRINGS = ("next", "same")


@dataclass(frozen=True)
class EagleConfig:
    """Shape of a head. target: fingerprint of the model it was trained for, None for a converted head.

    own_embedding: the head brings its token embedding (published heads do) instead of sharing the target's.
    mask_prefix_pads: padded prompt slots are not attended (published heads attend them).
    context: the token embedding includes what the target adds to it for the caption (`Prompt.inputs["context"]`).
    layers: those of the target that a `MultiLayerHead` reads, numbered from 1; none for an `EagleHead`.
    input_norm: the first layer normalises its input, too. text: rows of an embedding of its own for caption tokens;
    with 0 all caption slots look the same. pairing: "same" pairs hidden state i with token i instead of token i + 1, as
    LANTERN's published training code does for Chameleon's family.
    """

    transformer: TransformerConfig
    codebook_size: int
    prompt_slots: int
    image_tokens: int
    target: str | None = None
    bias: bool = True
    own_embedding: bool = False
    mask_prefix_pads: bool = True
    context: bool = False
    layers: tuple[int, ...] = ()
    input_norm: bool = False
    text: int = 0
    pairing: str = "next"

    def __post_init__(self) -> None:
        for name, least in {"codebook_size": 1, "prompt_slots": 1, "image_tokens": 1, "text": 0}.items():
            if type(value := getattr(self, name)) is not int or not least <= value <= 1 << 24:
                raise ValueError(f"{name} is {value!r}, but must be an integer from {least} to {1 << 24}")
        if not all(type(layer) is int for layer in self.layers):
            raise ValueError(f"layers are {list(self.layers)!r}, but must be integers")
        if not isinstance(self.target, (str, type(None))):
            raise ValueError(f"target is {self.target!r}, but must be the name of a checkpoint, or null")
        if self.pairing not in PAIRINGS:
            raise ValueError(f"pairing is {self.pairing!r}, but must be one of {', '.join(PAIRINGS)}")

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> EagleConfig:
        value = {key: entry for key, entry in value.items() if key != "architecture"}
        try:
            layers = tuple(value.get("layers", ()))
            return cls(**{**value, "layers": layers, "transformer": TransformerConfig(**value["transformer"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"not the config of an EAGLE head: {error}") from None

    def to_json(self) -> dict[str, Any]:
        return {"architecture": "eagle", **asdict(self)}


class EagleHead(nn.Module):
    """embedding [V, H], lm_head [V, H] and rope [P + T (+ spare), D / 2, 2] are the target's and not saved.

    With config.own_embedding the embedding is a parameter of the head.
    """

    embedding: Tensor
    lm_head: Tensor
    rope: Tensor
    _feature: Callable[[Tensor], Tensor]
    _output: Callable[[Tensor], Tensor]

    def __init__(self, config: EagleConfig, embedding: Tensor, lm_head: Tensor, rope: Tensor) -> None:
        super().__init__()
        size = config.transformer.hidden_size
        for name, tensor, shape in (
            ("embedding", embedding, (config.codebook_size, size)),
            ("lm_head", lm_head, (config.codebook_size, size)),
        ):
            if tuple(tensor.shape) != shape:
                raise ValueError(
                    f"the head wants an {name} of shape {list(shape)}, the target has {list(tensor.shape)}"
                )
        if (
            rope.shape[0] < config.prompt_slots + config.image_tokens
            or rope.shape[1] * 2 != config.transformer.head_dim
        ):
            raise ValueError(
                f"the head wants {config.prompt_slots + config.image_tokens} positions of head_dim "
                f"{config.transformer.head_dim}, the target has {rope.shape[0]} of {rope.shape[1] * 2}"
            )
        self.config = config
        if config.own_embedding:
            self.embedding = nn.Parameter(embedding.detach().clone())
        else:
            self.register_buffer("embedding", embedding.detach(), persistent=False)
        self.register_buffer("lm_head", lm_head.detach(), persistent=False)
        self.register_buffer("rope", rope.detach(), persistent=False)
        if config.text:
            self.text_embedding = nn.Parameter(torch.zeros(config.text, size))
        self.prefix_embedding = nn.Parameter(torch.zeros(size))
        self.fc = nn.Linear(2 * size, size, bias=config.bias)
        self.transformer = Transformer(config.transformer, final_norm=False, first_input_norm=config.input_norm)
        self._table: Tensor | None = None
        with torch.no_grad():  # start as "the next hidden state is this one": the feature half is the identity
            self.fc.weight[:, size:] = torch.eye(size)

    def _apply(self, fn: Any, recurse: bool = True) -> EagleHead:
        rope = self.rope
        super()._apply(fn, recurse)
        self.rope = rope.to(self.rope.device)  # positions stay exact whatever the weights' dtype
        self._table = None
        return self

    def train(self, mode: bool = True) -> EagleHead:
        super().train(mode)
        if mode:
            self._table = None  # it would not follow the weights
        return self

    def prepare(self) -> EagleHead:
        """Fold the embedding half of fc into a table [V + text + 1, H], so that a draft step multiplies half as much.

        For frozen weights: call it again after loading others.
        """
        size = self.config.transformer.hidden_size
        with torch.no_grad():
            self._table = torch.nn.functional.linear(self._embeddings(), self.fc.weight[:, :size], self.fc.bias)
            self._feature, self._output = product(self.fc.weight[:, size:].contiguous()), product(self.lm_head)
            freeze(self)
        return self

    def _embeddings(self) -> Tensor:
        """[V + text + 1, H]: image tokens, caption tokens, and last, at index -1, a caption slot as such."""
        text = [self.text_embedding] if self.config.text else []
        return torch.cat([self.embedding, *text, self.prefix_embedding[None]])

    def shifted(self, context: Tensor) -> Tensor:
        """Prompt's context [R, T + 1, H] -> [R, T + 1, H] by image tokens read: row 0 is no token, row n + 1 token n.

        Of a prepared head it has gone through fc, as `forward` then wants it.
        """
        context = torch.cat([torch.zeros_like(context[:, :1]), context[:, 1:]], dim=1)
        if self._table is None:
            return context
        return torch.nn.functional.linear(context, self.fc.weight[:, : self.config.transformer.hidden_size])

    def forward(
        self,
        tokens: Tensor,
        hidden_states: Tensor,
        rope: Tensor,
        mask: Tensor | None = None,
        cache: KVCache | None = None,
        flat: Tensor | None = None,
        context: Tensor | None = None,
    ) -> Tensor:
        """tokens long [R, N] (token i + 1 of each pair; -1 = a caption slot, V + t = caption token t of a head with
        config.text), hidden_states [R, N, H] -> [R, N, H].

        rope [R or 1, N, D / 2, 2]: rows i + 1 of the table. mask, cache, flat as in `Transformer`. context [R, N, H]:
        rows of `shifted` for these tokens, for a head whose config asks for it.
        """
        table = self._embeddings() if self._table is None else self._table
        token = table[tokens] if context is None else table[tokens] + context
        if self._table is None:
            x = torch.cat([token, hidden_states], dim=-1).to(self.fc.weight.dtype)  # DeepSpeed's bf16 leaves buffers
            x = linear(x, self.fc.weight, self.fc.bias)
        else:
            x = token + self._feature(hidden_states)
        return self.transformer(x, rope, mask, cache, flat)

    def features(self, output: TargetOutput) -> Tensor:
        """What the head reads of the target's output, [B, G, N, H]."""
        return output.hidden_states

    def logits(self, hidden_states: Tensor) -> Tensor:
        """[..., H] -> [..., V] by the target's own output matrix, with no further norm."""
        if self._table is None:
            return linear(hidden_states, self.lm_head.to(hidden_states.dtype))
        return self._output(hidden_states)


class MultiLayerHead(EagleHead):
    """An EAGLE head that reads several layers of the target, low to high, joined to one vector (EAGLE-3, 2503.01840).

    Of its own predictions it reads one vector, as an EAGLE head does: they stand for the joined ones.
    """

    def __init__(self, config: EagleConfig, embedding: Tensor, lm_head: Tensor, rope: Tensor) -> None:
        super().__init__(config, embedding, lm_head, rope)
        size = config.transformer.hidden_size
        self.join = Linear(len(config.layers) * size, size)
        with torch.no_grad():  # start as an EAGLE head on the last of them
            self.join.weight.mul_(0.1)[:, -size:] += torch.eye(size)

    def features(self, output: TargetOutput) -> Tensor:
        return self.join(torch.cat([output.layers[layer] for layer in self.config.layers], -1))


def make_head(config: EagleConfig, ends: Mapping[str, Tensor]) -> EagleHead:
    """The head of a config, with random weights, on the target's `ends()`."""
    return (MultiLayerHead if config.layers else EagleHead)(config, ends["embedding"], ends["lm_head"], ends["rope"])
