"""`coolsd bench`: milliseconds of each part of decoding, side by side with transformers' generate, and what one
verification costs.  Knows clocks only.

Everything is measured in turn, round after round, so that drift of the machine hits all alike; batch 1, loading and the
first round excluded.
"""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import rich.box
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from coolsd import tree as trees
from coolsd.checkpoint import write_json
from coolsd.cli import argument_parser, call
from coolsd.decode import generate
from coolsd.drafters.chain import Chain, HeadDrafter
from coolsd.drafters.static_tree import SHAPES, StaticTree, parents
from coolsd.generate_images import EMOJI_SAMPLING
from coolsd.heads.checkpoint import load_head
from coolsd.heads.eagle import EagleConfig, EagleHead
from coolsd.interfaces import DraftTree
from coolsd.results import environment
from coolsd.rules.neighbours import nearest
from coolsd.rules.relaxed import CoolSD
from coolsd.sampling import Sampling
from coolsd.targets import load_target, pick_device, pick_dtype
from coolsd.targets.chameleon import FIRST_CODE, Chameleon, ChameleonConfig
from coolsd.targets.llamagen import LlamaGen, LlamaGenConfig
from coolsd.transformer import TransformerConfig, freeze
from coolsd.verify import verify

CAPTION = "noto emoji of a red apple"
CODES = (1024, 16384, 65536)  # of which verification is timed
WARM_UP = 16  # tokens of the round that is not measured
TABLE = (16384, 1000)  # codes and k of the LANTERN table that is built once
PLAIN, TRANSFORMERS = "plain decoding, per token", "transformers generate, per token"
Measurement = Callable[[int], dict[str, float]]  # round -> milliseconds by name


def bench(
    out: Path | None = None,
    target: str = "emoji/target",
    head: str = "emoji/draft",
    shape: LlamaGenConfig | ChameleonConfig | None = None,
    length: int = 5,
    repeats: int = 5,
    tokens: int | None = None,
    training: int = 0,
    transformers: bool = True,
    sampling: Sampling = EMOJI_SAMPLING,
    compile: bool = False,
    device: str = "auto",
    dtype: str = "auto",
) -> dict[str, Any]:
    """Measure plain and speculative decoding of one image, and transformers' generate on a Llama of the same shape.

    Args:
        out: JSON file for the numbers.
        target: Checkpoint folder of the target, or its name under checkpoints/.
        head: The same of the draft head.
        shape: Instead of both, a LlamaGen or a Chameleon of this shape and its head with random weights: what a size
            costs.
        length: Tokens the chain drafts per target call.
        repeats: Images each is measured on.
        tokens: How many of an image's tokens are decoded, with room for all (transformers: for those); default all.
        training: Samples of one optimizer step of such a head, measured once at the end; 0 = none.
        transformers: Measure transformers' generate as well, on a Llama that is as large as the target.
        sampling: How logits become a distribution.
        compile: Measure all once more under torch.compile, beside the eager numbers.
        device: cpu, cuda, mps or auto.
        dtype: float32, bfloat16, float16 or auto (bfloat16 where the hardware has it).
    """
    if repeats < 1:
        raise ValueError(f"repeats is {repeats}, but must be >= 1")
    if training < 0:
        raise ValueError(f"training is {training} samples, but must be >= 0")
    # by name: coolsd does not depend on training
    throughput = importlib.import_module("training.throughput") if training else None
    before = peak(pick_device(device))
    measurements: list[Measurement] = []
    for compiled in (False, True) if compile else (False,):
        if shape is None:
            model = load_target(target, device, dtype, compiled)
            loaded = load_head(head, model, compile=compiled)
        else:
            model, loaded = random_pair(shape, pick_device(device), dtype, compiled)
        mark = " (compiled)" if compiled else ""
        count = model.image_tokens if tokens is None else tokens
        if not 2 <= count <= model.image_tokens:
            raise ValueError(f"tokens is {count}, but must be from 2 to {model.image_tokens}, an image's own")
        measurements.append(ours(Beginning(model, count), [Chain(loaded, length), StaticTree(loaded)], sampling, mark))
        if not compiled:
            measurements[0](0)
            held = peak(model.device)
            memory = {"weights_and_cache": needed(model, loaded, sampling.branches), "peak": held, "before": before}
        if transformers:
            measurements.append(theirs(model, count, sampling.branches, compiled, mark))
    found: dict[str, list[float]] = {}
    for turn in range(repeats + 1):
        for measurement in measurements:
            for name, value in measurement(turn).items():
                found.setdefault(name, []).extend([value] if turn else [])
    medians = {name: statistics.median(values) for name, values in found.items()}
    milliseconds = {name: {"median": medians[name], "min": min(ms), "all": ms} for name, ms in found.items()}
    ratios = {
        f"coolsd / transformers{mark}": medians[f"{PLAIN}{mark}"] / medians[f"{TRANSFORMERS}{mark}"]
        for mark in ("", " (compiled)")
        if f"{TRANSFORMERS}{mark}" in medians
    }
    costs = verifications(model.device, repeats)
    torch.manual_seed(0)
    codebook, start = torch.randn(TABLE[0], 8), time.perf_counter()
    nearest(codebook, TABLE[1])
    table = {"codes": TABLE[0], "k": TABLE[1], "seconds": time.perf_counter() - start}
    results = {
        "schema": 1,
        "environment": environment(model.device, model.dtype),
        "target": model.fingerprint,
        "sampling": asdict(sampling),
        "repeats": repeats,
        "tokens": count,
        "training": training,
        "milliseconds": milliseconds,
        "ratios": ratios,
        "bytes": memory,
        "microseconds_per_verify": costs,
        "neighbour_table": table,
    }
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_json(out, results)
    if throughput is not None:
        precision = {torch.float32: "32", torch.bfloat16: "bf16-mixed"}.get(model.dtype, "16-mixed")
        step = throughput.optimizer_step(
            loaded.config, model.ends(), sampling.branches, training, model.device, precision
        )
        memory |= {"training": step["bytes"], "training_peak": peak(model.device)}
        milliseconds["optimizer step"] = {"median": step["milliseconds"], "min": step["milliseconds"], "all": []}
        if out is not None:
            write_json(out, results)
    show(results)
    return results


