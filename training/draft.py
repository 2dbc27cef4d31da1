"""Trains a draft head, EAGLE-1's or one that reads several layers, on cached hidden states of a target.  Never loads
the target: the cache carries its ends.

slot      0 .. P-2   P-1     P      P+1         token -1 marks a caption slot, P-1 is the last of them
token     -1         -1      t0     t1
pair i    (token i+1, hidden i) -> hidden i+1   loss where token i+1 is an image token: the first such pair is
                                                (t0, hidden of the last caption slot), the first draft of an image
"""

from __future__ import annotations

import math
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import lightning as L
import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torchmetrics import CatMetric

from coolsd.checkpoint import same_weights, sha256, write_json
from coolsd.heads.checkpoint import read_head, save_head
from coolsd.heads.eagle import EagleConfig, EagleHead, MultiLayerHead, make_head
from coolsd.interfaces import AcceptanceRule
from coolsd.results import environment, source_state
from coolsd.sampling import Sampling, counter_bits
from coolsd.targets import free_memory
from coolsd.transformer import TransformerConfig
from data.features import CacheSettings
from data.loader import pairs
from training.callbacks import AcceptedLength, TokensPerSecond
from training.losses import acceptance_mass, feature_loss, masked_mean, soft_cross_entropy
from training.memory import training_bytes
from training.rollout import RolloutCache, depth_mask, shifted, shifted_mask
from training.strategies import made_whole, whole_state

DEPTHS = 5  # of a chain, that validation measures


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
    wider = type(head)(replace(head.config, transformer=transformer), head.embedding, head.lm_head, head.rope)
    state = wider.state_dict()  # shares memory with the parameters
    for name, tensor in head.state_dict().items():
        if name.endswith("gate_up.weight"):
            state[name].unflatten(0, (2, -1))[:, :old] = tensor.unflatten(0, (2, -1))
        elif name.endswith("down.weight"):
            state[name].zero_()[:, :old] = tensor
        else:
            state[name].copy_(tensor)
    return wider


class Goal(NamedTuple):
    """What the target says at the places that draft, first to last: hidden [R, K, H], probs [R, K, V] of each branch,
    guided [B, K, V], the distribution that verification sees."""

    hidden: Tensor
    probs: Tensor
    guided: Tensor


