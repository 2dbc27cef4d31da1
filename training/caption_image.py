"""Trains the network behind the emojis' own metrics: which caption belongs to which image.

Knows pictures and words; knows no target, no draft and no tokens.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coolsd.emoji_metrics import CaptionImageConfig, CaptionImageNetwork
from data.emoji.dataset import items
from training.target import caption_tokenizer
from training.tokenizer import HELD_OUT


def contrastive_loss(images: Tensor, captions: Tensor, scale: Tensor) -> Tensor:
    """Cross-entropy of finding each image's caption among all B, and each caption's image: [B, D] twice -> []."""
    similarity = scale * F.normalize(images, dim=-1) @ F.normalize(captions, dim=-1).mT
    own = torch.arange(len(images), device=images.device)
    return (F.cross_entropy(similarity, own) + F.cross_entropy(similarity.mT, own)) / 2


class CaptionImageTraining(L.LightningModule):
    """Data: `training.tokenizer.EmojiImagesModule`. The network lies in <run folder>/export after each validation."""

    def __init__(self, learning_rate: float = 2e-3, weight_decay: float = 0.05, features: int = 32) -> None:
        super().__init__()
        tokenizer = caption_tokenizer([item.caption for item in items("train", core=False)])
        self.network = CaptionImageNetwork(CaptionImageConfig(tokenizer.get_vocab_size(), features=features), tokenizer)
        self.log_scale = nn.Parameter(torch.tensor(math.log(10.0)))
        self.learning_rate, self.weight_decay = learning_rate, weight_decay

    def configure_optimizers(self) -> dict[str, Any]:
        if self.trainer.max_steps < 1:
            raise ValueError("trainer.max_steps is unlimited, but the learning rate falls to zero there; set it")
        optimizer = torch.optim.AdamW(self.parameters(), self.learning_rate, weight_decay=self.weight_decay)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.learning_rate, self.trainer.max_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def training_step(self, batch: dict[str, Any], batch_index: int) -> Tensor:
        scale = self.log_scale.exp().clamp(max=100)
        loss = contrastive_loss(self.network(batch["image"]), self.network.captions(batch["caption"]), scale)
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Any], batch_index: int, dataloader_idx: int = 0) -> None:
        """How often the right caption is the nearest of the batch's."""
        images, captions = self.network(batch["image"]), self.network.captions(batch["caption"])
        nearest = (F.normalize(images, dim=-1) @ F.normalize(captions, dim=-1).mT).argmax(-1)
        right = (nearest == torch.arange(len(nearest), device=nearest.device)).float().mean()
        name = f"right_caption/{HELD_OUT[dataloader_idx]}"
        self.log(name, right, add_dataloader_idx=False, prog_bar=True, batch_size=len(nearest), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        folder = self.trainer.log_dir or self.trainer.default_root_dir  # log_dir asks all processes
        if self.trainer.state.fn == "fit" and self.trainer.is_global_zero and not self.trainer.sanity_checking:
            self.network.save(Path(folder) / "export")
