"""Trains an EAGLE-1 draft head on cached hidden states of a target. Never loads the target: the cache carries its ends.

slot      0 .. P-2   P-1     P      P+1         token -1 marks a caption slot, P-1 is the last of them
token     -1         -1      t0     t1
pair i    (token i+1, hidden i) -> hidden i+1   loss where token i+1 is an image token: the first such pair is
                                                (t0, hidden of the last caption slot), the first draft of an image
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor

from coolsd.heads.checkpoint import read_head, save_head
from coolsd.heads.eagle import EagleConfig, EagleHead
from coolsd.sampling import Sampling
from coolsd.transformer import TransformerConfig
from data.loader import pairs
from training.callbacks import AcceptedLength
from training.losses import acceptance_mass, feature_loss, masked_mean, soft_cross_entropy


def widened(head: EagleHead, intermediate_size: int) -> EagleHead:
    """The same function with a wider feed-forward: its new channels are random, but add nothing before training.

    Raises ValueError where it would be narrower.
    """
    old = head.config.transformer.intermediate_size
    if intermediate_size == old:
        return head
    if intermediate_size < old:
        raise ValueError(
            f"model.intermediate_size is {intermediate_size}, but the head of start_from has {old}; pass at least that"
        )
    transformer = replace(head.config.transformer, intermediate_size=intermediate_size)
    wider = EagleHead(replace(head.config, transformer=transformer), head.embedding, head.lm_head, head.rope)
    state = wider.state_dict()  # shares memory with the parameters
    for name, tensor in head.state_dict().items():
        if name.endswith("gate_up.weight"):
            state[name].unflatten(0, (2, -1))[:, :old] = tensor.unflatten(0, (2, -1))
        elif name.endswith("down.weight"):
            state[name].zero_()[:, :old] = tensor
        else:
            state[name].copy_(tensor)
    return wider


class DraftTraining(L.LightningModule):
    """loss = SmoothL1(hidden) + classification_weight * soft cross-entropy of each branch
    + guided_weight * soft cross-entropy of the guided distribution, the one that verification sees
    - acceptance_weight * sum min(p, q) of it, the acceptance itself (EAGLE-1: both 0).

    start_from: folder of a head to go on training, whose shape counts; a larger intermediate_size widens it.
    intermediate_size 0 = that head's, or 8/3 of the hidden size.
    guidance: that of decoding, for the acceptance and the guided loss.
    noise: uniform noise on the input hidden states, +- this many of their standard deviations. Learning rate: linear
    warm-up, then cosine to zero over the trainer's steps. target: folder of the target, loaded only to decode at most
    `captions` held-out captions before and after training (0 = never) and print their accepted length.
    """

    def __init__(
        self,
        layers: int = 1,
        intermediate_size: int = 0,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.01,
        warmup_steps: int = 50,
        classification_weight: float = 0.1,
        guided_weight: float = 0.0,
        acceptance_weight: float = 0.0,
        start_from: str | None = None,
        guidance: float = 1.0,
        noise: float = 0.1,
        target: str | None = None,
        captions: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.sampling = Sampling(guidance=guidance)
        self.head: EagleHead | None = None

    def setup(self, stage: str) -> None:
        if self.head is not None:
            return
        if getattr(self.trainer.strategy, "zero_stage_3", False):
            raise ValueError("ZeRO stage 3 would export a head without parameters; use DeepSpeed's stage 1 or 2")
        cache = self.trainer.datamodule.cache  # type: ignore[attr-defined]
        settings, ends = cache.settings, cache.ends()
        if self.sampling.branches != settings.branches:
            limit, unconditional = ("above 1", "false") if settings.branches == 2 else ("1", "true")
            raise ValueError(
                f"guidance {self.sampling.guidance} needs {self.sampling.branches} branches, but {cache.folder} has "
                f"{settings.branches}; set --model.guidance {limit}, or extract again with --model.guidance "
                f"{unconditional}"
            )
        ends = {name: tensor.float() for name, tensor in ends.items()}
        if self.hparams["start_from"] is not None:
            head = read_head(self.hparams["start_from"], ends, settings.target)
            self.head = widened(head, self.hparams["intermediate_size"] or head.config.transformer.intermediate_size)
            return
        size = settings.hidden_size
        config = EagleConfig(
            TransformerConfig(
                size,
                self.hparams["layers"],
                size // (2 * ends["rope"].shape[1]),
                self.hparams["intermediate_size"] or int(size * 8 / 3) // 32 * 32,
            ),
            settings.codebook_size,
            settings.prompt_slots,
            settings.image_tokens,
            target=settings.target,
            context=settings.context,
        )
        self.head = EagleHead(config, ends["embedding"], ends["lm_head"], ends["rope"])

    def configure_optimizers(self) -> OptimizerLRScheduler:
        optimizer = torch.optim.AdamW(
            [p for p in self.parameters() if p.requires_grad],
            lr=self.hparams["learning_rate"],
            betas=(0.9, 0.95),
            weight_decay=self.hparams["weight_decay"],
        )
        total = self.trainer.estimated_stepping_batches
        if math.isinf(total):
            raise ValueError(
                "trainer.max_steps and trainer.max_epochs are both unlimited; the schedule needs one of them"
            )
        warmup = max(1, self.hparams["warmup_steps"])

        def factor(step: int) -> float:
            return min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / total)))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _losses(self, predicted: Tensor, goal: Tensor, trained: Tensor, branches: int) -> dict[str, Tensor]:
        assert self.head is not None
        start = int(trained.any(0).float().argmax())  # caption slots have no loss: no logits for them
        predicted, goal, trained = predicted[:, start:], goal[:, start:], trained[:, start:]
        logits, goal_logits = self.head.logits(predicted), self.head.logits(goal)
        losses = {
            "feature": masked_mean(feature_loss(predicted, goal), trained),
            "classification": masked_mean(soft_cross_entropy(logits, goal_logits), trained),
        }
        draft = self.sampling.guided(logits.unflatten(0, (-1, branches)))
        target = self.sampling.guided(goal_logits.unflatten(0, (-1, branches)))
        both = trained.unflatten(0, (-1, branches)).all(1)
        if self.hparams["guided_weight"]:
            losses["guided"] = masked_mean(soft_cross_entropy(draft, target), both)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.hparams["acceptance_weight"] != 0):
            mass = acceptance_mass(draft.float().softmax(-1), target.float().softmax(-1))
            losses["acceptance"] = masked_mean(mass, both)
        return losses

    def _step(self, batch: dict[str, Any], stage: str) -> Tensor:
        assert self.head is not None
        branches = batch["hidden"].shape[1]
        rows = {name: value.flatten(0, 1) for name, value in pairs(batch).items()}  # R = B * G rows
        tokens, hidden, goal, trained = rows["token_ids"], rows["hidden"], rows["target_hidden"], rows["loss"]
        causal = torch.ones(hidden.shape[1], hidden.shape[1], dtype=torch.bool, device=hidden.device).tril()
        mask = (causal & rows["seen"][:, None] | torch.eye(len(causal), dtype=torch.bool, device=hidden.device))[
            :, None
        ]
        if stage == "train" and self.hparams["noise"]:
            hidden = hidden + (2 * torch.rand_like(hidden) - 1) * self.hparams["noise"] * hidden.std()
        rope = self.head.rope[None, 1 : 1 + hidden.shape[1]]
        predicted = self.head(tokens, hidden, rope, mask, context=rows.get("context"))
        losses = self._losses(predicted, goal, trained, branches)
        loss = losses["feature"] + self.hparams["classification_weight"] * losses["classification"]
        loss = loss + self.hparams["guided_weight"] * losses.get("guided", 0.0)
        if self.hparams["acceptance_weight"]:
            loss = loss - self.hparams["acceptance_weight"] * losses["acceptance"]
        for name, value in {"loss": loss, **losses}.items():
            bar = name in ("loss", "acceptance")
            self.log(
                f"{stage}/{name}", value, prog_bar=bar, batch_size=batch["hidden"].shape[0], sync_dist=stage != "train"
            )  # fmt: skip
        if not torch.isfinite(loss):
            raise ValueError(f"loss is {loss.item()} at step {self.global_step}; lower model.learning_rate")
        return loss

    def training_step(self, batch: dict[str, Any], batch_index: int) -> Tensor:
        return self._step(batch, "train")

    def validation_step(self, batch: dict[str, Any], batch_index: int) -> None:
        self._step(batch, "val")

    def test_step(self, batch: dict[str, Any], batch_index: int) -> None:
        self._step(batch, "test")

    def configure_callbacks(self) -> list[L.Callback]:
        if not self.hparams["captions"]:
            return []
        if self.hparams["target"] is None:
            raise ValueError(
                f"model.captions is {self.hparams['captions']}, which needs model.target, the target's folder"
            )
        return [AcceptedLength(self.hparams["target"], self.hparams["captions"], self.sampling)]

    def on_train_end(self) -> None:
        if self.trainer.is_global_zero:
            self.export(Path(self.trainer.default_root_dir) / "export" / "draft")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert self.head is not None
        checkpoint["eagle"] = self.head.config.to_json()  # `coolsd export` needs no cache

    def export(self, folder: Path) -> str:
        assert self.head is not None
        return save_head(self.head, folder)
