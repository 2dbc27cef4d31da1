"""The decode loop: propose, score, verify, keep, observe. Knows no rule, no drafter and no target by name."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from coolsd.interfaces import DecodeResult, DraftTree, Layout, Prompt, Round, TargetOutput, Verification
from coolsd.sampling import Sampling, counter_uniforms, draw
from coolsd.verify import verify

BLOCK = 32  # rounds of uniforms made at once


class NoDraft:
    """Plain decoding as a drafter: a tree that is only its root."""

    depth, nodes, slots = 0, 1, 0

    def start(self, target: Any, prompt: Prompt, output: TargetOutput, token: Tensor, sampling: Sampling) -> None:
        self.token = token[:, None]

    def propose(self, uniforms: Tensor) -> DraftTree:
        return DraftTree(self.token, (-1,), uniforms.new_empty(len(uniforms), 0, 0))

    def observe(self, output: TargetOutput, verification: Verification, committed: int) -> None:
        self.token = verification.tokens


class Clock:
    """Seconds by part of the loop: the host's clock, on CUDA the device's own, which is read at the end only."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.spans: list[tuple[str, Any, Any]] = []

    def now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = self.now()
        yield
        self.spans.append((name, start, self.now()))

    def seconds(self) -> dict[str, float]:
        """Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        found = dict.fromkeys(("prefill", "draft", "target", "verify", "decode_images"), 0.0)
        for name, start, end in self.spans:
            found[name] += start.elapsed_time(end) / 1000 if self.device.type == "cuda" else end - start
        return found


class Ledger:
    """What a result reports, summed over the rounds; tensors [B]. Tokens behind an image's end do not count."""

    def __init__(self, nll: Tensor, certificates: bool) -> None:
        self.nll = nll
        self.calls = torch.zeros_like(nll, dtype=torch.long)
        self.bias: Tensor | None = torch.zeros_like(nll) if certificates else None
        self.kl: Tensor | None = torch.zeros_like(nll) if certificates else None
        self.emitted: list[Tensor] = []

    def add(self, tree: DraftTree, guided: Tensor, decision: Verification, active: Tensor) -> None:
        """guided: float32 [B, N, V], the logits before top-k and top-p; active: bool [B], unfinished images."""
        device, length = guided.device, decision.tokens.shape[1]
        committed = (torch.arange(length, device=device) < decision.emitted[:, None]) & active[:, None]  # [B, L+1]
        if not tree.is_chain:
            guided = guided[torch.arange(len(guided), device=device)[:, None], decision.path]
        surprise = guided.logsumexp(-1) - guided.gather(-1, decision.tokens[..., None]).squeeze(-1)
        self.nll = self.nll + torch.where(committed, surprise, 0.0).sum(1)
        tested = committed[:, :-1]  # test i decides token i
        if self.bias is not None and decision.bias is not None:
            self.bias = self.bias + torch.where(tested, decision.bias, 0.0).sum(1)
        if self.kl is not None and length > 1:  # a tree has no KL certificate
            self.kl = None if decision.kl is None else self.kl + torch.where(tested, decision.kl, 0.0).sum(1)
        self.calls = self.calls + active
        self.emitted.append(decision.emitted)

    def result(self, tokens: Tensor, images: Tensor | None, layout: Layout | None, clock: Clock) -> DecodeResult:
        """All per-token means are over all T tokens [B, T], forced ones included."""
        total = tokens.shape[1]
        return DecodeResult(
            tokens=tokens,
            images=images,
            accepted_length=(total - 1) / self.calls.float(),
            target_calls=self.calls,
            emitted=torch.stack(self.emitted, dim=1) if self.emitted else self.calls[:, None][:, :0],
            bias_per_token=None if self.bias is None else self.bias / total,
            kl_per_token=None if self.kl is None else self.kl / total,
            nll_per_token=self.nll / total,
            seconds=clock.seconds(),
            accepted_length_unforced=None if layout is None else ((layout.forced < 0).sum() - 1) / self.calls.float(),
        )


def _check(captions: Sequence[str], drafter: Any, rule: Any, rows: Sequence[int] | None, seed: int) -> None:
    if drafter is None and rule is not None:
        raise ValueError(f"rule {rule} needs a drafter; plain decoding (drafter=None) accepts nothing")
    if not captions or isinstance(captions, str):
        raise ValueError(f"captions is {captions!r}, but must be a list of at least one string")
    if rows is not None and len(rows) != len(captions):
        raise ValueError(f"{len(rows)} rows for {len(captions)} captions; give one global index per caption")
    if rule is None and drafter is not None and drafter.depth:
        raise ValueError("a drafter needs a rule: pass rule=coolsd.Vanilla() for lossless decoding, or a relaxed one")
    if not 0 <= seed < 1 << 63:
        raise ValueError(f"seed is {seed}, but must be an integer from 0 to 2^63 - 1")


