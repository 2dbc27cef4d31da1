"""`coolsd calibrate`: the setting of Cool-SD for a budget, from recorded runs.  Knows commands, files and plots.

Record a run, replay hundreds of settings on it (`coolsd.replay`), decode with the chosen one, and again, until what was
replayed and what happened agree (THEORY.md section 5).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import rich.box
import rich.markup
import torch
from rich.console import Console
from rich.table import Table

from coolsd.checkpoint import write_json, write_whole
from coolsd.cli import argument_parser, call
from coolsd.decode import generate
from coolsd.drafters.chain import Chain
from coolsd.evaluate import find_captions
from coolsd.generate_images import EMOJI_SAMPLING, checkpoint_name, progress_bar
from coolsd.heads.checkpoint import load_head
from coolsd.methods import RULES, describe_rule, make_rule
from coolsd.replay import QUANTITIES, Budget, Record, Recorder, Replay, choose, join, schedules
from coolsd.results import environment, half, ratio, summary, with_half
from coolsd.rules.relaxed import CoolSD, Vanilla
from coolsd.sampling import Sampling
from coolsd.targets import load_target

NUS = [k / 20 for k in range(31)]  # --search-nu
CURVE = [2 ** (k / 8) for k in range(-16, 25)]  # deltas of a drawn curve, 1/4 to 8
RECORDS = 3  # at most so many recorded runs


@dataclass(frozen=True)
class Curve:
    """A family of settings to draw: one rule, many strengths (delta, or LANTERN's bound, which cannot be replayed).

    Args:
        name: Its name in the plot.
        rule: Short name of a rule with a delta or a bound: uniform, cool-sd, linear-sd, lantern, lantern++.
        nu: Decay of cool-sd's relaxation with depth.
        floor: Lower bound of the relaxation.
        k: Nearest codes that lantern and lantern++ look at.
        resampling: After a rejection, lantern and lantern++: optimal or own, the public code's.
        measure: These strengths are decoded for real as well.
    """

    name: str
    rule: str = "cool-sd"
    nu: float | None = None
    floor: float | None = None
    k: int | None = None
    resampling: str | None = None
    measure: list[float] = field(default_factory=list)

    @property
    def strength(self) -> str:
        fields = getattr(RULES.get(self.rule), "__dataclass_fields__", ())
        return "bound" if "bound" in fields else "delta"

    def rules(self, strengths: Sequence[float]) -> list[Any]:
        same = {"nu": self.nu, "floor": self.floor, "k": self.k, "resampling": self.resampling}
        return [make_rule(self.rule, **{self.strength: strength}, **same) for strength in strengths]

    def replayed_rules(self) -> list[Any]:
        return self.rules(CURVE) if self.strength == "delta" else []


CURVES = [
    Curve("uniform", "uniform"),
    Curve("cool-sd, nu 0.7", nu=0.7),
    Curve("cool-sd, nu 0.7, floor 1", nu=0.7, floor=1.0),
    Curve("cool-sd, nu 0.3, floor 1", nu=0.3, floor=1.0),
]


def calibrate(
    out: Path,
    target: str = "emoji/target",
    head: str = "emoji/draft",
    length: int = 5,
    max_bias_per_token: float | None = None,
    max_kl_per_token: float | None = None,
    min_accepted_length: float | None = None,
    delta: float = 1.1,
    nu: float = 0.7,
    floor: float | None = 1.0,
    search_nu: bool = False,
    objective: Literal["bias", "kl"] = "bias",
    curves: list[Curve] | None = None,
    split: Literal["combo", "novel"] = "combo",
    limit: int | None = 32,
    prompts: list[str] | Path | None = None,
    batch_size: int = 8,
    sampling: Sampling = EMOJI_SAMPLING,
    compile: bool = False,
    device: str = "auto",
    dtype: str = "auto",
    seed: int = 0,
) -> dict[str, Any]:
    """Find the setting of Cool-SD for a budget, and draw accepted length against bias and KL.

    Args:
        out: Folder for calibration.json and calibration.png.
        target: Checkpoint folder of the target, or its name under checkpoints/.
        head: The same of the draft head.
        length: Tokens the chain drafts per target call.
        max_bias_per_token: Fastest setting with at most this bias; 0 is lossless.
        max_kl_per_token: Fastest setting with at most this KL, in nats.
        min_accepted_length: Least relaxed setting with at least so many tokens per target call.
        delta: Mean relaxation of the first recorded run.
        nu: Decay of the relaxation with depth.
        floor: Lower bound of the relaxation; 1.0 never tightens below vanilla, null is the paper's.
        search_nu: Search nu from 0 to 1.5 as well.
        objective: What min_accepted_length with search_nu keeps smallest.
        curves: What to draw, each {name, rule, ...}; null takes uniform and three of Cool-SD.
        split: Held-out emoji captions: combo (parts seen, not together) or novel (names never seen).
        limit: Only so many captions; a record takes about 2 MB of memory for each.
        prompts: Captions instead: a list, or a file with one a line.
        batch_size: Images decoded together.
        sampling: How logits become a distribution.
        compile: torch.compile target and head.
        device: cpu, cuda, mps or auto.
        dtype: float32, bfloat16, float16 or auto (bfloat16 where the hardware has it).
        seed: Image i of recorded run number n is a function of (caption, seed, n * captions + i).
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}, but must be >= 1")
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}, but must be >= 2")
    budget = read_budget(max_bias_per_token, max_kl_per_token, min_accepted_length, length)
    families = CURVES if curves is None else curves
    for family in families:
        family.replayed_rules(), family.rules(family.measure)  # a mistake is told before anything is loaded
    captions = find_captions(prompts, split, limit, seed)
    if len(captions) < 2:
        raise ValueError(f"{len(captions)} caption, but intervals need at least 2; give more prompts or a larger limit")
    rule = CoolSD(delta, nu, floor)
    model = load_target(target, device, dtype, compile)
    drafter = Chain(load_head(head, model, compile=compile), length)
    setup = (model, drafter, captions, sampling, seed, batch_size)

    runs: list[dict[str, Any]] = []
    predicted = None
    while True:
        record, real = run(*setup, rule, len(runs))
        assert record is not None
        replay = Replay(record)
        own = replay(schedules([rule], length)).summaries(0)
        agreed = None if predicted is None else agree(predicted, real, budget)
        runs.append({"rule": describe_rule(rule, length), "replayed_before": predicted, "replayed": own, "real": real,
                     "agree": agreed, "rounds": len(record.remaining), "bytes": record.bytes})  # fmt: skip
        if budget is None or agreed or len(runs) == RECORDS:
            break
        rule = choose(replay, budget, NUS if search_nu else [nu], floor, objective)
        predicted = replay(schedules([rule], length)).summaries(0)
        del record, replay  # memory: one record at a time

    found: dict[str, Any] = {
        "schema": 1,
        "environment": environment(model.device, model.dtype),
        "target": model.fingerprint,
        "draft": checkpoint_name(head),
        "length": length,
        "sampling": asdict(sampling),
        "prompts": len(captions),
        "captions": captions,
        "seed": seed,
        "batch_size": batch_size,
        "compiled": compile,
        "budget": None if budget is None else asdict(budget),
        "search_nu": search_nu,
        "objective": objective,
        "answer": None if budget is None else asdict(rule),
        "runs": runs,
        "curves": draw_from(replay, families),
    }
    if budget is not None:
        value = runs[-1]["real"][budget.quantity]
        off = None if value is None else value["mean"] - budget.limit
        found["within_budget"] = None if off is None else bool(off >= 0 if budget.wants_length else off <= 0)
    if any(family.measure for family in families):
        lossless = run(*setup, Vanilla(), RECORDS, observe=False)[1]  # the same captions and rows for all
        for family, curve in zip(families, found["curves"], strict=True):
            for strength, other in zip(family.measure, family.rules(family.measure), strict=True):
                real = run(*setup, other, RECORDS, observe=False)[1]
                pairs = zip(real["nll_of_images"], lossless["nll_of_images"], strict=True)
                real["nll_drift"] = summary([own - exact for own, exact in pairs])
                replayed = replay(schedules([other], length)).summaries(0) if curve["delta"] else None
                curve["measured"].append({family.strength: strength, "replayed": replayed, "real": real})
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "calibration.json", found)
    write_whole(out / "calibration.png", lambda part: plot(found, part))
    show(found)
    print(f"{out / 'calibration.json'}, {out / 'calibration.png'}")
    return found


