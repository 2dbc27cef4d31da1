"""Trains a small image tokenizer from scratch: pixels, codes and losses.  Knows nothing of captions or targets."""

import math
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning import LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.image import PeakSignalNoiseRatio

from coolsd.checkpoint import load_strictly
from coolsd.image_tokenizers import LlamaGenVQ, LlamaGenVQConfig, load_image_tokenizer
from data.emoji.dataset import EmojiImages
from data.loader import EpochSampler
from training.muon import Muon

HELD_OUT = ("novel", "combo")


def reconstruction_loss(decoded: Tensor, images: Tensor, mse: float, l1: float, edges: float) -> Tensor:
    """Both [B, 3, H, W] in -1..1.  `edges` weighs L1 on gradients at three scales and on the pooled images."""
    difference = decoded - images  # gradients and pooling are linear: apply them to the difference
    loss = mse * difference.square().mean() + l1 * difference.abs().mean()
    for scale in range(3):
        if scale:
            difference = F.avg_pool2d(difference, 2)
            loss = loss + edges * difference.abs().mean()
        loss = loss + edges * (difference.diff(dim=-1).abs().mean() + difference.diff(dim=-2).abs().mean())
    return loss


class TimedTraining(LightningModule):
    """A training that ends at trainer.max_steps or after max_minutes, whichever is first: a busy machine still ends
    its schedule. Learning rate: warm-up, flat, then cosine down to `least` of it. The clock goes on across a resume."""

    learning_rate: float
    warmup_steps: int
    max_minutes: float
    flat_fraction = 0.0
    least: float

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def on_fit_start(self) -> None:
        if self.trainer.max_steps < 0 and math.isinf(self.max_minutes):
            raise ValueError("trainer.max_steps and model.max_minutes are both unlimited; set one of them")

    def progress(self) -> float:
        """0 to 1, by steps or by minutes, whichever is further."""
        return max(self.global_step / self.trainer.max_steps, self.seconds / 60 / self.max_minutes)

    def on_train_batch_start(self, batch: dict[str, Any], batch_index: int) -> None:
        self.started = time.monotonic()
        falling = min(1.0, max(0.0, (self.progress() - self.flat_fraction) / (1 - self.flat_fraction)))
        cosine = self.least + (1 - self.least) * 0.5 * (1 + math.cos(math.pi * falling))
        warm = min(1.0, (self.global_step + 1) / max(1, self.warmup_steps))
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = self.learning_rate * cosine * warm

    def on_train_batch_end(self, outputs: Any, batch: dict[str, Any], batch_index: int) -> None:
        seconds = self.seconds + time.monotonic() - self.started
        self.seconds = self.trainer.strategy.broadcast(seconds)  # one clock: all processes stop at the same step
        if self.progress() >= 1:
            self.trainer.should_stop = True

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seconds"] = self.seconds

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seconds = checkpoint["seconds"]


