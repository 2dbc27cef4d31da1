"""`coolsd fit`, `extract`, `export` and Lightning's other verbs: LightningCLI with our errors and our run folders.

Knows Lightning; the model and the data are named by class_path in the recipe.  Lightning starts its processes by
running sys.argv again, so nothing here assigns it.
"""

from __future__ import annotations

import argparse
import logging
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from coolsd.checkpoint import save_checkpoint
from coolsd.cli import argument_parser, explain, option_names
from training.strategies import DeepSpeedCPUStrategy


class Parser(LightningArgumentParser):
    """Full option names only; a mistake becomes one sentence that names the nearest key."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{**options, "allow_abbrev": False})

    def error(self, message: str, ex: Exception | None = None) -> Any:
        raise argparse.ArgumentError(None, explain(message, option_names(self))) from ex


class CheckpointsExist(Callback):
    """The last step of a run gets a checkpoint, though Lightning saves every so many steps only.  And a run whose
    checkpoints do not reach the disk is stopped: Lightning's save can fail without a word."""

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        every = getattr(trainer.checkpoint_callback, "_every_n_train_steps", 0)
        if trainer.global_step == trainer.max_steps and every and trainer.max_steps % every:
            self.on_train_end(trainer, pl_module)  # here, for a longer run resumes amid the epoch from it

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Called by all processes, as saving needs."""
        saver = trainer.checkpoint_callback
        if isinstance(saver, ModelCheckpoint) and not saver._should_skip_saving_checkpoint(trainer):
            saver.save_last = True
            saver._save_last_checkpoint(trainer, saver._monitor_candidates(trainer))

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for checkpoint in trainer.checkpoint_callbacks:
            for path in (getattr(checkpoint, "last_model_path", ""), getattr(checkpoint, "best_model_path", "")):
                if path and trainer.is_global_zero and not Path(path).exists():
                    raise ValueError(f"checkpoint {path} was not written; look for a full disk or missing permissions")

    on_fit_end = on_train_epoch_end


class SaveRunConfig(SaveConfigCallback):
    """config.yaml says how the run was trained; a look at it later must not replace it."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "fit":
            super().setup(trainer, pl_module, stage)


class CLI(LightningCLI):
    """--out FOLDER is the run: config.yaml, TensorBoard events and checkpoints/ lie in it; a second run adds to it."""

    def __init__(self, verb: str, **options: Any) -> None:
        self.verb = verb
        super().__init__(**options)

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """Only the verb that is asked for: the options of each cost seconds to collect."""
        verbs = super().subcommands()
        return {self.verb: verbs[self.verb]} if self.verb in verbs else verbs

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        which = "Given as an option, short for --model.cache." if self.verb == "predict" else (
            "Folder of the run, its TensorBoard events included; --trainer.logger false leaves these out.")  # fmt: skip
        parser.add_argument("--out", type=str, default=None, help=which)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parser.parse_args(args)

    def _parse_ckpt_path(self) -> None:
        """Recipe and command line decide; Lightning would let the checkpoint's own settings overrule both."""

    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        if config.out is not None:
            if self.verb == "predict":
                raise ValueError("out is no key of an extraction's recipe; name its folder as model.cache")
            out = Path(config.out)
            config.trainer.default_root_dir = str(out)
            if config.trainer.logger is not False:
                config.trainer.logger = {
                    "class_path": "lightning.pytorch.loggers.TensorBoardLogger",
                    "init_args": {"save_dir": str(out.parent), "name": out.name, "version": ""},
                }

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except MisconfigurationException as error:
            raise ValueError(f"this machine or these trainer options do not fit: {error}") from None
        except ValueError as error:  # jsonargparse buries what a model or data module refuses in a list of types
            found: BaseException = error
            while "Union subtypes" in str(found) and isinstance(found.__cause__, Exception):
                found = found.__cause__
            raise found from None

    def before_predict(self) -> None:
        strategy = self.trainer.strategy
        if isinstance(strategy, DeepSpeedStrategy):
            on_gpu = isinstance(strategy.accelerator, CUDAAccelerator)
            if on_gpu == isinstance(strategy, DeepSpeedCPUStrategy):
                name, overlay = type(strategy).__name__, "recipes/strategies/cpu_deepspeed.yaml"
                raise ValueError(
                    f"{name} is for CPUs, but this run is on a GPU; leave out {overlay}"
                    if on_gpu
                    else f"{name} is for GPUs, but this run is on a CPU; lay {overlay} over the recipe"
                )

    def before_fit(self) -> None:
        self.before_predict()
        config = self.config[self.subcommand]
        if self.datamodule is None:
            raise ValueError("no data: add --data CLASS, or a recipe with a data section")
        wanted = config.ckpt_path
        if wanted is None and self.subcommand != "fit" and config.get("model.init_args.start_from") is None:
            raise ValueError(
                f"{self.subcommand} would measure untrained weights; add --ckpt_path RUN/checkpoints/last.ckpt"
            )
        if wanted == "last":
            logger = self.trainer.logger
            run = Path(getattr(logger, "log_dir", None) or self.trainer.default_root_dir)
            folders = [
                getattr(saver, "dirpath", None) or run / "checkpoints" for saver in self.trainer.checkpoint_callbacks
            ]
            if not any(path for folder in folders for path in Path(folder).glob("last*.ckpt")):
                raise ValueError(
                    f"--ckpt_path last, but {run} has no last.ckpt yet; leave the option out to begin a fit"
                )
        elif wanted is not None and wanted not in ("best", "hpc"):
            if not Path(wanted).exists():
                raise FileNotFoundError(f"--ckpt_path {wanted} does not exist")
            if Path(wanted).is_file() and not zipfile.is_zipfile(wanted):
                raise ValueError(f"--ckpt_path {wanted} is no checkpoint of a run; give one of RUN/checkpoints")

    before_validate = before_test = before_fit


