"""What a training run tells its watcher beyond losses."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info

from coolsd.checkpoint import same_weights
from coolsd.decode import generate
from coolsd.drafters.chain import Chain
from coolsd.heads.checkpoint import show_layers
from coolsd.heads.eagle import make_head
from coolsd.results import half, summary, with_half
from coolsd.rules.relaxed import Vanilla
from coolsd.sampling import Sampling
from coolsd.targets import load_target
from training.strategies import whole_state

if TYPE_CHECKING:
    from training.draft import DraftTraining


class AcceptedLength(L.Callback):
    """Really decodes held-out captions with the head before and after training, and every so many epochs between (0 =
    never): a good loss alone proves nothing. The logger gets the length, its 95% interval and a grid of the pictures.

    Loads the target for each measurement; losslessly (vanilla), chain of 5, one batch of at most `captions` samples.
    """

    def __init__(self, target: str, captions: int, sampling: Sampling, epochs: int = 0) -> None:
        self.folder, self.captions, self.sampling, self.epochs = target, captions, sampling, epochs

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit" and not trainer.datamodule.held_out_captions(1):  # type: ignore[attr-defined]
            raise ValueError(
                f"model.captions is {self.captions}, but the data hold out no sample; "
                "raise --data.held_out, or set --model.captions 0"
            )

    def measure(self, trainer: L.Trainer, module: DraftTraining, when: str) -> None:
        """Called by all processes; the first one decodes."""
        trained, data = module.head, trainer.datamodule  # type: ignore[attr-defined]
        assert trained is not None
        state = whole_state(trained)
        if not trainer.is_global_zero:
            return
        dtype = trained.fc.weight.dtype
        ends = {name: state.get(name, getattr(trained, name)) for name in ("embedding", "lm_head", "rope")}
        head = make_head(trained.config, ends)
        head.load_state_dict(state)
        head = head.to(module.device, dtype).eval().requires_grad_(False).prepare()
        target = load_target(self.folder, str(module.device), dtype)
        if not same_weights(target.fingerprint, data.cache.settings.target):
            raise ValueError(
                f"the cache was extracted from {data.cache.settings.target}, but model.target is {target.fingerprint}"
            )
        show_layers(target, head.config.layers)
        captions = data.held_out_captions(self.captions)
        drawn = target.image_tokenizer is not None
        result = generate(target, captions, Chain(head), Vanilla(), self.sampling, decode_images=drawn)
        length = summary(result.accepted_length.tolist()) or {}
        words = f"vanilla, chain of 5, guidance {self.sampling.guidance:g}, {len(captions)} captions"
        rank_zero_info(f"accepted length {when} training: {with_half(length, 2)} ({words})")
        if trainer.logger is not None:
            found = {"accepted_length": length["mean"], "accepted_length_ci95": half(length) or 0.0}
            trainer.logger.log_metrics(found, trainer.global_step)
            if isinstance(trainer.logger, TensorBoardLogger) and result.images is not None:
                trainer.logger.experiment.add_images("decoded", result.images.cpu(), trainer.global_step)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.epochs and (trainer.current_epoch + 1) % self.epochs == 0:
            self.measure(trainer, pl_module, f"in epoch {trainer.current_epoch + 1} of")  # type: ignore[arg-type]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.measure(trainer, pl_module, "before")  # type: ignore[arg-type]

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.measure(trainer, pl_module, "after")  # type: ignore[arg-type]


class TokensPerSecond(L.Callback):
    """Image tokens that training gets through in a second, of all branches and processes: to the bar and the logger."""

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.began, self.tokens, self.step = time.perf_counter(), 0, trainer.global_step

    on_train_start = on_train_epoch_start  # a run that goes on amid an epoch
    on_validation_end = on_train_epoch_start  # that time is no training's

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        images = batch["token_ids"].shape[:2].numel() * trainer.world_size
        self.tokens += images * trainer.datamodule.cache.settings.image_tokens  # type: ignore[attr-defined]
        step = trainer.global_step  # the same for all batches that are accumulated
        if step != self.step and step % trainer.log_every_n_steps == 0:
            rate = self.tokens / (time.perf_counter() - self.began)
            pl_module.log("train/tokens_per_s", rate, prog_bar=True, batch_size=1)
            self.on_train_epoch_start(trainer, pl_module)


class Throughput(L.Callback):
    """Samples and tokens a second and what is on the disk already, of all processes, in the bar of an extraction.
    Where it breaks off, the cache's lock is let go of."""

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        if hasattr(pl_module, "writer"):
            pl_module.writer.release()

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.began, self.samples = time.monotonic(), 0

    def on_predict_batch_end(
        self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.samples += outputs["samples"] * trainer.world_size
        bar: Any = trainer.progress_bar_callback
        if isinstance(bar, RichProgressBar) and bar.progress is not None and bar.predict_progress_bar_id is not None:
            rate = self.samples / (time.monotonic() - self.began)
            tokens = rate * pl_module.settings.image_tokens * pl_module.settings.branches
            written = pl_module.writer.bytes_written / 1e9
            words = f"{rate:.1f} samples/s, {tokens:,.0f} tokens/s, {written:.2f} GB"
            bar.progress.update(bar.predict_progress_bar_id, description=words)
