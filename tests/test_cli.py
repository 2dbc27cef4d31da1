"""A mistake at the keyboard gives exit code 2 and one sentence; a fault of ours keeps its traceback."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from coolsd import cli

ROOT = Path(__file__).resolve().parent.parent
HEAD = ["--model", "training.draft.DraftTraining"]
PAIRS = ["--data.dataset", "data.captions.ImageCaptionPairs", "--data.dataset.source"]
TOKENIZER = ["--model", "training.tokenizer.TokenizerTraining", "--model.tokenizer.image_size", "64"]
DATA = ["--data", "data.loader.FeatureModule", "--data.cache", "nowhere"]


def run(*arguments, **environment):
    command = [sys.executable, "-m", "coolsd.cli", *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, env={**os.environ, **environment}
    )


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["fti"], "did you mean 'fit'?"),
        (["frobnicate"], "coolsd --help"),
        (["fit", "--config", "nowhere.yaml"], "nowhere.yaml"),
        (["fit", "--config", "LICENSE"], "LICENSE|parsing config"),
        (["fit", *HEAD, "--trainer.max_step", "3"], "did you mean 'trainer.max_steps'?"),
        (["fit", *HEAD, "--model.learning_rat", "1"], "did you mean 'learning_rate'?"),
        (["fit", *HEAD, "--modle.learning_rate", "1"], "did you mean 'model'?"),
        (["fit", *HEAD, *DATA, "--model.relaxation", "torch.nn.Linear"], "relaxation"),
        (
            ["fit", *HEAD, *DATA, "--trainer.strategy", "deepspeed_stage_2", "--trainer.accelerator", "cpu"],
            "is for GPUs, but",
        ),
        (["fit", *HEAD, "--trainer.qqqqq", "3"], "see --help"),
        (["fit", *HEAD, "--model.learning_rate", "fast"], "learning_rate: Expected a float"),
        (["fit", *HEAD, "--model.guidance", "0.5"], "guidance is 0.5, but must be >= 1"),
        (["fit", "--model", "training.draft.Drafts"], "Drafts"),
        (["fit", *HEAD], "add --data"),
        (["fit", *HEAD, *DATA, "--data.batch_size", "0"], "batch_size is 0, but must be >= 1"),
        (["fit", *HEAD, *DATA, "--out", "{tmp}/run"], "nowhere is no feature cache"),
        (["fit", *HEAD, *DATA, "--out", "{tmp}/run", "--ckpt_path", "last"], "no last.ckpt yet"),
        (["fit", *HEAD, *DATA, "--out", "{tmp}/run", "--ckpt_path", "{tmp}/nowhere.ckpt"], "does not exist"),
        (["fit", *HEAD, *DATA, "--ckpt_path", "LICENSE"], "is no checkpoint of a run"),
        (["validate", *HEAD, *DATA], "untrained weights; add --ckpt_path"),
        (["test", *HEAD, *DATA, "--out", "{tmp}/run", "--ckpt_path", "last"], "no last.ckpt yet"),
        (["fit", *TOKENIZER, "--model.decoder_only", "true"], "decoder_only needs start_from"),
        (["extract"], "model.cache|cache"),
        (["extract", "--model.cache", "{tmp}/c", "--model.target", "nowhere"], "no checkpoint at 'nowhere'"),
        (["extract", "--model.cache", "{tmp}/c", "--model.source", "imagination"], "images"),
        (["extract", "--model.cache", "{tmp}/c", "--model.samples_per_shard", "0"], "samples_per_shard is 0"),
        (["extract", "--model.cache", "{tmp}/c", *PAIRS, "data/nowhere"], "data/nowhere is no folder and no file"),
        (["fit", *HEAD, *DATA, "--trainer.accelerator", "cuda"], "do not fit: |no feature cache"),
        (["export", "{tmp}/nowhere", "--out", "{tmp}/head"], "no run at"),
        (["export", "{tmp}", "--out", "{tmp}/head"], "holds no checkpoint"),
        (["export", "{tmp}/x.ckpt", "--out", "{tmp}/head"], "x.ckpt"),
        (["cache", "inform", "nowhere"], "invalid choice"),
        (["cache", "info", "nowhere", "--verbos", "1"], "nrecognized arguments"),
        (["cache", "info", "nowhere"], "no feature cache"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(arguments, named, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(ROOT)
    code = cli.main([argument.replace("{tmp}", str(tmp_path)) for argument in arguments])
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("coolsd")]
    assert code == 2 and len(said) == 1 and len(said[0]) < 400
    assert any(word in said[0] for word in named.split("|"))


def test_help_and_version():
    shown = run("--help")
    assert shown.returncode == 0 and all(name in shown.stdout for name in cli.COMMANDS)
    assert run("--version").stdout.startswith("coolsd ")


@pytest.mark.parametrize("verb", ["fit", "validate", "test", "extract"])
def test_help_of_lightnings_verbs_does_not_wait_for_lightning(verb):
    code = (
        f"from coolsd import cli; import sys; assert cli.main(['{verb}', '--help']) == 0; print('torch' in sys.modules)"
    )
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600).stdout
    assert f"coolsd {verb} --config" in shown and shown.endswith("False\n")


def test_help_all_is_lightnings_own(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["fit", "--help", "all"])
    assert stop.value.code == 0 and "--trainer.accumulate_grad_batches" in capsys.readouterr().out


def test_the_newest_checkpoint_is_exported_and_its_step_printed(tmp_path, capsys):
    import torch

    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    for age, (name, step) in enumerate([("last", 7), ("epoch=0-step=5", 5), ("last-v1", 3)]):
        path = tmp_path / "run" / "checkpoints" / f"{name}.ckpt"
        state = {"head.fc.weight": torch.full((2,), float(step)), "other": torch.ones(1)}
        torch.save({"state_dict": state, "eagle": {"architecture": "eagle"}, "global_step": step}, path)
        os.utime(path, (1e9 - age, 1e9 - age))
    assert cli.main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "head")]) == 0
    assert "last.ckpt, step 7" in capsys.readouterr().out
    assert load_file(tmp_path / "head" / "model.safetensors")["fc.weight"].tolist() == [7, 7]


def test_a_pickle_that_runs_a_command_is_refused(tmp_path, capfd):
    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    import torch

    torch.save({"state_dict": {}, "eagle": Payload()}, tmp_path / "evil.ckpt")
    assert cli.main(["export", str(tmp_path / "evil.ckpt"), "--out", str(tmp_path / "head")]) == 2
    assert "no whole Lightning checkpoint" in capfd.readouterr().err
    assert not (tmp_path / "owned").exists() and not (tmp_path / "head").exists()


def raising(error):
    def command(args):
        raise error

    return command


def test_our_own_faults_keep_their_traceback(monkeypatch):
    """An error raised outside our packages (here: in this test) is no mistake of the user's, nor is a KeyError."""
    for error in (ValueError("an inner fault"), KeyError("an inner fault")):
        monkeypatch.setattr(cli, "_load", lambda name, error=error: raising(error))
        with pytest.raises(type(error), match="an inner fault"):
            cli.main(["report"])


