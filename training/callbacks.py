"""What a training run tells its watcher beyond losses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_info, rank_zero_only

from coolsd.decode import generate
from coolsd.drafters.chain import Chain
from coolsd.rules.relaxed import Vanilla
from coolsd.sampling import Sampling
from coolsd.targets import load_target

if TYPE_CHECKING:
    from training.draft import DraftTraining


class AcceptedLength(L.Callback):
    """Really decodes held-out captions with the head before and after training: a good loss alone proves nothing.

    Loads the target when it is first needed; losslessly (vanilla), chain of 5, batch of all captions.
    """

    def __init__(self, target: str, captions: int, sampling: Sampling) -> None:
        self.folder, self.captions, self.sampling = target, captions, sampling
        self.target: Any = None

    @rank_zero_only
    def measure(self, trainer: L.Trainer, module: DraftTraining, when: str) -> None:
        if self.target is None:
            self.target = load_target(self.folder, str(module.device), "float32")
        cache = trainer.datamodule.cache  # type: ignore[attr-defined]
        if self.target.fingerprint != cache.settings.target:
            raise ValueError(
                f"the cache was extracted from {cache.settings.target}, but model.target is {self.target.fingerprint}"
            )
        captions = [cache[len(cache) - 1 - i].caption for i in range(min(self.captions, len(cache)))]
        head = module.head
        assert head is not None
        training = head.training
        result = generate(
            self.target, captions, Chain(head.eval()), Vanilla(), self.sampling, decode_images=False
        )  # fmt: skip
        head.train(training)
        length = result.accepted_length.mean().item()
        rank_zero_info(f"accepted length {when} training: {length:.2f} (vanilla, chain of 5, {len(captions)} captions)")
        if trainer.logger is not None:
            trainer.logger.log_metrics({"accepted_length": length}, trainer.global_step)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.measure(trainer, pl_module, "before")  # type: ignore[arg-type]

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.measure(trainer, pl_module, "after")  # type: ignore[arg-type]
