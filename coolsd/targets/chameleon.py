"""Chameleon's family, one transformer over text and image tokens: Lumina-mGPT (2408.02657) and Anole (2407.06135).

Knows the transformer, the checkpoint's own tokenizer and key names, and how an image is laid out; knows no draft.

    lumina   <s> words <sep> <boi> h w | c c c / c c c / ... /    w / 16 codes and an end of line in each of h / 16 rows
             <boi> h w                 |   without caption        h and w here in units of 32 pixels, height first
    anole    <s> words <sep> <boi>     | c c c c c c ...          32 x 32 codes
             <s> <boi>                 |   without caption

Left of the bar is the prompt, given and not sampled; <eoi> behind the image is not sampled either (`image_ids`). Every
(row, branch) counts its positions from 0: left padding has none. (A draft head counts slots, which is the same to it:
of rotary positions only differences matter.)

Decoding sees image tokens alone: token n of the V is VQ code n, id n + 4 of the checkpoint's vocabulary, and Lumina's
end of line is the last token of V, forced where it stands. No other id can occur there, so logits are computed for
these rows of lm_head only. Ids behind the codes follow their number, so that small models have all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from coolsd.checkpoint import Shards, as_told, check_fits
from coolsd.interfaces import DraftTree, Layout, Prompt, TargetOutput
from coolsd.kv_cache import KVCache, forced_mask
from coolsd.targets.captions import read_vocabulary
from coolsd.transformer import Linear, Transformer, TransformerConfig, interleave, line_rope

LAYOUTS = ("lumina", "anole")
BOS, FIRST_CODE = 0, 4
PATCH, GRID = 16, 32  # pixels of a code, and of a step of Lumina's h and w
AREA = 1 << 20  # pixels of the largest published model's images
FAR = 1e6  # an end of line looks like no code
Read = Callable[[str], Tensor]


@dataclass(frozen=True)
class ChameleonConfig:
    """Shape of the target and of its images; the defaults are those of all published checkpoints.

    layout: "lumina" or "anole". image_size: (width, height) in pixels. vocabulary: ids of text and image together.
    """

    transformer: TransformerConfig
    layout: str
    image_size: tuple[int, int]
    codes: int = 8192
    vocabulary: int = 65536
    prompt_slots: int = 192
    rope_base: float = 10000.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "image_size", tuple(self.image_size))  # JSON and YAML give lists
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout is {self.layout!r}, but must be one of {', '.join(LAYOUTS)}")
        for name, most in (("vocabulary", 1 << 24), ("codes", self.vocabulary), ("prompt_slots", 1 << 16)):
            value = getattr(self, name)
            if type(value) is not int or not 0 < value <= most:
                raise ValueError(f"{name} is {value!r}, but must be an integer from 1 to {most}")
        if type(self.rope_base) not in (int, float) or not 1 < self.rope_base < math.inf:
            raise ValueError(f"rope_base is {self.rope_base!r}, but must be a number above 1")
        unit = GRID if self.layout == "lumina" else PATCH
        if len(self.image_size) != 2 or not all(type(n) is int and n > 0 and n % unit == 0 for n in self.image_size):
            raise ValueError(
                f"image_size is {list(self.image_size)}, but must be [width, height], multiples of {unit} pixels"
            )
        if max(self.image_size) > 4 * min(self.image_size) or self.image_size[0] * self.image_size[1] > AREA:
            raise ValueError(
                f"image_size is {list(self.image_size)}, but must be at most 1024 x 1024 pixels in area and 4 to 1"
            )

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tokens, ends of lines included."""
        width, height = self.image_size
        return height // PATCH, width // PATCH + (self.layout == "lumina")

    @property
    def codebook_size(self) -> int:
        """V: the codes, and Lumina's end of line."""
        return self.codes + (self.layout == "lumina")

    @property
    def end_of_image(self) -> int:
        return self.codes + 4  # 8196

    @property
    def start_of_image(self) -> int:
        return self.codes + 5  # 8197

    @property
    def separator(self) -> int:
        return self.codes + 518  # 8710

    @property
    def end_of_line(self) -> int:
        return self.codes + 611  # 8803

    @property
    def last_id(self) -> int:
        """The largest id that a prompt or an image may have."""
        return max(self.separator, self.end_of_line + 1 + 2048 // GRID if self.layout == "lumina" else 0)

    @property
    def start(self) -> list[int]:
        """Ids before the first token: <boi>, and for Lumina the image's height and width."""
        width, height = self.image_size
        sides = [self.end_of_line + 1 + side // GRID for side in (height, width)]  # 8804 and on
        return [self.start_of_image, *(sides if self.layout == "lumina" else [])]

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ChameleonConfig:
        value = {key: entry for key, entry in value.items() if key not in ("architecture", "grid", "codebook_size")}
        try:
            return cls(**{**value, "transformer": TransformerConfig(**value["transformer"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"not the config of a Chameleon target: {error}") from None

    def to_json(self) -> dict[str, Any]:
        """With what follows from it, for those who only ask how large a target is."""
        derived = {"grid": self.grid, "codebook_size": self.codebook_size}
        return {"architecture": "chameleon", **asdict(self), **derived}


class Chameleon(nn.Module):
    """See `coolsd.interfaces.TargetModel` for the shapes of its methods.

    tokenizer: what has `encode(text, add_special_tokens=False).ids`, as a `tokenizers.Tokenizer`.
    """

    rope: Tensor
    vocabulary_ids: Tensor
    forced_tokens: Tensor
    image_tokenizer: Any

    def __init__(self, config: ChameleonConfig, tokenizer: Any, image_tokenizer: Any = None) -> None:
        super().__init__()
        self.config, self.tokenizer = config, tokenizer
        self.rows, self.columns = config.grid
        self.image_tokens = self.rows * self.columns
        self.codebook_size = config.codebook_size
        self.hidden_size = config.transformer.hidden_size
        self.layers: tuple[int, ...] = ()
        self.layer_count = config.transformer.layers
        self.fingerprint = "unsaved"
        self.folder: Path | None = None
        self.embedding = nn.Embedding(config.vocabulary, self.hidden_size)
        self.transformer = Transformer(config.transformer)
        self.lm_head = Linear(self.hidden_size, self.codebook_size)
        rope = line_rope(config.prompt_slots + self.image_tokens, config.transformer.head_dim, config.rope_base)
        forced = torch.full(config.grid, -1, device="cpu")  # on the CPU even where the weights are none yet
        if config.layout == "lumina":
            forced[:, -1] = config.codes
        self.register_buffer("rope", rope, persistent=False)
        self.register_buffer("vocabulary_ids", vocabulary_ids(config), persistent=False)
        self.register_buffer("forced_tokens", forced.flatten(), persistent=False)
        object.__setattr__(self, "image_tokenizer", image_tokenizer)  # not a part of this module's weights
        self._made: dict[str, tuple[Tensor, int, Tensor]] = {}

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.lm_head.weight.dtype

    @property
    def layout(self) -> Layout | None:
        return Layout(self.forced_tokens, self.config.codes) if self.config.layout == "lumina" else None

    def _apply(self, fn: Any, recurse: bool = True) -> Chameleon:
        rope = self.rope
        super()._apply(fn, recurse)
        self.rope = rope.to(self.rope.device)  # positions stay exact whatever the weights' dtype
        self._made.clear()
        if self.image_tokenizer is not None:
            self.image_tokenizer.to(self.rope.device)
        return self

    def _ids(self, caption: str) -> list[int]:
        """The prompt of a caption, <boi> and all that stands before the first image token included."""
        (width, height), words = self.config.image_size, caption
        if self.config.layout == "lumina":
            words = f"Generate an image of {width}x{height} according to the following prompt:\n{caption}"
        words = self.tokenizer.encode(words, add_special_tokens=False).ids
        return [BOS, *words, self.config.separator, *self.config.start]

    def problem(self, caption: str) -> str | None:
        return None if len(self._ids(caption)) <= self.config.prompt_slots else "too many tokens"

    def encode(self, captions: Sequence[str], guidance: bool) -> Prompt:
        """B captions -> prompt of the branches (caption, none) or (caption). Raises ValueError for one too long."""
        slots, none = self.config.prompt_slots, self.config.start
        if self.config.layout == "anole":
            none = [BOS, *none]
        prompts = []
        for row, caption in enumerate(captions):
            ids = self._ids(caption)
            if len(ids) > slots:
                raise ValueError(
                    f"caption {row} ({caption[:40]!r}) is {len(ids)} tokens with what stands around it, but the target "
                    f"has {slots} prompt slots; shorten it"
                )
            prompts.append([ids, none] if guidance else [ids])
        padded = [[[-1] * (slots - len(ids)) + ids for ids in branches] for branches in prompts]
        inputs = torch.tensor(padded, device=self.device)
        return Prompt(tuple(captions), inputs >= 0, {"ids": inputs.clamp(min=0)})

    def _output(
        self, x: Tensor, position: Tensor, mask: Tensor, branches: int, place: Tensor, logits_from: int = 0,
        cache: KVCache | None = None, flat: Tensor | None = None,
    ) -> TargetOutput:  # fmt: skip
        """place [B or 1, N]: where in the image the tokens stand whose logits these are."""
        shown = dict.fromkeys(self.layers, x)
        rope = self.rope[position.clamp(0, len(self.rope) - 1)]
        hidden = self.transformer(x, rope, mask, cache, flat, shown or None)
        logits = self.lm_head(hidden[:, logits_from:]).unflatten(0, (-1, branches))
        if self.layout is not None:
            logits = self.layout.constrain(logits, place)
        layers = {number: states.unflatten(0, (-1, branches)) for number, states in shown.items()}
        return TargetOutput(logits, hidden.unflatten(0, (-1, branches)), layers)

    def _padding(self, prompt: Prompt) -> Tensor:
        """Empty slots before each prompt, long [R, 1]."""
        return (~prompt.mask).sum(-1).view(-1, 1)

    def prefill(self, prompt: Prompt, tree_slots: int) -> tuple[TargetOutput, KVCache]:
        slots, mask = self.config.prompt_slots, prompt.mask.flatten(0, 1)
        cache = self.transformer.new_cache(len(mask), slots + self.image_tokens + tree_slots, mask)
        flat, bias = cache.place(slots)
        place = torch.arange(slots, device=mask.device)
        x = self.embedding(prompt.inputs["ids"].flatten(0, 1))
        output = self._output(
            x, place - self._padding(prompt), bias, prompt.branches, place[None, :1], slots - 1, cache, flat
        )
        cache.keep(None, torch.full_like(cache.length, slots), slots)
        return output, cache

    def score(self, tree: DraftTree, prompt: Prompt, cache: KVCache) -> TargetOutput:
        ancestors, depths = tree.places(prompt.branches)
        flat, bias = cache.place(tree.nodes, ancestors)
        slot = cache.length[:, None] + depths  # [R, N]
        x = self.embedding(self.vocabulary_ids[tree.tokens]).repeat_interleave(prompt.branches, 0)
        place = slot[:: prompt.branches] - self.config.prompt_slots + 1
        return self._output(x, slot - self._padding(prompt), bias, prompt.branches, place, 0, cache, flat)

    def forced(self, prompt: Prompt, tokens: Tensor) -> TargetOutput:
        slots, length = self.config.prompt_slots, tokens.shape[1]
        ids = self.vocabulary_ids[tokens].repeat_interleave(prompt.branches, 0)
        x = self.embedding(torch.cat([prompt.inputs["ids"].flatten(0, 1), ids], dim=1))
        mask = forced_mask(prompt.mask.flatten(0, 1), length)
        place = torch.arange(slots + length, device=x.device)
        position = place - self._padding(prompt)
        output = self._output(x, position, mask, prompt.branches, place[None, : length + 1], slots - 1)
        return replace(output, logits=output.logits[:, :, :-1])

    def image_ids(self, tokens: Tensor) -> Tensor:
        """tokens [B, T] -> ids [B, T + 2 or 4] of the checkpoint's vocabulary, from <boi> to <eoi>."""
        ids = self.vocabulary_ids[tokens]
        start = torch.tensor(self.config.start, device=ids.device).expand(len(ids), -1)
        return torch.cat([start, ids, torch.full_like(ids[:, :1], self.config.end_of_image)], dim=1)

    def encode_images(self, images: Tensor) -> Tensor:
        """Raises ValueError for images of another shape: as many codes, but another image."""
        width, height = self.config.image_size
        if images.shape[-1] * height != images.shape[-2] * width:
            raise ValueError(
                f"images are {images.shape[-1]} x {images.shape[-2]} pixels, but the target's are {width} x {height}; "
                "set the dataset's size to the target's"
            )
        codes = self.image_tokenizer.encode_images(images)
        if self.layout is None or codes.shape[1] != self.rows * (self.columns - 1):
            return codes
        lines = codes.unflatten(1, (self.rows, self.columns - 1))
        return F.pad(lines, (0, 1), value=self.config.codes).flatten(1)

    def decode_images(self, tokens: Tensor) -> Tensor:
        lines = tokens.unflatten(1, (self.rows, self.columns))
        if self.layout is not None:
            lines = lines[..., :-1]
        return self.image_tokenizer.decode_images(lines.flatten(1), (self.rows, lines.shape[-1]))

    def codebook(self) -> Tensor:
        """[V, D], the image tokenizer's codes; an end of line lies far from all. Raises ValueError without one."""
        if self.image_tokenizer is None:
            raise ValueError(
                f"target {self.fingerprint} has no image tokenizer, so no codebook; convert it with --tokenizer"
            )
        ends = self.codebook_size - self.config.codes
        raw = self.image_tokenizer.raw_codebook()
        return self._once("codebook", raw, lambda: F.pad(raw.detach(), (0, 0, 0, ends), value=FAR))

    def _once(self, name: str, weight: Tensor, make: Callable[[], Tensor]) -> Tensor:
        """Made of a weight once, until that is another or changes: who has seen the tensor knows it again."""
        source, before, made = self._made.get(name, (None, 0, weight))
        version = 0 if weight.is_inference() else weight._version
        if source is not weight or version != before:
            with torch.inference_mode(False):
                made = make()
            self._made[name] = weight, version, made
        return made

    def ends(self) -> dict[str, Tensor]:
        """What training a draft head needs of this target: the cache carries it, so `fit` never loads the target."""
        embedding = self.embedding.weight
        return {
            "embedding": self._once("embedding", embedding, lambda: embedding.detach()[self.vocabulary_ids]),
            "norm": cast(Tensor, self.transformer.norm.weight),
            "lm_head": self.lm_head.weight,
            "rope": self.rope,
        }

    @classmethod
    def load(cls, folder: Path, config: dict[str, Any]) -> Chameleon:
        """From Hugging Face's safetensors, tensor by tensor: no more than one of them is in memory twice."""
        own = ChameleonConfig.from_json(config)
        tokenizer, shards = read_tokenizer(folder / "tokenizer.json", own), Shards(folder)
        check_size(shards, own)
        with torch.device("meta"):
            model = cls(own, tokenizer)
        with as_told(folder):
            tensors = ours(shards.read, own)
        check_fits(model, tensors, folder)
        model.load_state_dict(tensors, assign=True)
        model.folder = folder
        return model


def vocabulary_ids(config: ChameleonConfig) -> Tensor:
    """Vocabulary ids of the V tokens of an image, long [V], on the CPU."""
    codes = torch.arange(FIRST_CODE, FIRST_CODE + config.codes, device="cpu")
    return F.pad(codes, (0, config.codebook_size - config.codes), value=config.end_of_line)


def read_tokenizer(path: Path, config: ChameleonConfig) -> Tokenizer:
    """The checkpoint's tokenizer; what looks like a special token in a caption is text.

    Raises ValueError where it is none, or an image code has another id than decoding counts on, or words have ids
    that the vocabulary has not.
    """
    if config.last_id >= config.vocabulary:
        raise ValueError(
            f"{path.parent}: {config.vocabulary} ids have no place for layout {config.layout} of {config.codes} codes, "
            f"which needs ids up to {config.last_id}; this is no Chameleon"
        )
    tokenizer = read_vocabulary(path, config.vocabulary)
    check_codes(tokenizer.token_to_id, config.codes, path)
    tokenizer.encode_special_tokens = True
    return tokenizer


def code_name(code: int) -> str:
    """What Chameleon's vocabulary calls a code: IMGIMG..Z, its digits written A to J."""
    return f"IMGIMG{str(code).translate(str.maketrans('0123456789', 'ABCDEFGHIJ'))}Z"


def check_codes(id_of: Callable[[str], int | None], codes: int, path: Path) -> None:
    """Where code n has an id, it must be n + 4."""
    for code in range(codes):
        if (found := id_of(code_name(code))) not in (None, code + FIRST_CODE):
            raise ValueError(
                f"{path}: image code {code} ({code_name(code)}) has id {found}, but Chameleon's is "
                f"{code + FIRST_CODE}; this is the vocabulary of another model"
            )


def check_size(shards: Shards, config: ChameleonConfig) -> None:
    """Before anything is made as large as a stranger's config tells."""
    found, told = list(shards.shape("model.embed_tokens.weight")), [config.vocabulary, config.transformer.hidden_size]
    if found != told:
        raise ValueError(f"{shards.folder}: model.embed_tokens.weight is {found}, but config.json tells of {told}")


def ours(read: Read, config: ChameleonConfig) -> dict[str, Tensor]:
    """Our names -> tensors, made of Chameleon's. What an image cannot contain of lm_head stays out."""
    head = read("lm_head.weight")
    if len(head) != config.vocabulary:
        raise ValueError(f"lm_head.weight is {list(head.shape)}, but the vocabulary has {config.vocabulary} ids")
    tensors = {
        "embedding.weight": read("model.embed_tokens.weight"),
        "transformer.norm.weight": read("model.norm.weight"),
        "lm_head.weight": head[vocabulary_ids(config)],
    }
    del head
    for layer in range(config.transformer.layers):
        tensors |= decoder_layer(read, f"model.layers.{layer}", f"transformer.layers.{layer}", config.transformer)
    return tensors


def decoder_layer(read: Read, theirs: str, name: str, shape: TransformerConfig) -> dict[str, Tensor]:
    """One layer's tensors by our names. Rotary pairs are put side by side; qk-norms stored per shard are repeated."""

    def turned(kind: str, heads: int) -> Tensor:
        return interleave(read(f"{theirs}.self_attn.{kind}_proj.weight"), heads)

    def norm(kind: str, heads: int, part: str) -> Tensor:
        stored = read(f"{theirs}.self_attn.{kind}_norm.{part}")
        if stored.ndim != 2 or not len(stored) or heads % len(stored):
            raise ValueError(
                f"{theirs}.self_attn.{kind}_norm.{part} is {list(stored.shape)}, but must be one row per head or per "
                f"shard of {heads} heads"
            )
        each = stored.repeat_interleave(heads // len(stored), 0)
        return interleave(each.flatten(), heads).view_as(each)

    queries, keys = ("q", shape.heads), ("k", shape.key_heads)
    gate, up = (read(f"{theirs}.mlp.{kind}_proj.weight") for kind in ("gate", "up"))
    values = read(f"{theirs}.self_attn.v_proj.weight")
    return {
        f"{name}.attention.qkv.weight": torch.cat([turned(*queries), turned(*keys), values]),
        **{
            f"{name}.attention.qk_norm.{part}": torch.cat([norm(*queries, part), norm(*keys, part)])
            for part in ("weight", "bias")
        },
        f"{name}.attention.output.weight": read(f"{theirs}.self_attn.o_proj.weight"),
        f"{name}.feed_forward.gate_up.weight": torch.cat([gate, up]),
        f"{name}.feed_forward.down.weight": read(f"{theirs}.mlp.down_proj.weight"),
        f"{name}.attention_norm.weight": read(f"{theirs}.input_layernorm.weight"),
        f"{name}.feed_forward_norm.weight": read(f"{theirs}.post_attention_layernorm.weight"),
    }
