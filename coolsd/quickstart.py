"""`coolsd quickstart`: the whole way on the embedded emojis, from captioned images to a report.

Knows the order of the commands and their sizes; each step is a command of its own that can be run by hand.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from coolsd.cli import argument_parser, call
from coolsd.emoji_metrics import ClipEmoji
from coolsd.evaluate import JOURNAL, Method, evaluate
from coolsd.metrics import Metric

REPOSITORY = Path(__file__).resolve().parent.parent
RECIPES = REPOSITORY / "recipes" / "emoji"


@dataclass(frozen=True)
class Sizes:
    """images extracted, training steps, held-out captions for the shipped head and for the fresh one."""

    images: int
    steps: int
    prompts: int
    fresh_prompts: int


FULL = Sizes(images=512, steps=400, prompts=16, fresh_prompts=8)
FAST = Sizes(images=64, steps=50, prompts=2, fresh_prompts=1)


def steps(out: Path, sizes: Sizes) -> dict[str, list[str]]:
    """Title -> arguments of `coolsd`, for the steps before the evaluation. All overrides of recipes are here."""
    features, run = out / f"features-{sizes.images}-conditional", out / "fit"
    return {
        f"extract: hidden states of the target on {sizes.images} captioned images": [
            "extract", "--config", f"{RECIPES / 'extract.yaml'}", "--model.init_args.cache", f"{features}",
            "--data.init_args.limit", f"{sizes.images}", "--model.init_args.guidance", "false",
            "--model.init_args.null_fraction", "0.1",  # half the time of both branches: see draft.yaml
        ],
        f"fit: a draft head, {sizes.steps} steps on them": [
            "fit", "--config", f"{RECIPES / 'draft.yaml'}", "--out", f"{run}", "--data.init_args.cache", f"{features}",
            "--model.init_args.captions", f"{min(4, sizes.fresh_prompts)}", "--trainer.max_steps", f"{sizes.steps}",
            "--model.init_args.guidance", "1", "--data.init_args.batch_size", "2",
            "--model.init_args.learning_rate", "4e-3",  # better in a few minutes
            "--trainer.val_check_interval", f"{sizes.steps}",
            "--trainer.callbacks.init_args.every_n_train_steps", f"{sizes.steps}",
        ],
    }  # fmt: skip


def methods(sizes: Sizes, fresh: Path) -> list[Method]:
    """What is compared with plain decoding: the rules on the shipped head, then two of them on the fresh one."""
    few = min(sizes.fresh_prompts, sizes.prompts)
    return [
        Method("eagle-1", rule="vanilla"),
        Method("uniform-1.1", rule="uniform", delta=1.1),
        Method("cool-sd-1.1", rule="cool-sd", delta=1.1),
        Method("cool-sd-2", rule="cool-sd", delta=2.0),
        Method("cool-sd-1.1-floor", rule="cool-sd", delta=1.1, floor=1.0),
        Method("fresh-eagle-1", rule="vanilla", head=str(fresh), first=few),
        Method("fresh-cool-sd-1.1", rule="cool-sd", delta=1.1, head=str(fresh), first=few),
    ]


def quickstart(
    out: Path = Path("runs/quickstart"), fast: bool = False, device: str = "auto", dtype: str = "auto", seed: int = 0
) -> None:
    """Extract, fit and evaluate.

    Args:
        out: Folder for everything that is made.
        fast: Smaller sizes, for a test of the way rather than of the numbers.
        device: Of the evaluation: cpu, cuda, mps or auto.
        dtype: Of the evaluation: float32, bfloat16, float16 or auto (bfloat16 where the hardware has it).
        seed: Of the evaluation; image i is a function of (caption, seed, i).
    """
    if not (RECIPES.is_dir() and (REPOSITORY / "training").is_dir()):
        raise ValueError("quickstart needs the repository, not a wheel alone; clone it and pip install -e . there")
    sizes, out, start = FAST if fast else FULL, out.resolve(), time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    for title, arguments in steps(out, sizes).items():
        announce(title, start)
        done = subprocess.run([sys.executable, "-m", "coolsd.cli", *arguments], cwd=REPOSITORY)
        if done.returncode:
            raise ValueError(f"coolsd {arguments[0]} ended with exit code {done.returncode}; see its message above")
    announce(f"evaluate: {sizes.prompts} held-out captions", start)
    for name in (JOURNAL, "results.json"):  # the fresh head may be another one than last time
        (out / name).unlink(missing_ok=True)
    fresh = out / "fit" / "export" / "draft"
    compared = methods(sizes, fresh)
    metrics: list[Metric] = [ClipEmoji()]
    evaluate(out, compared, limit=sizes.prompts, metrics=metrics, device=device, dtype=dtype, seed=seed)
    announce(f"done; open {out / 'report.html'} (numbers: results.json, table.md)", start)


def announce(title: str, start: float) -> None:
    minutes, seconds = divmod(round(time.perf_counter() - start), 60)
    print(f"\n[{minutes}:{seconds:02d}] {title}", flush=True)


def main(args: list[str]) -> None:
    parser = argument_parser("quickstart", "Extract, fit and evaluate on the embedded emojis; ends with a report.")
    call(quickstart, parser, args)