def read_budget(bias: float | None, kl: float | None, tokens: float | None, length: int) -> Budget | None:
    """The one budget that was given, or None. Raises ValueError for several and for one that nothing can meet."""
    options = {"max_bias_per_token": bias, "max_kl_per_token": kl, "min_accepted_length": tokens}
    given = {name: value for name, value in options.items() if value is not None}
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are given; choose one budget at a time")
    for name, value in given.items():
        if name == "min_accepted_length":
            if not 0 <= value <= length + 1:
                raise ValueError(
                    f"{name} is {value}, but a chain of {length} gives 1 to {length + 1} tokens per target call; "
                    f"ask for less, or raise length"
                )
        elif not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value}, but must be a number >= 0; 0 is lossless, the least there is")
        return Budget(name[4:], value)
    return None


def run(
    model: Any, drafter: Chain, captions: Sequence[str], sampling: Sampling, seed: int, batch_size: int, rule: Any,
    number: int, observe: bool = True,
) -> tuple[Record | None, dict[str, Any]]:  # fmt: skip
    """Decode the captions once with the rule: the record if observed, and what really happened, with 95% intervals.

    accepted_length is tokens over calls of the whole run, as the replay gives it; the mean of the images' own accepted
    lengths, which `coolsd evaluate` reports, is accepted_length_of_images and a little larger. KL is None where the
    rule has no such certificate or it is infinite.
    """
    records, results = [], []
    with progress_bar(f"run {number + 1}", len(captions), "images") as bar:
        for first in range(0, len(captions), batch_size):
            words = captions[first : first + batch_size]
            rows = [number * len(captions) + first + index for index in range(len(words))]
            recorder = Recorder(model.image_tokens) if observe else None
            results.append(
                generate(model, words, drafter, rule, sampling, seed, rows, decode_images=False, observer=recorder)
            )
            records += [recorder.record()] if recorder else []
            bar.update(bar.task_ids[0], advance=len(words), rate=str(first + len(words)))

    def per_image(name: str) -> list[float] | None:
        values = [getattr(result, name) for result in results]
        joined = None if values[0] is None else torch.cat(values)
        return None if joined is None or not bool(joined.isfinite().all()) else joined.tolist()

    calls = torch.cat([result.target_calls for result in results]).double().cpu()
    real: dict[str, Any] = {"accepted_length": ratio([model.image_tokens - 1.0] * len(captions), calls.tolist())}
    real["accepted_length_of_images"] = summary(per_image("accepted_length") or [])
    for name in ("bias_per_token", "kl_per_token", "nll_per_token"):
        real[name] = summary(per_image(name) or [])
    real["nll_of_images"] = per_image("nll_per_token")
    return join(records) if records else None, real


