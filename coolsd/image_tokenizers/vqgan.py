"""Chameleon's VQGAN image tokenizer (taming-transformers' architecture).  Knows pixels and codes; knows no vocabulary.

Module names equal those of Meta's vqgan.ckpt, and of `model.vqmodel.` in a Hugging Face folder, so published weights
load strictly. Pixels are x / 255 * 2 - 1, and truncated on the way back, as in Meta's code, not as in transformers'
processor; cutting an image to size is the dataset's matter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coolsd.checkpoint import save_checkpoint
from coolsd.image_tokenizers.llamagen_vq import AttnBlock, Downsample, ResBlock, Upsample, group_norm

GROUPS = 32
PARTS = ("encoder.", "decoder.", "quantize.", "quant_conv.", "post_quant_conv.")  # of a checkpoint; else losses


@dataclass(frozen=True)
class VQGANConfig:
    """Defaults are Chameleon's. attention: resolution levels, the finest being 0, whose blocks attend."""

    codebook_size: int = 8192
    codebook_embed_dim: int = 256
    z_channels: int = 256
    channels: int = 128
    channel_multipliers: tuple[int, ...] = (1, 1, 2, 2, 4)
    num_res_blocks: int = 2
    attention: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("channel_multipliers", "attention"):  # JSON gives lists
            if not isinstance(getattr(self, name), (list, tuple)):
                raise ValueError(f"image tokenizer config: {name} is {getattr(self, name)!r}, but must be a list")
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for field in fields(self):
            value = getattr(self, field.name)
            numbers = value if isinstance(value, tuple) else (value,)
            if not all(type(n) is int and n >= (field.name != "attention") for n in numbers) or value == ():
                if field.name == "attention" and value == ():
                    continue
                raise ValueError(f"image tokenizer config: {field.name} is {value!r}, but must be positive integers")
        if self.num_res_blocks > 64 or len(self.channel_multipliers) > 16:
            raise ValueError(
                f"image tokenizer config: {self.num_res_blocks} blocks on each of "
                f"{len(self.channel_multipliers)} levels, but must be at most 64 on 16"
            )
        if self.channels % GROUPS:
            raise ValueError(f"channels is {self.channels}, not a multiple of {GROUPS}, the groups that are normalised")

    @property
    def widths(self) -> list[int]:
        return [self.channels * multiplier for multiplier in self.channel_multipliers]


class Level(nn.Module):
    """Residual blocks at one resolution, each followed by attention where the level attends, then `change` of it."""

    def __init__(
        self, inputs: int, outputs: int, blocks: int, attention: bool, change: nn.Module | None, name: str
    ) -> None:
        super().__init__()
        widths = [inputs] + [outputs] * (blocks - 1)
        self.block = nn.ModuleList(ResBlock(width, outputs, GROUPS) for width in widths)
        self.attn = nn.ModuleList(AttnBlock(outputs, GROUPS) for _ in range(blocks if attention else 0))
        self.change = name
        if change is not None:
            self.add_module(name, change)

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.block):
            x = block(x)
            if self.attn:
                x = self.attn[index](x)
        return getattr(self, self.change)(x) if hasattr(self, self.change) else x


