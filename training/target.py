"""Trains a small LlamaGen target from captioned images: how the embedded default was made.

Knows the target and its frozen image tokenizer; knows no draft and no acceptance rule.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import DataLoader

from coolsd.checkpoint import load_strictly
from coolsd.decode import generate
from coolsd.image_tokenizers import load_image_tokenizer
from coolsd.interfaces import Prompt, Round
from coolsd.sampling import Sampling
from coolsd.targets import load_target
from coolsd.targets.captions import WordEncoder
from coolsd.targets.llamagen import LlamaGen, LlamaGenConfig
from coolsd.transformer import TransformerConfig
from data.emoji.dataset import EmojiImages, items
from training.muon import Muon
from training.tokenizer import EmojiSampler, TimedTraining


def caption_tokenizer(captions: list[str]) -> Tokenizer:
    """One id per lower-case word of the captions; unknown words share one."""
    tokenizer = Tokenizer(models.WordLevel(unk_token="[unknown]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(
        captions, trainers.WordLevelTrainer(special_tokens=["[unknown]"], show_progress=False)
    )
    return tokenizer


def negative_log_likelihood(target: LlamaGen, prompt: Prompt, tokens: Tensor) -> Tensor:
    """Nats per token of each image and branch: tokens [B, T] -> float32 [B, G]."""
    logits = target.forced(prompt, tokens).logits.float()
    labels = tokens[:, None].expand(-1, prompt.branches, -1)
    return F.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none").view(labels.shape).mean(-1)


def deepen(shallow: dict[str, Tensor], layers: int, deep_layers: int) -> dict[str, Tensor]:
    """Weights of a deeper model that computes the same function: every old block is followed by new ones that copy it
    but add nothing (output and down projections zero). deep_layers must be a multiple of layers."""
    if deep_layers % layers:
        raise ValueError(f"cannot grow {layers} layers to {deep_layers}: not a multiple")
    times = deep_layers // layers
    deep = {key: value for key, value in shallow.items() if not key.startswith("transformer.layers.")}
    for key, value in shallow.items():
        if key.startswith("transformer.layers."):
            _, _, index, rest = key.split(".", 3)
            for copy in range(times):
                silent = copy > 0 and rest in ("attention.output.weight", "feed_forward.down.weight")
                name = f"transformer.layers.{int(index) * times + copy}.{rest}"
                deep[name] = torch.zeros_like(value) if silent else value.clone()
    return deep


class EmojiCaptions(L.LightningDataModule):
    """Captioned core emojis: jittered training combinations, held-out combinations for validation.

    smallest: pixels; the less the jitter, the sooner the target knows an emoji by heart.
    """

    def __init__(self, batch_size: int = 16, held_out_images: int = 64, seed: int = 0, smallest: int = 60) -> None:
        super().__init__()
        self.batch_size, self.held_out_images, self.seed, self.smallest = batch_size, held_out_images, seed, smallest

    def images(self, split: str, seed: int, limit: int | None = None) -> EmojiImages:
        return EmojiImages(split, core=True, seed=seed, limit=limit, smallest=self.smallest)

    def train_dataloader(self) -> DataLoader:
        dataset = self.images("train", self.seed)
        sampler = EmojiSampler(dataset, self.seed, self.trainer)
        return DataLoader(dataset, self.batch_size, sampler=sampler, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.images("combo", self.seed, self.held_out_images), self.batch_size)

    def test_dataloader(self) -> DataLoader:
        """Training captions in a jitter that training did not draw in its first pass."""
        self.test_images = self.images("train", self.seed + 1)
        order = torch.randperm(len(self.test_images), generator=torch.Generator().manual_seed(0))
        return DataLoader(self.test_images, self.batch_size, sampler=order[: self.held_out_images].tolist())


class TargetTraining(TimedTraining):
    """Next-token cross-entropy on image tokens, with 10% of the captions replaced by the null caption.

    tokenizer: folder of the frozen image tokenizer. start_from: folder of a trained target to continue from, or to grow
    from if it has fewer layers.
    """

    least = 0.02

    def __init__(
        self,
        tokenizer: str = "checkpoints/emoji/tokenizer",
        start_from: str | None = None,
        hidden_size: int = 256,
        layers: int = 12,
        heads: int = 4,
        intermediate_size: int = 704,
        caption_dim: int = 256,
        prompt_slots: int = 16,
        sketch_rank: int = 32,
        sketch_reach: int = 6,
        caption_dropout: float = 0.1,
        learning_rate: float = 2e-3,
        weight_decay: float = 0.05,
        warmup_steps: int = 40,
        flat_fraction: float = 0.4,
        guidance: float = 1.25,
        max_minutes: float = math.inf,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate, self.warmup_steps, self.max_minutes = learning_rate, warmup_steps, max_minutes
        self.flat_fraction = flat_fraction
        image_tokenizer = load_image_tokenizer(tokenizer)
        captions = sorted({item.caption for split in ("train", "combo", "novel") for item in items(split, core=True)})
        words = caption_tokenizer(captions)
        config = LlamaGenConfig(
            transformer=TransformerConfig(hidden_size, layers, heads, intermediate_size),
            codebook_size=image_tokenizer.config.codebook_size,
            grid=image_tokenizer.config.grid,
            prompt_slots=prompt_slots,
            caption_dim=caption_dim,
            words=words.get_vocab_size(),
            sketch_rank=sketch_rank,
            sketch_reach=sketch_reach,
        )
        self.target = LlamaGen(config, WordEncoder(words, config.words, caption_dim), image_tokenizer)
        self._initialize()
        if start_from is not None:
            old = load_target(start_from, device="cpu", dtype="float32")
            load_strictly(self.target, deepen(old.state_dict(), old.config.transformer.layers, layers), start_from)

    def _initialize(self) -> None:
        layers = self.hparams["layers"]
        for name, parameter in self.target.named_parameters():
            if parameter.ndim == 2 and not name.startswith(("null_caption", "sketch")):
                scale = math.sqrt(2 * layers) if name.endswith(("output.weight", "down.weight")) else 1.0
                torch.nn.init.normal_(parameter, std=0.02 / scale)
        torch.nn.init.normal_(
            self.target.caption_encoder.embedding.weight, std=1 / math.sqrt(self.hparams["caption_dim"])
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        named = [(name, p) for name, p in self.target.named_parameters() if p.requires_grad]
        matrices = [p for name, p in named if name.startswith("transformer.layers.") and p.ndim == 2]
        others = [p for name, p in named if not (name.startswith("transformer.layers.") and p.ndim == 2)]
        groups = [{"params": matrices, "muon": 0.2}, {"params": others, "muon": 0}]
        decay = self.hparams["weight_decay"]
        return Muon(groups, lr=self.learning_rate, betas=(0.9, 0.95), weight_decay=decay)

    def training_step(self, batch: dict[str, Any], batch_index: int) -> Tensor:
        with torch.no_grad():
            tokens = self.target.encode_images(batch["image"])
        chance = torch.rand(self.trainer.world_size, tokens.shape[0], device=self.device)[self.global_rank]
        branch = (chance < self.hparams["caption_dropout"]).long()
        loss = negative_log_likelihood(
            self.target, self.target.encode(batch["caption"], True).choose(branch), tokens
        ).mean()
        if not torch.isfinite(loss):
            raise ValueError(f"loss is {loss.item()} at step {self.global_step}; lower model.learning_rate")
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Any], batch_index: int) -> None:
        tokens = self.target.encode_images(batch["image"])
        prompt = self.target.encode(batch["caption"], True)
        conditional, unconditional = negative_log_likelihood(self.target, prompt, tokens).mean(0)
        self.log("val/nats_per_token", conditional, prog_bar=True, batch_size=tokens.shape[0])
        self.log("val/caption_gap", unconditional - conditional, prog_bar=True, batch_size=tokens.shape[0])

    def on_validation_epoch_end(self) -> None:
        """Draw held-out captions, note the entropy of what they were drawn from, keep the newest export of a fit."""
        if self.trainer.sanity_checking:
            return
        held_out = EmojiImages("combo", core=True, limit=24)
        captions = [held_out[i]["caption"] for i in range(len(held_out))]
        sampling = Sampling(guidance=self.hparams["guidance"])
        entropies: list[Tensor] = []

        def note(turn: Round) -> None:
            entropies.append(torch.special.entr(turn.target_probs).sum(-1).mean())

        result = generate(self.target, captions, sampling=sampling, observer=note)
        self.log("val/guided_entropy", torch.stack(entropies).mean())
        if self.logger is not None and result.images is not None:
            self.logger.experiment.add_images("combo", result.images, self.global_step)  # type: ignore[attr-defined]
        if self.trainer.state.fn == "fit" and self.trainer.is_global_zero:
            self.export(Path(self.trainer.default_root_dir) / "export" / "target")

    def export(self, folder: Path) -> None:
        self.target.save(folder, torch.bfloat16)  # measured: costs no likelihood

    def test_step(self, batch: dict[str, Any], batch_index: int) -> None:
        """Which of 32 captions on the same background is the image most likely under? (`coolsd test`)"""
        dataset = self.trainer.datamodule.test_images  # type: ignore[attr-defined]
        for image, index in zip(batch["image"], batch["index"].tolist(), strict=True):
            own = dataset.items[index]
            others = [item.caption for item in dataset.items if item.background == own.background and item != own]
            generator = torch.Generator().manual_seed(index)
            chosen = [others[i] for i in torch.randperm(len(others), generator=generator)[:31].tolist()]
            tokens = self.target.encode_images(image[None]).expand(32, -1)
            nats = negative_log_likelihood(self.target, self.target.encode([own.caption, *chosen], False), tokens)
            self.log("test/right_caption", float(nats[:, 0].argmin() == 0), batch_size=1)