def random_pair(
    shape: LlamaGenConfig | ChameleonConfig, device: torch.device, dtype: str, compile: bool
) -> tuple[Any, EagleHead]:
    """A target and a head of one layer with random weights, prompted by random features or tokens."""
    precision, before = pick_dtype(dtype, device), torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(precision)  # never twice as large on the way
    try:
        with device:
            target: Any = (
                Chameleon(shape, _RandomTokens(shape))
                if isinstance(shape, ChameleonConfig)
                else LlamaGen(shape, _RandomCaptions(shape.caption_dim))
            )
            target = target.to(device).eval().requires_grad_(False)
            layer = replace(shape.transformer, layers=1, qk_norm=False)
            config = EagleConfig(layer, shape.codebook_size, shape.prompt_slots, target.image_tokens)
            ends = target.ends()
            head = EagleHead(config, ends["embedding"], ends["lm_head"], ends["rope"]).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)
    head.prepare()
    freeze(target)
    if compile:
        target.transformer.compile_shapes()
        head.transformer.compile_shapes()
    return target, head


class _RandomCaptions:
    """Features of captions that fill all slots."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, captions: Sequence[str], slots: int) -> tuple[Tensor, Tensor]:
        return torch.randn(len(captions), slots, self.width), torch.ones(len(captions), slots, dtype=torch.bool)


class _RandomTokens:
    """A tokenizer for which every caption fills all slots."""

    def __init__(self, shape: ChameleonConfig) -> None:
        self.ids = [FIRST_CODE] * (shape.prompt_slots - 2 - len(shape.start))

    def encode(self, text: str, add_special_tokens: bool) -> _RandomTokens:
        return self


class Beginning:
    """A target whose images end after so many tokens; all else, its cache too, is the whole image's."""

    def __init__(self, target: Any, tokens: int) -> None:
        self.target, self.image_tokens = target, tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)


def needed(model: Any, head: EagleHead, branches: int) -> int:
    """Bytes of all weights, each once, and of the keys and values of one image, from their shapes."""
    own = {p.data_ptr(): p.nbytes for module in (model, head) for p in [*module.parameters(), *module.buffers()]}
    layers = model.config.transformer.layers + head.config.transformer.layers
    slots = model.config.prompt_slots + model.image_tokens
    size = 2 * model.config.transformer.key_heads * model.config.transformer.head_dim
    return sum(own.values()) + branches * layers * slots * size * model.lm_head.weight.itemsize