class TokenizerTraining(TimedTraining):
    """The first steps run unquantised; then codes start as encoder outputs and dead ones are restarted.

    With `decoder_only` the tokens of `start_from` stay what they are.
    """

    least = 0.01

    def __init__(
        self,
        tokenizer: LlamaGenVQConfig,
        learning_rate: float = 1.5e-3,
        weight_decay: float = 0.01,
        warmup_steps: int = 50,
        max_minutes: float = math.inf,
        unquantised_steps: int = 60,
        restart_every: int = 50,
        restart_until: float = 0.6,
        commitment: float = 0.25,
        mse: float = 4.0,
        l1: float = 0.2,
        edges: float = 0.2,
        start_from: Path | None = None,
        decoder_only: bool = False,
    ) -> None:
        super().__init__()
        if decoder_only and start_from is None:
            raise ValueError("decoder_only needs start_from, the tokenizer whose tokens it keeps")
        self.tokenizer = LlamaGenVQ(tokenizer)
        if start_from is not None:
            load_strictly(self.tokenizer, load_image_tokenizer(start_from).state_dict(), start_from)
        self.decoder_only = decoder_only
        if decoder_only:
            for part in (self.tokenizer.encoder, self.tokenizer.quant_conv, self.tokenizer.quantize):
                part.requires_grad_(False)
        self.learning_rate, self.weight_decay, self.warmup_steps = learning_rate, weight_decay, warmup_steps
        self.max_minutes, self.unquantised_steps = max_minutes, unquantised_steps
        self.restart_every, self.restart_until, self.commitment = restart_every, restart_until, commitment
        self.loss_weights = {"mse": mse, "l1": l1, "edges": edges}
        self.register_buffer("hits", torch.zeros(tokenizer.codebook_size), persistent=False)  # since the last restart
        self.register_buffer("held_out_hits", torch.zeros(tokenizer.codebook_size), persistent=False)
        self.psnr = nn.ModuleDict({name: PeakSignalNoiseRatio(data_range=1.0) for name in HELD_OUT})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        named = [(name, weight) for name, weight in self.tokenizer.named_parameters() if weight.requires_grad]
        inner = [name for name, w in named if w.ndim == 4 and not name.endswith(("conv_in.weight", "conv_out.weight"))]
        groups = [
            {"params": [weight for name, weight in named if (name in inner) == bool(muon)], "muon": muon}
            for muon in (0.4, 0)  # +1.7 dB over AdamW alone after 250 steps of batch 8 (one run each)
        ]
        return Muon(groups, lr=self.learning_rate, betas=(0.9, 0.99), weight_decay=self.weight_decay)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        images = batch["image"] / 127.5 - 1
        if self.decoder_only:
            with torch.no_grad():
                quantised, vq_loss = self.tokenizer.encode(images)[0], images.new_zeros(())
        else:
            quantised, vq_loss = self.quantise(images)
        decoded = self.tokenizer.decode(quantised)
        loss = reconstruction_loss(decoded, images, **self.loss_weights)
        error = F.mse_loss(decoded.detach().clamp(-1, 1), images) / 4
        self.log_dict({"train/loss": loss, "train/vq": vq_loss, "train/psnr": -10 * error.log10()}, prog_bar=True)
        return loss + vq_loss

    def quantise(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """[B, 3, H, W] -> codes with straight-through gradient [B, C, h, w], codebook and commitment loss []."""
        quantiser = self.tokenizer.quantize
        z = quantiser.normalise(self.tokenizer.embed(images))
        if self.global_step < self.unquantised_steps:
            return z, z.new_zeros(())
        vectors = z.detach().transpose(0, 1).flatten(1).T  # [B*h*w, C]
        if self.global_step == self.unquantised_steps:
            self.replace_codes(torch.arange(len(self.hits)), vectors)
        elif self.global_step % self.restart_every == 0:
            if self.progress() < self.restart_until:
                self.replace_codes((self.hits == 0).nonzero().squeeze(1), vectors)
            self.hits.zero_()
        with torch.no_grad():
            indices = quantiser.nearest(z)
        codes = quantiser.lookup(indices, (z.shape[2], z.shape[3]))
        self.hits += torch.bincount(indices.flatten(), minlength=len(self.hits))
        vq_loss = F.mse_loss(codes, z.detach()) + self.commitment * F.mse_loss(z, codes.detach())
        return z + (codes - z).detach(), vq_loss

    @torch.no_grad()
    def replace_codes(self, which: Tensor, vectors: Tensor) -> None:
        """which [n] code ids, vectors [M, C] encoder outputs of this batch.  All processes take the first's codes."""
        chosen = vectors[torch.randint(len(vectors), (len(which),), device=vectors.device)]
        noise = torch.randn_like(chosen) * 0.01  # two codes from one background pixel must differ
        weight = self.tokenizer.quantize.embedding.weight
        weight[which.to(vectors.device)] = F.normalize(chosen + noise, dim=-1)
        weight.copy_(self.trainer.strategy.broadcast(weight.detach().cpu()))

    def on_validation_epoch_start(self) -> None:
        self.held_out_hits.zero_()

    def validation_step(self, batch: dict[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        name = HELD_OUT[dataloader_idx]
        indices = self.tokenizer.encode_images(batch["image"])
        decoded = self.tokenizer.decode_images(indices)
        self.held_out_hits += torch.bincount(indices.flatten(), minlength=len(self.hits))
        self.psnr[name].update(decoded / 255, batch["image"] / 255)
        self.log(f"psnr/{name}", self.psnr[name], add_dataloader_idx=False, prog_bar=True)
        if batch_idx == 0 and self.logger is not None:
            pairs = torch.cat([batch["image"][:8], decoded[:8]], dim=2)  # the original above its reconstruction
            self.logger.experiment.add_images(f"reconstruction/{name}", pairs, self.global_step)

    def on_validation_epoch_end(self) -> None:
        share = self.held_out_hits / self.held_out_hits.sum().clamp(min=1)
        perplexity = torch.special.entr(share).sum().exp()
        used = (self.held_out_hits > 0).sum().float()
        self.log_dict({"codes/used": used, "codes/perplexity": perplexity, "minutes": self.seconds / 60}, prog_bar=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        self.export()

    def on_train_end(self) -> None:
        self.export()

    def export(self) -> None:
        """config.json and model.safetensors in <run folder>/export."""
        folder = self.trainer.log_dir or self.trainer.default_root_dir  # log_dir asks all processes
        if self.trainer.state.fn == "fit" and self.trainer.is_global_zero:
            self.tokenizer.save(Path(folder) / "export")


class EmojiSampler(EpochSampler):
    """A process's share of an epoch's permutation; the images draw their jitter anew with each epoch."""

    def __init__(self, images: EmojiImages, seed: int, trainer: Trainer | None) -> None:
        rank, world_size = (trainer.global_rank, trainer.world_size) if trainer else (0, 1)
        super().__init__(len(images), seed, rank, world_size)
        self.images = images

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.images.set_epoch(epoch)


class EmojiImagesModule(LightningDataModule):
    """Emoji with every name for training; core names on held-out combinations and renderings for validation."""

    def __init__(self, batch_size: int = 32, held_out_images: int = 256, seed: int = 0) -> None:
        super().__init__()
        self.batch_size, self.held_out_images, self.seed = batch_size, held_out_images, seed

    def train_dataloader(self) -> DataLoader:
        dataset = EmojiImages(split="train", core=False, seed=self.seed)
        sampler = EmojiSampler(dataset, self.seed, self.trainer)
        return DataLoader(dataset, self.batch_size, sampler=sampler, drop_last=True)

    def val_dataloader(self) -> list[DataLoader]:
        sets = [EmojiImages(split=name, core=True, seed=self.seed, limit=self.held_out_images) for name in HELD_OUT]
        return [DataLoader(dataset, self.batch_size) for dataset in sets]