def extract(args: list[str]) -> None:
    """Lightning's predict with training.extraction; the cache's own settings.json says how it was made."""
    defaults = ["--model", "training.extraction.Extraction", "--data", "training.extraction.CaptionedImages"]
    quiet = ["--return_predictions", "false", "--trainer.logger", "false", "--trainer.enable_checkpointing", "false"]
    short = {
        "--dry-run": "--model.dry_run=true", "--max-bad-fraction": "--model.max_bad_fraction", "--out": "--model.cache"
    }  # fmt: skip
    words = [re.sub(r"^--[a-z-]+", lambda option: short.get(option[0], option[0]), word) for word in args]
    main(["predict", *defaults, *quiet, *words])


def export(args: list[str]) -> None:
    """A run's newest checkpoint -> a head folder: config.json, model.safetensors, fingerprint.json."""
    parser = argument_parser("export", export.__doc__ or "")
    parser.add_argument("run", type=str, help="folder of the run (--out of fit), or one checkpoint")
    parser.add_argument("--out", type=str, required=True, help="head folder to write")
    parser.add_argument(
        "--trust", type=bool, default=False, help="unpickle DeepSpeed's state; only for runs of your own"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights as written")
    options = parser.parse_args(args)
    path = _find_checkpoint(Path(options.run))
    checkpoint = _read_sharded(path, options.trust) if path.is_dir() else _read(path)
    if "eagle" not in checkpoint:
        raise ValueError(f"{path} holds no draft head; export takes a run of training.draft.DraftTraining")
    prefix, dtype = "head.", getattr(torch, options.dtype)
    of_head = {name: tensor for name, tensor in checkpoint["state_dict"].items() if name.startswith(prefix)}
    tensors = {name.removeprefix(prefix): tensor.to(dtype) for name, tensor in of_head.items()}
    made = save_checkpoint(Path(options.out), checkpoint["eagle"], tensors)
    print(f"{options.out}: head {made} from {path}, step {checkpoint['global_step']}")


def main(args: list[str]) -> None:
    # advertisements of other products, several lines a run
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(lambda r: "Tip:" not in r.getMessage())
    CLI(
        args[0],
        args=args,
        parser_class=Parser,
        seed_everything_default=0,
        save_config_callback=SaveRunConfig,
        save_config_kwargs={"overwrite": True},
        auto_configure_optimizers=False,
        trainer_defaults={
            "callbacks": [CheckpointsExist()],
            "use_distributed_sampler": False,  # our data modules know which process reads what
            "num_sanity_val_steps": 0,
        },
    )


def _find_checkpoint(run: Path) -> Path:
    if run.suffix == ".ckpt":
        return run
    if not run.is_dir():
        raise FileNotFoundError(f"no run at {run}; give the folder that fit wrote with --out")
    found = list((run / "checkpoints").glob("*.ckpt"))
    if not found:
        raise FileNotFoundError(f"{run}/checkpoints holds no checkpoint yet")

    def written(path: Path) -> tuple[float, str]:  # a folder (DeepSpeed's) is as new as the newest in it
        return max(part.stat().st_mtime for part in (path, *path.rglob("*"))), path.name

    return max(found, key=written)


def _read(path: Path) -> dict[str, Any]:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{path} is no whole Lightning checkpoint ({str(error).splitlines()[0]})") from None


def _read_sharded(path: Path, trust: bool) -> dict[str, Any]:
    """A checkpoint that DeepSpeed left as a folder, one file a process."""
    if not trust:
        raise ValueError(f"{path} is DeepSpeed's state, which is unpickled; add --trust true if the run is your own")
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    states = get_fp32_state_dict_from_zero_checkpoint(str(path), "checkpoint")
    about = torch.load(next((path / "checkpoint").glob("*model_states.pt")), map_location="cpu", weights_only=False)
    return {**about, "state_dict": about.get("average", states)}