def peak(device: torch.device) -> int:
    """Bytes, at most, so far: of the process, or on the GPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def ours(whole: Beginning, drafters: Sequence[HeadDrafter], sampling: Sampling, mark: str) -> Measurement:
    """An image of the real loop, plain and with each drafter; its own clock tells the parts apart."""

    def measure(turn: int) -> dict[str, float]:
        model = whole if turn else Beginning(whole.target, min(WARM_UP, whole.image_tokens))
        plain = generate(model, [CAPTION], None, None, sampling, seed=turn, decode_images=False)
        calls = int(plain.target_calls[0])
        found = {
            f"{PLAIN}{mark}": sum(plain.seconds.values()) * 1000 / model.image_tokens,
            f"prefill{mark}": plain.seconds["prefill"] * 1000,
            f"target call, 1 token{mark}": plain.seconds["target"] * 1000 / calls,
            f"sampling, plain{mark}": plain.seconds["verify"] * 1000 / calls,
        }
        for drafter in drafters:
            name = f"chain of {drafter.depth}" if drafter.is_chain else f"tree of {drafter.nodes - 1}"
            drafted = generate(model, [CAPTION], drafter, CoolSD(), sampling, seed=turn, decode_images=False)
            rounds = int(drafted.target_calls[0])
            found |= {
                f"{name}, per token{mark}": sum(drafted.seconds.values()) * 1000 / model.image_tokens,
                f"target call, {drafter.nodes} tokens{mark}": drafted.seconds["target"] * 1000 / rounds,
                f"{name}, draft step{mark}": drafted.seconds["draft"] * 1000 / rounds / drafter.depth,
                f"{name}, sampling and verification{mark}": drafted.seconds["verify"] * 1000 / rounds,
            }
        return found

    return measure


def theirs(model: Any, tokens: int, rows: int, compiled: bool, mark: str) -> Measurement:
    """transformers' generate with StaticCache: same layers, widths, vocabulary, rows and tokens, random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: TransformerConfig = model.config.transformer
    slots = model.config.prompt_slots
    config = LlamaConfig(
        vocab_size=model.codebook_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        max_position_embeddings=slots + tokens,
        bos_token_id=None,
        eos_token_id=None,
    )
    llama = LlamaForCausalLM(config).to(model.device, model.dtype).eval()
    prompt = torch.ones(rows, slots, dtype=torch.long, device=model.device)
    if compiled:
        llama.forward = torch.compile(llama.forward, dynamic=False)

    def measure(turn: int) -> dict[str, float]:
        torch.manual_seed(turn)
        count = tokens if turn or compiled else min(WARM_UP, tokens)  # one shape for the compiler
        start = time.perf_counter()
        drawn = llama.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=True, top_k=0, max_new_tokens=count,
            min_new_tokens=count, pad_token_id=0, cache_implementation="static", disable_compile=True,
        )  # fmt: skip
        assert drawn.shape[1] == slots + count
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
        return {f"{TRANSFORMERS}{mark}": (time.perf_counter() - start) * 1000 / count}

    return measure


def verifications(device: torch.device, repeats: int) -> dict[str, float]:
    """Median microseconds of one `verify` under Cool-SD with certificates, by codebook, tree and batch."""
    shapes = {"chain": trees.chain(5), **{shape: parents(shape) for shape in SHAPES}}
    rule, generator = CoolSD(), torch.Generator().manual_seed(0)
    found = {}
    for codes in CODES:
        for name, parent in shapes.items():
            for batch in (1, 8):
                probs, draft = torch.randn(2, batch, len(parent), codes, generator=generator).softmax(-1).to(device)
                tokens = torch.randint(codes, (batch, len(parent)), generator=generator).to(device)
                tree = DraftTree(tokens, parent, draft[:, : max(parent) + 1])
                uniforms = torch.rand(batch, len(parent), generator=generator).to(device)
                relaxation = rule.schedule(tree.depth).to(device)
                times = []
                for _ in range(repeats + 1):
                    start = time.perf_counter()
                    verify(tree, probs, rule, relaxation, uniforms)
                    if device.type == "cuda":
                        torch.cuda.synchronize(device)
                    times.append((time.perf_counter() - start) * 1e6)
                found[f"{name}, {len(parent)} nodes, {codes} codes, batch {batch}"] = statistics.median(times[1:])
    return found


def show(results: dict[str, Any]) -> None:
    made = results["environment"]
    times = Table("milliseconds", "median", "min", box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for name, values in results["milliseconds"].items():
        times.add_row(name, f"{values['median']:.3f}", f"{values['min']:.3f}")
    Console().print(times)
    costs = Table("one verification", "microseconds", box=rich.box.SIMPLE_HEAD, pad_edge=False)
    for name, value in results["microseconds_per_verify"].items():
        costs.add_row(name, f"{value:.0f}")
    Console().print(costs)
    for name, value in results["ratios"].items():
        print(f"{name}: {value:.2f} (below 1: coolsd is faster)")
    held = {name: f"{count / 1e6:.0f} MB" for name, count in results["bytes"].items()}
    print(
        f"weights and cache by their shapes {held['weights_and_cache']}, at most in use {held['peak']}, of which "
        f"{held['before']} before they were loaded"
    )
    if "training" in held:
        print(
            f"an optimizer step of {results['training']} samples by its shapes {held['training']} beside the weights, "
            f"at most in use by the end {held['training_peak']}"
        )
    table = results["neighbour_table"]
    print(f"nearest {table['k']} codes of each of {table['codes']}, once per codebook: {table['seconds']:.1f} s")
    machine = f"{made['device']}, {made['cpu']}, {made['threads']} threads"
    print(f"batch 1, {made['dtype']}, {machine}, {results['repeats']} repeats")


def main(args: list[str]) -> None:
    call(bench, argument_parser("bench", "Milliseconds of each part of decoding, beside transformers' generate."), args)
