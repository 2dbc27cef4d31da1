"""DeepSpeed on CPU, for tests and small machines.  On GPU, Lightning's own `deepspeed_stage_2` and the like do.

Knows Lightning's strategy and what of it insists on CUDA; knows no model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DeepSpeedStrategy
from torch import Tensor, nn


class DeepSpeedCPUStrategy(DeepSpeedStrategy):
    """ZeRO on CPU processes, over gloo: `trainer.accelerator: cpu`, `trainer.devices`: number of processes.

    Args:
        stage: 2 (shards the optimizer's state and gradients) or 3 (weights too).
        bucket_size: Elements reduced at once; small models need little.
        config: A DeepSpeed config (dict or JSON file) that replaces all of the above.
    """

    def __init__(
        self, stage: int = 2, bucket_size: int = 5_000_000, config: dict[str, Any] | str | None = None
    ) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when deepspeed is first imported
        super().__init__(
            accelerator=None,
            stage=stage,
            zero_optimization=True,
            reduce_bucket_size=bucket_size,
            allgather_bucket_size=bucket_size,
            overlap_comm=False,
            config=config,
            process_group_backend="gloo",
            logging_level=30,
        )
        if stage == 3 and isinstance(self.config, dict) and config is None:
            self.config["zero_optimization"]["stage3_param_persistence_threshold"] = 0  # small weights, too

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)  # DeepSpeed asks for an index

    def setup_environment(self) -> None:
        super(DeepSpeedStrategy, self).setup_environment()  # leaves out the check for CUDA, and nothing else

    def setup_distributed(self) -> None:
        reset_seed()
        self.set_world_ranks()
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled here, and gloo does without
        self._init_deepspeed_distributed()


@contextmanager
def made_whole(sharded: bool) -> Iterator[None]:
    """Modules made in here have all of their weights, although ZeRO stage 3 (sharded) is about: it shares them out when
    training begins, so that until then they can be read and written."""
    if not sharded:
        yield
        return
    from deepspeed.runtime.zero.partition_parameters import restore_init_context, shutdown_init_context

    shutdown_init_context()
    try:
        yield
    finally:
        restore_init_context()


def whole_state(module: nn.Module) -> dict[str, Tensor]:
    """The state_dict with all of each weight, which ZeRO stage 3 may have shared out; for all processes to call."""
    weights = list(module.parameters())
    if not hasattr(weights[0], "ds_id"):
        return module.state_dict()
    import deepspeed

    with deepspeed.zero.GatheredParameters(weights):
        return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def make_shardable(model: nn.Module) -> None:
    """Frozen weights that ZeRO stage 3 may shard: it gathers those of a module that is called, and for as long.

    Packed copies are dropped. Weights of a module that has parts, which it may read without being called itself,
    become buffers, whole in every process.
    """
    model.train().eval()
    for module in model.modules():
        if next(module.children(), None) is not None:
            for name, weight in list(module.named_parameters(recurse=False)):
                delattr(module, name)
                module.register_buffer(name, weight.detach())