class DraftTraining(L.LightningModule):
    """loss = feature_weight * SmoothL1(hidden) + classification_weight * soft cross-entropy of each branch
    + guided_weight * soft cross-entropy of the guided distribution, the one that verification sees
    - acceptance_weight * sum min(q, w p) of it, the acceptance itself (EAGLE-1: both 0); w = 1, or by `relaxation`.
    rollout: depths, of which all but the first read the head's own predictions, as a chain does (EAGLE-1: 1); depth s
    counts rollout_decay ** s. relaxation: a rule with a schedule, such as coolsd.CoolSD, whose acceptance is wanted.
    eagle1_steps: optimizer steps that come first, on EAGLE-1's two losses at one depth: an untrained head gains nothing
    from the others.

    start_from: folder of a head to go on training, whose shape counts; a larger intermediate_size widens it.
    intermediate_size 0 = that head's, or 8/3 of the hidden size.
    guidance: that of decoding, for the acceptance and the guided loss.
    noise: uniform noise on the input hidden states, +- this many of their standard deviations, a function of (seed,
    epoch, sample); EAGLE-1's own is +- 0.1 * 512 / slots of the row, whatever the size of the states.
    Learning rate: linear warm-up, then cosine or linear `decay` to zero over the trainer's steps.
    compile: torch.compile the head's layers. gradient_checkpointing: compute logits again instead of keeping them.
    target: folder of the target, loaded only to decode at most `captions` held-out captions (0 = never) before and
    after training, and every `decode_every` epochs (0 = never), and print their accepted length.
    An average of the weights: Lightning's EMAWeightAveraging callback.
    """

    def __init__(
        self,
        layers: int = 1,
        intermediate_size: int = 0,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.01,
        warmup_steps: int = 50,
        feature_weight: float = 1.0,
        classification_weight: float = 0.1,
        guided_weight: float = 0.0,
        acceptance_weight: float = 0.0,
        rollout: int = 1,
        rollout_decay: float = 1.0,
        eagle1_steps: int = 0,
        relaxation: AcceptanceRule | None = None,
        start_from: str | None = None,
        guidance: float = 1.0,
        noise: float = 0.1,
        decay: Literal["cosine", "linear"] = "cosine",
        compile: bool = False,
        gradient_checkpointing: bool = False,
        target: str | None = None,
        captions: int = 0,
        decode_every: int = 0,
    ) -> None:
        super().__init__()
        self.seed = 0
        if not 1 <= rollout <= 16:
            raise ValueError(f"rollout is {rollout} depths, but must be 1 to 16")
        if not 0 < rollout_decay <= 1:
            raise ValueError(f"rollout_decay is {rollout_decay}, but must be in (0, 1]")
        if eagle1_steps < 0:
            raise ValueError(f"eagle1_steps is {eagle1_steps}, but must be >= 0")
        self.save_hyperparameters(ignore=["relaxation"])
        self.measures: list[dict[str, Tensor]] = []  # of a validation batch, depth by depth: name -> [B]
        self.of_samples, self.measured = CatMetric(), [""]  # [samples, names], and the names
        self.schedule = None if relaxation is None else relaxation.schedule(max(DEPTHS, rollout))
        self.sampling = Sampling(guidance=guidance)
        self.head: EagleHead | None = None

    def configure_model(self) -> None:
        """Make or read the head; callbacks that average weights call it before the strategy does."""
        if self.head is not None:
            return
        sharded = getattr(self.trainer.strategy, "zero_stage_3", False)
        if sharded and any(isinstance(callback, WeightAveraging) for callback in self.trainer.callbacks):  # type: ignore[attr-defined]
            raise ValueError("ZeRO stage 3 shares out the weights that are to be averaged; use stage 2, or ddp")
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
        self.seed = int(os.environ.get("PL_GLOBAL_SEED", 0))
        with made_whole(sharded):
            if self.hparams["start_from"] is not None:
                head = read_head(self.hparams["start_from"], ends, settings.target)
                if head.config.text or head.config.pairing != "next":
                    raise ValueError(
                        f"{self.hparams['start_from']} reads captions by their tokens, or pairs states with the tokens "
                        "before them, as published heads do: training would make another function of it; leave out "
                        "model.start_from to train a head from scratch"
                    )
                self._check_cache(head.config, self.hparams["start_from"], settings)
                width = self.hparams["intermediate_size"] or head.config.transformer.intermediate_size
                self.head = widened(head, width)
            else:
                self.head = self._new_head(settings, ends)
        if self.hparams["compile"]:
            self.head.transformer.compile_shapes()

    def _check_cache(self, config: EagleConfig, origin: str, settings: CacheSettings) -> None:
        """Raises ValueError, naming `origin`, where a head of this kind cannot be trained on such a cache."""
        folder = self.trainer.datamodule.cache.folder  # type: ignore[attr-defined]
        for name, ours, theirs in (
            ("target", config.target, settings.target),
            ("hidden_size", config.transformer.hidden_size, settings.hidden_size),
            ("layers", config.layers, settings.layers),
            ("context", config.context, settings.context),
        ):
            if ours != theirs and not (name == "target" and same_weights(config.target, settings.target)):
                raise ValueError(
                    f"{origin} is a head with {name} {ours!r}, but {folder} has {theirs!r}; extract features for "
                    "it, or train another head"
                )

    def _new_head(self, settings: CacheSettings, ends: dict[str, Tensor]) -> EagleHead:
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
            layers=settings.layers,
        )
        return make_head(config, ends)

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
            done = min(1.0, step / total)
            left = 0.5 * (1 + math.cos(math.pi * done)) if self.hparams["decay"] == "cosine" else 1 - done
            return min(1.0, (step + 1) / warmup) * left

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _goal(self, hidden: Tensor, branches: int) -> Goal:
        """hidden [R, N, H]: what a perfect head would predict at the pairs."""
        assert self.head is not None
        hidden = hidden[:, self.head.config.prompt_slots - 1 :]  # caption slots have no loss: no logits for them
        with torch.no_grad():
            logits = self.head.logits(hidden)
            guided = self.sampling.guided(logits.unflatten(0, (-1, branches)))
            return Goal(hidden, logits.float().softmax(-1), guided.float().softmax(-1))

    def _losses(self, predicted: Tensor, goal: Goal, trained: Tensor, depth: int) -> dict[str, Tensor]:
        """Means over the trained places of the losses and measures at one depth (0-based)."""
        assert self.head is not None
        start = self.head.config.prompt_slots - 1 + depth
        predicted, trained, goal = predicted[:, start:], trained[:, start:], Goal(*(each[:, depth:] for each in goal))
        branches = len(goal.probs) // len(goal.guided)
        logits = self.head.logits(predicted)
        draft = self.sampling.guided(logits.unflatten(0, (-1, branches)))
        both = trained.unflatten(0, (-1, branches)).all(1)
        losses = {
            "feature": masked_mean(feature_loss(predicted, goal.hidden), trained),
            "classification": masked_mean(soft_cross_entropy(logits, goal.probs), trained),
        }
        if self.hparams["guided_weight"] and not self._eagle1():
            losses["guided"] = masked_mean(soft_cross_entropy(draft, goal.guided), both)
        learns, wanted = torch.is_grad_enabled(), self.hparams["acceptance_weight"] != 0 and not self._eagle1()
        if wanted or not learns or (depth == 0 and self._shown()):
            with torch.set_grad_enabled(learns and wanted):
                q = draft.float().softmax(-1)
                measures = {"acceptance": acceptance_mass(q, goal.guided)}
                if self.schedule is not None:
                    measures["relaxed"] = acceptance_mass(q, float(self.schedule[depth]) * goal.guided)
                if not learns:
                    best = goal.guided.argmax(-1, keepdim=True)
                    for k in (1, 3):
                        measures[f"top{k}"] = (draft.topk(k).indices == best).any(-1).float()
                    count = both.sum(-1).clamp(min=1)
                    self.measures.append({name: (value * both).sum(-1) / count for name, value in measures.items()})
                losses |= {name: masked_mean(value, both) for name, value in measures.items()}
        return losses

    def _step(self, batch: dict[str, Any], stage: str) -> Tensor:
        assert self.head is not None
        branches = batch["hidden"].shape[1]
        rows = {name: value.flatten(0, 1) for name, value in pairs(batch).items()}  # R = B * G rows
        tokens, hidden, trained = rows["token_ids"], rows["hidden"], rows["loss"]
        if isinstance(self.head, MultiLayerHead):
            hidden = self.head.join(rows["layers"])
        if stage == "train" and self.hparams["noise"]:
            noise = self._noise(batch["index"], *(x.unflatten(0, (-1, branches)) for x in (hidden, rows["seen"])))
            hidden = hidden + self.hparams["noise"] * noise.flatten(0, 1)
        rope = self.head.rope[None, 1 : 1 + hidden.shape[1]]
        cache = RolloutCache(self.head.config.transformer.layers)
        flat = torch.empty(0, device=hidden.device)  # for a real cache
        trained_depths = 1 if self._eagle1() else self.hparams["rollout"]
        depths = trained_depths if stage == "train" else max(DEPTHS, trained_depths)
        goal = self._goal(rows["target_hidden"], branches)
        loss, weights, found = torch.zeros((), device=hidden.device), 0.0, []
        for depth in range(depths):
            mask = depth_mask(rows["seen"], depth)
            predicted = self.head(tokens, hidden, rope, mask, cache, flat, rows.get("context"))  # type: ignore[arg-type]
            arguments = predicted, goal, shifted_mask(trained, depth), depth
            again = self.hparams["gradient_checkpointing"] and torch.is_grad_enabled()
            losses = checkpoint(self._losses, *arguments, use_reentrant=False) if again else self._losses(*arguments)
            hidden = shifted(predicted, hidden)
            found.append(losses)
            if depth < trained_depths:
                weight = self.hparams["rollout_decay"] ** depth
                loss, weights = loss + weight * self._weighed(losses), weights + weight
        loss = loss / weights
        if not torch.isfinite(loss):  # the one host sync of a step, before it spoils the weights
            which = batch["index"].tolist()
            raise ValueError(
                f"loss is {loss.item()} at step {self.global_step}, samples {which}; lower model.learning_rate, and go "
                "on from the last checkpoint"
            )
        self._report({"loss": loss, **found[0]}, found, stage, len(batch["hidden"]))
        if stage != "train":
            kept = self._told(self.measures[0], self.measures)
            self.measured, self.measures = list(kept), []
            self.of_samples.update(torch.stack(list(kept.values()), -1))
        return loss

    @torch.no_grad()
    def _noise(self, index: Tensor, hidden: Tensor, seen: Tensor) -> Tensor:
        """Uniform in +- one standard deviation of each sample's hidden [B, G, N, H] (padding aside: seen [B, G, N]), of
        the same shape: a function of (seed, epoch, sample), so the same however samples are shared out."""
        size = hidden[0].numel()
        bits = counter_bits(self.seed, index, self.current_epoch, 1, -(-size // 4))[0]
        chance = bits.view(torch.int16)[:, :size].view_as(hidden) / 2**15  # four of them in 64 bits, each in [-1, 1)
        held, axes = seen[..., None], (1, 2, 3)
        count = held.sum(axes, keepdim=True) * hidden.shape[-1]
        mean = (hidden * held).sum(axes, keepdim=True) / count
        deviation = (((hidden - mean) * held).pow(2).sum(axes, keepdim=True) / count).sqrt()
        return chance * deviation

    def _weighed(self, losses: dict[str, Tensor]) -> Tensor:
        loss = self.hparams["feature_weight"] * losses["feature"]
        loss = loss + self.hparams["classification_weight"] * losses["classification"]
        loss = loss + self.hparams["guided_weight"] * losses.get("guided", 0.0)
        if self.hparams["acceptance_weight"] and not self._eagle1():
            loss = loss - self.hparams["acceptance_weight"] * losses.get("relaxed", losses["acceptance"])
        return loss

    @staticmethod
    def _told(values: dict[str, Tensor], depths: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        """values, the first depth's; the acceptance of every depth, given that those before passed; and the accepted
        length that follows: 1 + a_1 + a_1 a_2 + ..., vanilla and with the recipe's relaxation. Tensors of one shape."""
        values = dict(values)
        for name, length in (("acceptance", "accepted_length"), ("relaxed", "relaxed_length")):
            if name in depths[0]:
                masses = torch.stack([losses[name] for losses in depths])
                values |= {f"{name}_{depth}": mass for depth, mass in enumerate(masses[1:], start=2)}
                values[length] = 1 + masses.cumprod(0).sum(0)
        return values

    def _report(self, values: dict[str, Tensor], depths: list[dict[str, Tensor]], stage: str, samples: int) -> None:
        values = values if stage == "train" else self._told(values, depths)
        shown = self._shown()
        for name, value in values.items():
            if stage == "train" and shown and self._trainer is not None:  # processes wait only where it is looked at
                value = self.trainer.strategy.reduce(value.detach(), reduce_op="mean")
            bar = name in ("loss", "acceptance")
            self.log(f"{stage}/{name}", value, prog_bar=bar, batch_size=samples, sync_dist=stage != "train")

    def _eagle1(self) -> bool:
        """Whether training is still on EAGLE-1's losses alone."""
        return self.training and self.global_step < self.hparams["eagle1_steps"]

    def _shown(self) -> bool:
        """Whether someone looks at this step."""
        return self._trainer is None or (self.global_step + 1) % self.trainer.log_every_n_steps == 0

    def training_step(self, batch: dict[str, Any], batch_index: int) -> Tensor:
        loss = self._step(batch, "train")
        if self._trainer is not None and isinstance(self.trainer.strategy, DeepSpeedStrategy):
            return loss * self.trainer.accumulate_grad_batches  # Lightning divides by it, and DeepSpeed once more
        return loss

    def validation_step(self, batch: dict[str, Any], batch_index: int) -> None:
        self._step(batch, "val")

    def test_step(self, batch: dict[str, Any], batch_index: int) -> None:
        self._step(batch, "test")

    def on_validation_epoch_end(self, stage: str = "val") -> None:
        """Half-widths of 95% intervals over samples: of a length those of the samples' own lengths."""
        found = self.of_samples.compute()
        halves = 1.96 * found.std(0) / math.sqrt(len(found)) if len(found) > 1 else found.new_zeros(len(self.measured))
        for name, half in zip(self.measured, halves, strict=True):
            self.log(f"{stage}/{name}_ci95", half, sync_dist=True)
        self.of_samples.reset()

    def on_test_epoch_end(self) -> None:
        self.on_validation_epoch_end("test")

    def on_fit_start(self) -> None:
        """Refuses what cannot fit. run.json: on what the run was made and of what; config.yaml beside it says how."""
        self._check_memory()
        logger, cache = self.trainer.logger, self.trainer.datamodule.cache  # type: ignore[attr-defined]
        if self.trainer.is_global_zero and logger is not None and logger.log_dir is not None:
            features = {**asdict(cache.settings), "folder": str(cache.folder), "kept": len(cache)}
            manifest = Path(cache.folder) / "manifest.json"  # has the hash of every file; a running target has none
            features["sha256"] = sha256(manifest) if manifest.exists() else None
            dtype = next(self.parameters()).dtype
            about = {"environment": environment(self.device, dtype), "source": source_state(), "features": features}
            write_json(Path(logger.log_dir) / "run.json", about)

    def _check_memory(self) -> None:
        assert self.head is not None
        data, chosen = self.trainer.datamodule, self.hparams  # type: ignore[attr-defined]
        if hasattr(next(self.head.parameters()), "ds_id"):
            return  # ZeRO stage 3 has its share of the weights only
        acceptance, again = chosen["acceptance_weight"] != 0, chosen["gradient_checkpointing"]
        branches, width = data.cache.settings.branches, 4 if self.trainer.precision.startswith("32") else 2
        needed = training_bytes(self.head, data.batch_size, branches, chosen["rollout"], acceptance, again, width)
        if self.device.type == "cpu":
            needed *= self.trainer.num_devices  # processes of this machine
        free = free_memory(self.device)
        if needed > 1.25 * free:  # the estimate is good to a fifth
            remedy = "" if again else ", or set --model.gradient_checkpointing true"
            raise ValueError(
                f"a step of {data.batch_size} samples takes about {needed / 1e9:.1f} GB, but {self.device} has about "
                f"{free / 1e9:.1f} GB free; lower --data.batch_size{remedy}"
            )

    def configure_callbacks(self) -> list[L.Callback]:
        if not self.hparams["captions"]:
            return [TokensPerSecond()]
        if self.hparams["target"] is None:
            raise ValueError(
                f"model.captions is {self.hparams['captions']}, which needs model.target, the target's folder"
            )
        wanted = (self.hparams[name] for name in ("target", "captions"))
        return [TokensPerSecond(), AcceptedLength(*wanted, self.sampling, self.hparams["decode_every"])]

    def on_train_end(self) -> None:
        assert self.head is not None
        state = whole_state(self.head)  # of all processes
        if self.trainer.is_global_zero:
            save_head(self.head, Path(self.trainer.default_root_dir) / "export" / "draft", state)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raises ValueError, before the checkpoint replaces another one, where a weight is not finite."""
        assert self.head is not None
        # of weights that ZeRO-3 shares out, the own share
        held = ((name, getattr(weight, "ds_tensor", weight)) for name, weight in self.named_parameters())
        if broken := [name for name, weight in held if not weight.isfinite().all()]:
            raise ValueError(
                f"{broken[0]} is not finite after step {self.global_step}, so no checkpoint is written; lower "
                "model.learning_rate, and go on from the last one"
            )
        checkpoint["eagle"] = self.head.config.to_json()  # `coolsd export` needs no cache
        if "averaging_state" in checkpoint and isinstance(self.trainer.strategy, DeepSpeedStrategy):
            checkpoint["average"] = checkpoint["state_dict"]  # DeepSpeed writes its own in that place

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Raises ValueError where the checkpoint is of another kind of head, or of another target's."""
        if "eagle" not in checkpoint:
            raise ValueError(
                "the checkpoint holds no draft head; --ckpt_path takes one of training.draft.DraftTraining"
            )
        config = EagleConfig.from_json(checkpoint["eagle"])
        self._check_cache(config, "the checkpoint", self.trainer.datamodule.cache.settings)  # type: ignore[attr-defined]
        if self.head is not None and config.transformer != self.head.config.transformer:
            theirs, ours = (asdict(shape) for shape in (config.transformer, self.head.config.transformer))
            named = ", ".join(f"{key} {theirs[key]} (here {ours[key]})" for key in ours if theirs[key] != ours[key])
            raise ValueError(
                f"the checkpoint's head has {named}; pass the recipe it was trained with, or its --model.layers and "
                "--model.intermediate_size"
            )
        if "average" in checkpoint:
            checkpoint["state_dict"] = checkpoint["average"]
            if not self.trainer.training:  # DeepSpeed has read the last step's weights; a look is at the average
                self.load_state_dict(checkpoint["average"])