def agree(replayed: dict[str, Any], real: dict[str, Any], budget: Budget | None) -> bool:
    """Whether replayed and real length, and the budget's quantity, differ by no more than their intervals together."""
    for name in {"accepted_length", budget.quantity if budget else "bias_per_token"}:
        apart = abs(replayed[name]["mean"] - real[name]["mean"])
        if apart > math.hypot(half(replayed[name]) or 0, half(real[name]) or 0):
            return False
    return True


def draw_from(replay: Replay, families: Sequence[Curve]) -> list[dict[str, Any]]:
    """The replayed points of every curve, delta by delta; none of a rule that is no function of w p(x)."""
    curves = []
    for family in families:
        rules = family.replayed_rules()
        points: dict[str, list[float]] = {name: [] for name in QUANTITIES}
        if rules:
            replayed = replay(schedules(rules, replay.depth))
            points = {name: replayed.value(name).tolist() for name in QUANTITIES}
        deltas = CURVE if rules else []
        curves.append({**asdict(family), "delta": deltas, **points, "measured": []})
    return curves


def plot(found: dict[str, Any], path: Path) -> None:
    """Accepted length against bias, KL and NLL drift: lines and rings replayed, dots with 95% intervals real."""
    from matplotlib.figure import Figure

    panels = [("bias_per_token", "bias per token (bound)"), ("kl_per_token", "KL per token (bound, nats)"),
              ("nll_drift", "NLL per token, less that of lossless decoding (nats)")]  # fmt: skip
    figure = Figure(figsize=(1 + 5 * len(panels), 4.6), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True)
    for axis, (quantity, label) in zip(axes, panels, strict=True):
        for number, curve in enumerate(found["curves"]):
            name, colour = curve["name"].replace("$", r"\$"), f"C{number}"
            axis.plot(curve[quantity], curve["accepted_length"], lw=1.4, color=colour, label=name)
            for point in curve["measured"]:
                _points(axis, quantity, point["replayed"], point["real"], colour)
        for one in found["runs"]:
            _points(axis, quantity, one["replayed_before"] or one["replayed"], one["real"], "#1d232b")
        if found["budget"] and found["budget"]["quantity"] == quantity:
            axis.axvline(found["budget"]["limit"], color="#9aa5b1", linestyle=":", label="budget")
        elif found["budget"] and found["budget"]["quantity"] == "accepted_length":
            axis.axhline(found["budget"]["limit"], color="#9aa5b1", linestyle=":", label="budget")
        axis.set_xlabel(label)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    axes[0].set_ylabel("accepted length (tokens per target call)")
    axes[0].legend(fontsize=8, frameon=False, title="lines and rings replayed, dots real", title_fontsize=8)
    figure.savefig(path, format="png", dpi=150)