class Middle(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.block_1 = ResBlock(channels, channels, GROUPS)
        self.attn_1 = AttnBlock(channels, GROUPS)
        self.block_2 = ResBlock(channels, channels, GROUPS)

    def forward(self, x: Tensor) -> Tensor:
        return self.block_2(self.attn_1(self.block_1(x)))


class Encoder(nn.Module):
    def __init__(self, config: VQGANConfig) -> None:
        super().__init__()
        widths = config.widths
        self.conv_in = nn.Conv2d(3, config.channels, 3, padding=1)
        self.down = nn.ModuleList()
        for level, (before, width) in enumerate(zip([config.channels, *widths], widths, strict=False)):
            change = Downsample(width) if level + 1 < len(widths) else None
            attends = level in config.attention
            self.down.append(Level(before, width, config.num_res_blocks, attends, change, "downsample"))
        self.mid = Middle(widths[-1])
        self.norm_out = group_norm(widths[-1], GROUPS)
        self.conv_out = nn.Conv2d(widths[-1], config.z_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for level in self.down:
            x = level(x)
        return self.conv_out(F.silu(self.norm_out(self.mid(x))))


class Decoder(nn.Module):
    """`up[0]` is the finest level, and the last to run."""

    def __init__(self, config: VQGANConfig) -> None:
        super().__init__()
        widths = config.widths
        self.conv_in = nn.Conv2d(config.z_channels, widths[-1], 3, padding=1)
        self.mid = Middle(widths[-1])
        self.up = nn.ModuleList()
        for level, (before, width) in enumerate(zip([*widths[1:], widths[-1]], widths, strict=True)):
            change = Upsample(width) if level else None
            attends = level in config.attention
            self.up.append(Level(before, width, config.num_res_blocks + 1, attends, change, "upsample"))
        self.norm_out = group_norm(widths[0], GROUPS)
        self.conv_out = nn.Conv2d(widths[0], 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.mid(self.conv_in(z))
        for level in reversed(self.up):
            x = level(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class VQGAN(nn.Module):
    fingerprint = "unsaved"

    def __init__(self, config: VQGANConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.quantize = nn.Module()
        self.quantize.embedding = nn.Embedding(config.codebook_size, config.codebook_embed_dim)
        self.quant_conv = nn.Conv2d(config.z_channels, config.codebook_embed_dim, 1)
        self.post_quant_conv = nn.Conv2d(config.codebook_embed_dim, config.z_channels, 1)

    def raw_codebook(self) -> Tensor:
        """[K, C]"""
        return self.quantize.embedding.weight  # type: ignore[union-attr, return-value]

    def embed(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W] in -1..1 -> vectors before quantisation [B, C, h, w]."""
        return self.quant_conv(self.encoder(images))

    def encode(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W] in -1..1 -> the nearest codes, long [B, h, w]."""
        latent = self.embed(images)
        flat, codes = latent.movedim(1, -1).flatten(0, 2), self.raw_codebook()
        # |z|^2 does not tell codes apart, but Meta's code adds it, and so rounds alike
        distance = flat.pow(2).sum(-1, keepdim=True) + codes.pow(2).sum(-1) - 2 * flat @ codes.T
        return distance.argmin(-1).view(len(latent), *latent.shape[2:])

    def decode(self, codes: Tensor) -> Tensor:
        """Codes [B, h, w] -> images [B, 3, H, W], about -1..1, not clamped."""
        return self.decoder(self.post_quant_conv(F.embedding(codes, self.raw_codebook()).movedim(-1, 1)))

    @torch.no_grad()
    def encode_images(self, images: Tensor) -> Tensor:
        """uint8 [B, 3, H, W] -> codes [B, h * w]"""
        weight = self.quant_conv.weight
        return self.encode(images.to(weight.device).to(weight.dtype) / 255 * 2 - 1).flatten(1)

    @torch.no_grad()
    def decode_images(self, codes: Tensor, grid: tuple[int, int]) -> Tensor:
        """Codes [B, h * w] of a grid (h, w) -> uint8 [B, 3, H, W]"""
        images = self.decode(codes.to(self.quant_conv.weight.device).unflatten(1, grid))
        return ((images.float().clamp(-1, 1) + 1) / 2 * 255).to(torch.uint8)

    def save(self, folder: Path) -> str:
        """Writes a checkpoint folder and returns its fingerprint."""
        return save_checkpoint(folder, {"type": "vqgan", **asdict(self.config)}, self.state_dict())


def own_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of the tokenizer, out of a checkpoint that may hold its losses or a whole Chameleon, by Meta's names."""
    short = {name.removeprefix("model.vqmodel."): tensor for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in short.items() if name.startswith(PARTS)}


def config_of(tensors: Mapping[str, Tensor]) -> VQGANConfig:
    """Read off the tensors' names and shapes, which tell all that vqgan.yaml does. Raises KeyError or ValueError where
    they are no VQGAN's."""
    widths: list[int] = []
    while (name := f"encoder.down.{len(widths)}.block.0.conv1.weight") in tensors:
        widths.append(len(tensors[name]))
    channels = len(tensors["encoder.conv_in.weight"])
    codes, dimensions = tensors["quantize.embedding.weight"].shape
    return VQGANConfig(
        codes,
        dimensions,
        len(tensors["encoder.conv_out.weight"]),
        channels,
        tuple(width // channels for width in widths),
        sum(f"encoder.down.0.block.{block}.conv1.weight" in tensors for block in range(16)),
        tuple(level for level in range(len(widths)) if f"encoder.down.{level}.attn.0.q.weight" in tensors),
    )
