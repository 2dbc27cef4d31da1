"""LlamaGen's VQ image tokenizer.  Knows pixels and token ids; knows nothing of captions or transformers.

Module names equal the published state_dict, so official weights load strictly.
"""

from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coolsd.checkpoint import save_checkpoint


@dataclass(frozen=True)
class LlamaGenVQConfig:
    """LlamaGen's settings, and two of ours for small models; their defaults are LlamaGen.

    patch_size: pixels are unshuffled before the encoder and shuffled after the decoder.
    norm_groups: with 32 groups of one or two channels, normalisation would erase each image's own colours.
    """

    image_size: int = 256
    codebook_size: int = 16384
    codebook_embed_dim: int = 8
    l2_norm: bool = True
    z_channels: int = 256
    channels: int = 128
    channel_multipliers: tuple[int, ...] = (1, 1, 2, 2, 4)
    num_res_blocks: int = 2
    patch_size: int = 1
    norm_groups: int = 32

    def __post_init__(self) -> None:
        object.__setattr__(self, "channel_multipliers", tuple(self.channel_multipliers))  # JSON and YAML give lists
        for field in fields(self):
            value = getattr(self, field.name)
            numbers = value if isinstance(value, tuple) and value else (value,)
            if field.name != "l2_norm" and not all(type(number) is int and number > 0 for number in numbers):
                raise ValueError(f"image tokenizer config: {field.name} is {value!r}, but must be positive integers")
        if self.num_res_blocks > 64 or len(self.channel_multipliers) > 16:
            raise ValueError(
                f"image tokenizer config: {self.num_res_blocks} blocks on each of "
                f"{len(self.channel_multipliers)} levels, but must be at most 64 on 16"
            )
        if self.channels % self.norm_groups:
            raise ValueError(f"channels is {self.channels}, not a multiple of norm_groups {self.norm_groups}")
        if self.image_size % self.downsampling:
            raise ValueError(f"image_size {self.image_size} is not a multiple of the downsampling {self.downsampling}")

    @property
    def downsampling(self) -> int:
        return self.patch_size * 2 ** (len(self.channel_multipliers) - 1)

    @property
    def grid(self) -> tuple[int, int]:
        side = self.image_size // self.downsampling
        return side, side


def group_norm(channels: int, groups: int) -> nn.GroupNorm:
    return nn.GroupNorm(groups, channels, eps=1e-6)


class ResBlock(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, groups: int) -> None:
        super().__init__()
        self.norm1 = group_norm(in_channels, groups)
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.norm2 = group_norm(out_channels, groups)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1)
        if in_channels != out_channels:
            self.nin_shortcut = nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return h + (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x)


class AttnBlock(nn.Module):
    """Single-head self-attention over all positions."""

    def __init__(self, channels: int, groups: int) -> None:
        super().__init__()
        self.norm = group_norm(channels, groups)
        self.q = nn.Conv2d(channels, channels, 1)
        self.k = nn.Conv2d(channels, channels, 1)
        self.v = nn.Conv2d(channels, channels, 1)
        self.proj_out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (f(h).flatten(2).transpose(1, 2).unsqueeze(1) for f in (self.q, self.k, self.v))  # [B, 1, h*w, C]
        mixed = F.scaled_dot_product_attention(q, k, v)
        return x + self.proj_out(mixed.squeeze(1).transpose(1, 2).reshape(x.shape))


class Downsample(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))  # right and bottom only, as in VQGAN


class Upsample(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Level(nn.Module):
    """Residual blocks at one resolution, each followed by attention at the coarsest, then a change of resolution."""

    def __init__(self, in_channels: int, out_channels: int, groups: int, blocks: int, attention: bool) -> None:
        super().__init__()
        inputs = [in_channels] + [out_channels] * (blocks - 1)
        self.res = nn.ModuleList(ResBlock(width, out_channels, groups) for width in inputs)
        self.attn = nn.ModuleList(AttnBlock(out_channels, groups) for _ in range(blocks if attention else 0))

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.res):
            x = block(x)
            if self.attn:
                x = self.attn[i](x)
        for name in ("downsample", "upsample"):
            x = getattr(self, name)(x) if hasattr(self, name) else x
        return x


def middle(channels: int, groups: int) -> nn.ModuleList:
    before, after = ResBlock(channels, channels, groups), ResBlock(channels, channels, groups)
    return nn.ModuleList([before, AttnBlock(channels, groups), after])