@torch.inference_mode()
def generate(
    target: Any,
    captions: Sequence[str],
    drafter: Any = None,
    rule: Any = None,
    sampling: Sampling | None = None,
    seed: int = 0,
    rows: Sequence[int] | None = None,
    decode_images: bool = True,
    progress: Callable[[int, int], None] | None = None,
    observer: Callable[[Round], None] | None = None,
    certificates: bool = True,
) -> DecodeResult:
    """Decode one image per caption.

    drafter None = plain decoding; a drafter and a rule go together, one without the other is a ValueError.
    rows: global image indices, default 0..B-1: image b is a function of (caption, seed, rows[b]) alone.
    progress(tokens of the slowest row, T) and observer(Round) are called after each target call.

    Returns tokens long [B, T]; images uint8 [B, 3, h, w] or None; accepted_length float32 [B] = (T - 1) / target calls
    after the prefill, and accepted_length_unforced, the same without the tokens that the target's layout forces
    (None where it has none); target_calls long [B]; emitted long [B, rounds], tokens committed per call;
    bias_per_token, kl_per_token (None for trees that relax) and nll_per_token float32 [B], the last in nats under the
    guided, tempered distribution before top-k and top-p; seconds by part. All per-token means are over all T tokens,
    forced ones included. certificates=False leaves bias and KL out. Raises ValueError where the target gives NaN.
    """
    _check(captions, drafter, rule, rows, seed)
    sampling, drafter = sampling or Sampling(), NoDraft() if drafter is None else drafter
    device, total, depth, layout = target.device, target.image_tokens, drafter.depth, getattr(target, "layout", None)
    clock = Clock(device)
    rule = rule.bind(target) if hasattr(rule, "bind") else rule
    relaxation = rule.schedule(depth).to(device) if hasattr(rule, "schedule") else torch.ones(depth, device=device)
    row_index = torch.as_tensor(range(len(captions)) if rows is None else list(rows), device=device)
    slots = drafter.slots + drafter.nodes

    with clock.part("prefill"):
        prompt = target.encode(captions, sampling.branches == 2)
        output, cache = target.prefill(prompt, drafter.nodes)
        uniforms = counter_uniforms(seed, row_index, 0, BLOCK, slots)
        guided = sampling.guided(output.logits)
        token = draw(sampling.truncate(guided)[:, 0], uniforms[0, :, -1])
        nll = -guided.log_softmax(-1)[:, 0].gather(1, token[:, None]).squeeze(1)
        drafter.start(target, prompt, output, token, sampling)
    prompt_slots = prompt.mask.shape[-1]
    tokens = torch.zeros(len(captions), total + depth + 1, dtype=torch.long, device=device)
    tokens[:, 0] = token
    count = torch.ones_like(token)  # committed image tokens
    ledger = Ledger(nll, certificates)
    offset = torch.arange(depth + 1, device=device)
    slowest = 1
    while slowest < total:
        turn = len(ledger.emitted) + 1
        if turn % BLOCK == 0:
            uniforms = counter_uniforms(seed, row_index, turn, BLOCK, slots)
        chance = uniforms[turn % BLOCK]
        with clock.part("draft"):
            tree = drafter.propose(chance[:, : drafter.slots])
            if layout is not None:
                tree = replace(tree, forced=layout.at(count[:, None] + offset[:depth]))
        with clock.part("target"):
            output = target.score(tree, prompt, cache)
        with clock.part("verify"):
            guided = sampling.guided(output.logits)
            probs = sampling.truncate(guided)
            decision = verify(tree, probs, rule, relaxation, chance[:, drafter.slots :], certificates)
            active = count < total
            decision = replace(decision, emitted=torch.minimum(decision.emitted, total - count))  # the image ends
            tokens.scatter_(1, count[:, None] + offset, decision.tokens)
            ledger.add(tree, guided, decision, active)
            if observer is not None:
                observer(Round(tree, probs, decision, active))
            count = count + decision.emitted
            slowest, longest = torch.stack([count.min(), count.max()]).tolist()  # the one host sync of a round
            path = None if tree.is_chain else decision.path.repeat_interleave(prompt.branches, 0)
            cache.keep(path, decision.emitted.repeat_interleave(prompt.branches), prompt_slots + longest - 1)
        with clock.part("draft"):
            drafter.observe(output, decision, longest)
        if progress is not None:
            progress(slowest, total)
    tokens = tokens[:, :total]
    if bool(ledger.nll.isnan().any()):  # an image is over: here the host may wait
        raise ValueError(
            f"the target's logits are no numbers (NaN) in {output.logits.dtype}; decode in float32 or bfloat16, or "
            "copy its checkpoint again"
        )
    images = None
    if decode_images:
        with clock.part("decode_images"):
            images = target.decode_images(tokens)
    return ledger.result(tokens, images, layout, clock)


@torch.inference_mode()
def autoregressive(
    target: Any,
    captions: Sequence[str],
    sampling: Sampling | None = None,
    seed: int = 0,
    rows: Sequence[int] | None = None,
) -> Tensor:
    """The slow reference that plain `generate` must agree with token for token: no cache, no tree, tokens [B, T]."""
    sampling = sampling or Sampling()
    prompt = target.encode(captions, sampling.branches == 2)
    row_index = torch.as_tensor(range(len(captions)) if rows is None else list(rows), device=target.device)
    tokens = torch.zeros(len(captions), 1, dtype=torch.long, device=target.device)
    for position in range(target.image_tokens):
        probs = sampling.probs(target.forced(prompt, tokens).logits[:, :, -1:])
        token = draw(probs[:, 0], counter_uniforms(seed, row_index, position, 1, 1)[0, :, 0])
        tokens = torch.cat([tokens[:, :-1], token[:, None], torch.zeros_like(tokens[:, :1])], dim=1)
    return tokens[:, :-1]
