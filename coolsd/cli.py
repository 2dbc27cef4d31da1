"""The command `coolsd`.  Knows the commands' names, and how a mistake is told; each command lives in its own module.

A command is a function `main(args: list[str]) -> int | None`, imported only when it is called.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import coolsd

if TYPE_CHECKING:
    import jsonargparse

COMMANDS = {  # name: (module:function, what it does)
    "quickstart": ("coolsd.quickstart:main", "extract, fit and evaluate on the embedded emoji target, then report"),
    "generate": ("coolsd.generate_images:main", "captions in, PNG files out"),
    "extract": ("training.verbs:extract", "captioned images -> feature cache (Lightning predict)"),
    "fit": ("training.verbs:fit", "train a draft head, or what the embedded target is made of (LightningCLI)"),
    "validate": ("training.verbs:validate", "validation metrics of a checkpoint (LightningCLI)"),
    "test": ("training.verbs:test", "test metrics of a checkpoint (LightningCLI)"),
    "export": ("training.cli:export", "a run's checkpoint -> a head folder that decoding loads"),
    "evaluate": ("coolsd.evaluate:main", "prompts -> images -> accepted length, latency, bias -> results.json, report"),
    "report": ("coolsd.report:main", "results.json -> report.html and table.md"),
    "calibrate": ("coolsd.calibrate:main", "the Cool-SD setting for a budget of bias, KL or accepted length"),
    "captions": ("coolsd.encode_captions:main", "T5 features of captions, made once for a LlamaGen target"),
    "convert": ("coolsd.convert:main", "LlamaGen's, Lumina-mGPT's, Anole's and LANTERN's checkpoints -> our folders"),
    "bench": ("coolsd.bench:main", "milliseconds of each part of a decoding step"),
    "throughput": ("training.throughput:main", "what extraction and the loader add to the passes they feed"),
    "cache": ("data.features:main", "info, verify and merge: look into feature caches, check their bytes, mix them"),
}

# Read once, before Python starts, so these commands set them and execute themselves again. glibc gives a freed tensor
# back to the kernel and faults it in anew: an eager training step on CPU took 13 s instead of 1.65 s. OpenMP's waiting
# threads spin, which starves data loaders and neighbours during a training; decoding at batch 1, thousands of short
# parallel regions a second, needs the spinning (12 layers: 17 ms a token with it, 24 ms without).
ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TRIM_THRESHOLD_": "16000000000",
    "MALLOC_TOP_PAD_": "268435456",
}
THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
PROCESS_SETTINGS = {
    **dict.fromkeys(("fit", "extract", "validate", "test", "throughput"), ALLOCATOR | THREADS),
    **dict.fromkeys(("quickstart", "generate", "evaluate", "calibrate", "bench"), ALLOCATOR),
}

EPILOG = "Where an option takes true or false, the option alone is true."
FILE_MISTAKES = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError, FileExistsError)


def main(args: list[str] | None = None) -> int:
    """Run one command; args default to the shell's.  Returns the exit code: 2 for a mistake, 130 for Ctrl-C."""
    from_shell = args is None
    args = sys.argv[1:] if args is None else args
    if not args or args[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if args[0] == "--version":
        print(f"coolsd {coolsd.__version__}")
        return 0
    name, rest = args[0], args[1:]
    if name not in COMMANDS:
        return tell("coolsd", f"no command named {name!r}; {nearest(name, COMMANDS, 'see coolsd --help')}")
    if from_shell and sys.platform == "linux":
        _execute_with(PROCESS_SETTINGS.get(name, {}))
    try:
        return _load(name)(rest) or 0
    except KeyboardInterrupt:
        print(f"coolsd {name}: interrupted", file=sys.stderr)
        return 130
    except SystemExit as stop:  # Lightning turns Ctrl-C into exit(1)
        if isinstance(stop.__context__, KeyboardInterrupt):
            return 130
        raise
    except Exception as error:
        if os.environ.get("COOLSD_DEBUG") == "1" or not is_mistake(error):
            raise
        return tell(f"coolsd {name}", describe(error))


def overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {purpose}" for name, (_, purpose) in COMMANDS.items()]
    return "\n".join(["usage: coolsd COMMAND [OPTIONS]", "", *lines, "", "coolsd COMMAND --help lists its options."])


def tell(who: str, sentence: str) -> int:
    print(f"{who}: {sentence}", file=sys.stderr)
    return 2


def nearest(word: str, known: Iterable[str], otherwise: str) -> str:
    """ "did you mean ...?", or `otherwise` where nothing known is near."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else otherwise


def is_mistake(error: Exception) -> bool:
    """Whether this is the user's mistake, worth a sentence, or ours, worth a traceback."""
    if isinstance(error, (*FILE_MISTAKES, argparse.ArgumentError)) or _needs_repository(error):
        return True
    traceback = error.__traceback__
    while traceback and traceback.tb_next:
        traceback = traceback.tb_next
    # a user's, when our own code raises them
    raised_in = traceback.tb_frame.f_globals.get("__name__", "") if traceback else ""
    return isinstance(error, (ValueError, ImportError)) and raised_in.split(".")[0] in ("coolsd", "data", "training")


def describe(error: Exception) -> str:
    """The error as one line."""
    if _needs_repository(error):
        return "this command needs the repository, not the wheel alone; clone it and run pip install -e . there"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return " ".join(str(error).split())


def argument_parser(command: str, description: str) -> jsonargparse.ArgumentParser:
    """The parser of a command: `--config FILE` and full option names; a mistake becomes one sentence with a hint."""
    import jsonargparse

    class Parser(jsonargparse.ArgumentParser):
        def parse_args(self, args: Any = None, **settings: Any) -> Any:  # type: ignore[override]
            """--images-per-prompt and --images_per_prompt are one option, and so are --compile and --compile true."""
            args = [re.sub(r"^--[\w.-]+", _underscored, word) for word in args or ()]
            flags = {name for action in self._actions if getattr(action, "_typehint", None) is bool
                     for name in action.option_strings}  # fmt: skip
            pairs = zip(args, [*args[1:], ""], strict=True)
            bare = [word in flags and value not in ("true", "false") for word, value in pairs]
            args = [f"{word}=true" if flag else word for word, flag in zip(args, bare, strict=True)]
            return super().parse_args(args, **settings)

        def error(self, message: str, ex: Exception | None = None) -> Any:
            raise argparse.ArgumentError(None, explain(message, option_names(self))) from ex

    parser = Parser(prog=f"coolsd {command}", description=description, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument("--config", action="config", help="YAML file with any of the options below")
    return parser


def call(function: Callable[..., Any], parser: jsonargparse.ArgumentParser, args: list[str]) -> Any:
    """function(what command line and recipes tell); its arguments are options, but for those the parser has already."""
    parser.add_function_arguments(function, skip={action.dest for action in parser._actions})
    chosen = parser.instantiate(parser.parse_args(args)).as_dict()
    return function(**{name: value for name, value in chosen.items() if name != "config"})


def _underscored(option: re.Match[str]) -> str:
    return "--" + option[0][2:].replace("-", "_")


def option_names(parser: argparse.ArgumentParser) -> list[str]:
    """Every option of a parser and its subcommands, without dashes."""
    names = []
    for action in parser._actions:
        names += [option.lstrip("-") for option in action.option_strings]
        if isinstance(action.choices, dict):
            names += [name for subparser in action.choices.values() for name in option_names(subparser)]
    return names


def explain(message: str, known: Iterable[str]) -> str:
    """jsonargparse's message as one line: the essence of its lists, and the nearest known key where one is misspelt."""
    message = " ".join(message.split()).replace("<class '", "").replace("'>", "")
    message = re.sub(r"^Parser key \"([\w.]+)\":", r"\1:", message)
    in_class = re.search(r"given class_path '([\w.]+)': (.*?)(?: - Expected a NoneType.*)?$", message)
    if in_class:
        message = f"{in_class[1]}: " + re.sub(r"Parser key \"([\w.]+)\":", r"\1:", in_class[2])
    if "did you mean" in message or "see --help" in message:  # an inner parser has explained it already
        return message
    unknown = re.search(
        r"nrecognized arguments?: *-*([\w.]+)|does not accept (?:\w+ )+'([\w.]+)'|Option '([\w.]+)' is not accepted",
        message,
    )
    if not unknown:
        return message
    word = next(found for found in unknown.groups() if found)
    if in_class:
        known = [*_init_arguments(in_class[1]), "class_path", "init_args"]
    group = re.search(r"Group '([\w.]+)'", message)
    sections = {name.split(".")[0] for name in known}
    first = word.split(".")[0]
    section = nearest(first, sections, "see --help") if first not in sections else "see --help"
    known = [name for name in known if not word.startswith(f"{name}.")]  # the section itself is no hint
    return f"{message}; {nearest(f'{group[1]}.{word}' if group else word, known, section)}"


def _init_arguments(class_path: str) -> list[str]:
    module, _, name = class_path.rpartition(".")
    return list(inspect.signature(getattr(importlib.import_module(module), name)).parameters)


def _load(name: str) -> Callable[[list[str]], int | None]:
    module, function = COMMANDS[name][0].split(":")
    return getattr(importlib.import_module(module), function)


def _needs_repository(error: Exception) -> bool:
    return isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] in ("training", "data")


def _execute_with(settings: dict[str, str]) -> None:
    """Start this very command again with these environment variables, unless all are set (to whatever value) already;
    the processes Lightning starts inherit them."""
    if all(key in os.environ for key in settings):
        return
    for key, value in settings.items():
        os.environ.setdefault(key, value)
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