def test_debug_shows_the_traceback(monkeypatch):
    monkeypatch.setattr(cli, "_load", lambda name: raising(FileNotFoundError(2, "No such file", "x")))
    assert cli.main(["report"]) == 2
    monkeypatch.setenv("COOLSD_DEBUG", "1")
    with pytest.raises(FileNotFoundError):
        cli.main(["report"])


def test_ctrl_c_is_exit_code_130(monkeypatch):
    monkeypatch.setattr(cli, "_load", lambda name: raising(KeyboardInterrupt()))
    assert cli.main(["report"]) == 130


def test_a_wheel_says_to_clone_the_repository(tmp_path):
    """Only coolsd/ is importable there: the training commands say so in one sentence."""
    (tmp_path / "coolsd").symlink_to(ROOT / "coolsd")
    for command in ("fit", "extract", "cache"):
        done = subprocess.run(
            [sys.executable, "-S", "-c", f"import coolsd.cli as c; raise SystemExit(c.main(['{command}']))"],
            cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ""},
        )  # fmt: skip
        assert done.returncode == 2 and "clone" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_heavy_commands_run_with_the_process_settings_once():
    show = (
        "import os, coolsd.cli as cli\n"
        "cli._load = lambda name: lambda args: print(os.environ.get('MALLOC_TOP_PAD_'), args)\n"
        "cli.main()"
    )
    clean = {key: value for key, value in os.environ.items() if key not in (*cli.ALLOCATOR, *cli.THREADS)}

    def shown(command, **settings):
        done = subprocess.run(
            [sys.executable, "-c", show, command, "--x", "a b"], cwd=ROOT, capture_output=True, text=True, check=True,
            env={**clean, **settings},
        )  # fmt: skip
        value, args = done.stdout.strip().split(" ", 1)
        assert args == "['--x', 'a b']"
        return value

    assert shown("fit") == cli.ALLOCATOR["MALLOC_TOP_PAD_"]
    assert shown("fit", MALLOC_TOP_PAD_="7") == "7"  # the user's own value stays
    assert shown("cache") == "None"


def commands_of_recipes():
    """(recipe, what its header says to run) for every recipe: the command that names the recipe itself."""
    for path in sorted((ROOT / "recipes").rglob("*.yaml")):
        name = str(path.relative_to(ROOT))
        header = re.sub(r"\n#\s+", " ", path.read_text("utf-8"))
        found = re.search(rf"coolsd ((?:(?!coolsd ).)*?--config {re.escape(name)})", header)
        yield name, found and found[1].replace("recipes/X/", "recipes/llamagen-xl-256/").split()


@pytest.mark.parametrize(("recipe", "command"), [pytest.param(*each, id=each[0]) for each in commands_of_recipes()])
def test_every_recipe_says_how_it_is_run_and_is_understood(recipe, command, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    assert command is not None, f"{recipe} does not say how it is run"
    with pytest.raises(SystemExit) as stop:
        cli.main([*command, "--print_config"])
    assert stop.value.code == 0, capfd.readouterr().err
