"""Lightning's verbs as commands: fit, validate, test, and extract, which is predict with our modules.

Knows how they are called; Lightning, which takes seconds to import, is loaded only when one of them runs.
"""

from __future__ import annotations

PAGE = """usage: coolsd {verb} --config RECIPE [--config OVERLAY] [OPTIONS]

{what}

  --config FILE         a recipe; a second one is laid over the first, options over both
  --out FOLDER          {out}
  --model.NAME VALUE    a setting of the recipe's model; --data.NAME of its data, --trainer.NAME of Lightning's Trainer
  --ckpt_path FILE      go on from a checkpoint, or look at it; "last" is the newest of the run
  --print_config        the whole configuration with every default
  --model.help CLASS    the settings of a model; --data.help, --trainer.callbacks.help and so on likewise
  --help all            every option there is; takes as long as Lightning takes to load
"""
OUT = {
    "fit": "folder of the run: config.yaml, TensorBoard events, checkpoints/",
    "extract": "folder of the feature cache",
}


def fit(args: list[str]) -> None:
    """Train a draft head (training.draft), or the embedded target, its tokenizer or its metric network."""
    _run("fit", args, fit.__doc__)


def validate(args: list[str]) -> None:
    """Validation metrics of a checkpoint."""
    _run("validate", args, validate.__doc__)


def test(args: list[str]) -> None:
    """Test metrics of a checkpoint."""
    _run("test", args, test.__doc__)


def extract(args: list[str]) -> None:
    """Captioned images -> feature cache of a target's hidden states; an interrupted one goes on where it stopped."""
    if not _told(args, "extract", extract.__doc__):
        from training.cli import extract as run

        run(_all(args))


def _run(verb: str, args: list[str], what: str | None) -> None:
    if not _told(args, verb, what):
        from training.cli import main

        main([verb, *_all(args)])


def _told(args: list[str], verb: str, what: str | None) -> bool:
    if args in (["-h"], ["--help"]):
        print(PAGE.format(verb=verb, what=what, out=OUT.get(verb, "TensorBoard events of the metrics")), end="")
        return True
    return False


def _all(args: list[str]) -> list[str]:
    return ["--help"] if args == ["--help", "all"] else args