class Encoder(nn.Module):
    def __init__(self, config: LlamaGenVQConfig) -> None:
        super().__init__()
        widths = [config.channels * m for m in config.channel_multipliers]
        last = len(widths) - 1
        self.conv_in = nn.Conv2d(3 * config.patch_size**2, config.channels, 3, padding=1)
        self.conv_blocks = nn.ModuleList()
        for i, (before, width) in enumerate(zip([config.channels, *widths], widths, strict=False)):
            level = Level(before, width, config.norm_groups, config.num_res_blocks, attention=i == last)
            if i < last:
                level.downsample = Downsample(width)
            self.conv_blocks.append(level)
        self.mid = middle(widths[-1], config.norm_groups)
        self.norm_out = group_norm(widths[-1], config.norm_groups)
        self.conv_out = nn.Conv2d(widths[-1], config.z_channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for layer in [*self.conv_blocks, *self.mid]:
            x = layer(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class Decoder(nn.Module):
    """`conv_blocks[0]` is the coarsest level."""

    def __init__(self, config: LlamaGenVQConfig) -> None:
        super().__init__()
        widths = [config.channels * m for m in reversed(config.channel_multipliers)]
        last = len(widths) - 1
        self.conv_in = nn.Conv2d(config.z_channels, widths[0], 3, padding=1)
        self.mid = middle(widths[0], config.norm_groups)
        self.conv_blocks = nn.ModuleList()
        for i, (before, width) in enumerate(zip([widths[0], *widths], widths, strict=False)):
            level = Level(before, width, config.norm_groups, config.num_res_blocks + 1, attention=i == 0)
            if i < last:
                level.upsample = Upsample(width)
            self.conv_blocks.append(level)
        self.norm_out = group_norm(widths[-1], config.norm_groups)
        self.conv_out = nn.Conv2d(widths[-1], 3 * config.patch_size**2, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.conv_in(z)
        for layer in [*self.mid, *self.conv_blocks]:
            x = layer(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class Quantizer(nn.Module):
    """Nearest code; with `l2_norm`, vectors and codes are compared (and returned) on the unit sphere."""

    def __init__(self, config: LlamaGenVQConfig) -> None:
        super().__init__()
        self.l2_norm = config.l2_norm
        self.embedding = nn.Embedding(config.codebook_size, config.codebook_embed_dim)
        nn.init.uniform_(self.embedding.weight, -1.0 / config.codebook_size, 1.0 / config.codebook_size)

    def codebook(self) -> Tensor:
        """[K, C]"""
        weight = self.embedding.weight
        return F.normalize(weight, dim=-1) if self.l2_norm else weight

    def normalise(self, z: Tensor) -> Tensor:
        """[B, C, h, w] -> same shape, on the unit sphere if `l2_norm`."""
        return F.normalize(z, dim=1) if self.l2_norm else z

    def nearest(self, z: Tensor) -> Tensor:
        """[B, C, h, w], already normalised -> indices [B, h*w], long."""
        flat = z.flatten(2).transpose(1, 2)
        codes = self.codebook()
        return (codes.pow(2).sum(-1) - 2 * flat @ codes.T).argmin(-1)  # |z|^2 is the same for all codes

    def lookup(self, indices: Tensor, grid: tuple[int, int]) -> Tensor:
        """[B, h*w] -> [B, C, h, w]"""
        return F.embedding(indices, self.codebook()).transpose(1, 2).unflatten(2, grid)


class LlamaGenVQ(nn.Module):
    fingerprint = "unsaved"

    def __init__(self, config: LlamaGenVQConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        self.quantize = Quantizer(config)
        self.quant_conv = nn.Conv2d(config.z_channels, config.codebook_embed_dim, 1)
        self.post_quant_conv = nn.Conv2d(config.codebook_embed_dim, config.z_channels, 1)

    def raw_codebook(self) -> Tensor:
        """[K, C] as stored, whatever `l2_norm`."""
        return self.quantize.embedding.weight

    def embed(self, images: Tensor) -> Tensor:
        """Images [B, 3, H, W] in -1..1 -> vectors before quantisation [B, C, h, w]."""
        return self.quant_conv(self.encoder(F.pixel_unshuffle(images, self.config.patch_size)))

    def encode(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Images [B, 3, H, W] in -1..1 -> quantised [B, C, h, w], indices [B, h*w] long (row-major)."""
        z = self.quantize.normalise(self.embed(images))
        indices = self.quantize.nearest(z)
        return self.quantize.lookup(indices, (z.shape[2], z.shape[3])), indices

    def decode(self, quantised: Tensor) -> Tensor:
        """[B, C, h, w] -> images [B, 3, H, W], about -1..1, not clamped."""
        return F.pixel_shuffle(self.decoder(self.post_quant_conv(quantised)), self.config.patch_size)

    def decode_code(self, indices: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        """Indices [B, h*w] -> images [B, 3, H, W], about -1..1, not clamped."""
        return self.decode(self.quantize.lookup(indices, grid or self.config.grid))

    @torch.no_grad()
    def encode_images(self, images: Tensor) -> Tensor:
        """uint8 [B, 3, H, W] -> indices [B, h*w]"""
        weight = self.quant_conv.weight
        return self.encode(images.to(weight.device).to(weight.dtype) / 127.5 - 1)[1]

    @torch.no_grad()
    def decode_images(self, indices: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        """Indices [B, h*w] -> uint8 [B, 3, H, W]"""
        images = self.decode_code(indices.to(self.quant_conv.weight.device), grid)
        return ((images.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)

    def save(self, folder: str | Path) -> str:
        """Writes a checkpoint folder and returns its fingerprint."""
        return save_checkpoint(Path(folder), {"type": "llamagen_vq", **asdict(self.config)}, self.state_dict())