def _points(axis: Any, quantity: str, replayed: dict[str, Any] | None, real: dict[str, Any], colour: str) -> None:
    """A ring for what was replayed, a dot for what happened, as far as each has the quantity."""
    if replayed:
        axis.plot(replayed[quantity]["mean"], replayed["accepted_length"]["mean"], "o", mfc="none", color=colour)
    if real.get(quantity):
        across, up = real[quantity], real["accepted_length"]
        axis.errorbar(across["mean"], up["mean"], half(up), half(across), fmt=".", color=colour, elinewidth=1)


def show(found: dict[str, Any]) -> None:
    """Replayed and real numbers of every run, and the answer."""
    rows = []
    for number, one in enumerate(found["runs"], start=1):
        before = (f"run {number - 1} replayed", one["replayed_before"])
        rows.append((f"run {number}: {setting(one['rule'])}",
                     [before, ("replayed", one["replayed"]), ("real", one["real"])]))  # fmt: skip
    for curve in found["curves"]:
        for point in curve["measured"]:
            name = next(f"{key} {point[key]:g}" for key in ("delta", "bound") if key in point)
            before = (f"run {len(found['runs'])} replayed", point["replayed"])
            rows.append((f"{curve['name']}: {name}", [before, ("real", point["real"])]))
    digits = {"accepted_length": 3, "bias_per_token": 4, "kl_per_token": 3, "nll_drift": 3}
    table = Table("setting", box=rich.box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for title in ("length", "bias", "KL", "NLL drift"):
        table.add_column(title, no_wrap=True)
    for name, sources in rows:
        table.add_row(rich.markup.escape(name))
        for source, numbers in sources:
            if numbers is not None:
                cells = [with_half(numbers[key], places) if numbers.get(key) else "-" for key, places in digits.items()]
                table.add_row(f" {source}", *cells)
    Console().print(table)
    drawn = [curve for curve in found["curves"] if curve["delta"]]
    if drawn:
        table = Table("delta", *(rich.markup.escape(curve["name"]) for curve in drawn), box=rich.box.SIMPLE_HEAD)
        for index in range(0, len(CURVE), 4):
            pairs = [f"{curve['accepted_length'][index]:.2f}, {curve['bias_per_token'][index]:.3f}" for curve in drawn]
            table.add_row(f"{CURVE[index]:.2f}", *pairs)
        Console().print(table)
        print("replayed: accepted length, bias per token; all points and KL in calibration.json")
    print(f"{found['prompts']} captions, chain of {found['length']}; length: tokens per target call; ±: 95% intervals")
    print("bias, KL and NLL drift: per token; replayed drift is that of the tests alone, not of what follows them")
    if found["answer"] is None:
        return
    answer = found["answer"]
    floor = "" if answer["floor"] is None else f" --floor {answer['floor']!r}"
    print(f"answer: --rule cool-sd --delta {answer['delta']!r} --nu {answer['nu']!r}{floor} --length {found['length']}")
    if not found["within_budget"]:
        quantity, limit = found["budget"]["quantity"], found["budget"]["limit"]
        real = (found["runs"][-1]["real"][quantity] or {"mean": math.inf})["mean"]
        print(f"its real {quantity} is {real:.4g}, outside the budget of {limit:g}; ask for a little more")
    if not found["runs"][-1]["agree"]:
        print(
            f"replayed and real numbers still differ after {RECORDS} runs; trust the real ones, or give more captions"
        )


def setting(rule: dict[str, Any]) -> str:
    return ", ".join(f"{name} {rule[name]:g}" for name in ("delta", "nu", "floor") if rule.get(name) is not None)


def main(args: list[str]) -> None:
    parser = argument_parser("calibrate", "The setting of Cool-SD for a budget of bias, KL or accepted length.")
    call(calibrate, parser, args)
