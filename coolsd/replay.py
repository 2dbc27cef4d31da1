"""Replay of a recorded run: what a chain rule with relaxed mass w p(x) would have done, without a model.

Knows probabilities and schedules; knows no model and no command.

One run of a chain leaves, for each test, the masses of p = target and q = draft and their sums of -log p in bins of
log(q / p), and p / q of the drafted token. Nothing else enters a rule with relaxed mass w p(x), so every schedule
w_1 .. w_L replays on them (THEORY.md section 5).

    one test    m = min(q / p, w),  A = p m,  a = sum A,  N = sum relu(A - p)
                K = p (m + g relu(1 - m)),  g = (1 - a) / (1 - a + N);  KL = sum K log(K / p), 0 where w <= 1
                D = sum (K - p) (-log p), what relaxation adds to the NLL of the emitted token, 0 where w <= 1
    one round   reach_i = prod_{j < i} min(1, w_j p(x_j) / q(x_j)) at the drafted tokens x_1 .. x_L
                tokens = 1 + sum_i reach_i a_i,   bias = sum_i reach_i N_i,   kl = sum_i reach_i KL_i,  drift likewise
    all rounds  accepted length = sum tokens / rounds,   bias per token = (T - 1) / T * sum bias / sum tokens

Drafts do not depend on what is accepted, so given the block's first token the sums of a round are unbiased for
every w, and tokens behind the image's end are not counted, as in `generate`. Two things are approximate: the blocks
begin where the recording rule let them begin, at the positions and behind the tokens it gave (so calibration records
again with the chosen rule), and the ratios have the usual bias of order 1 / rounds. The first token, which no test
decides, enters through T - 1. The NLL of a whole image drifts by more than the tests' own share, which is what is
replayed: tokens behind an unlikely one are less certain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from coolsd.interfaces import Round
from coolsd.results import ratio
from coolsd.rules.relaxed import CoolSD

BINS, SPAN = 256, 8.0  # bins of log(q / p) from -SPAN to SPAN, the outer ones open; q = p is an edge
ONE = BINS // 2  # the first bin with q >= p
NODES = 65  # values of g at which the KL of the bins with q < p is tabulated
DELTAS = [2 ** (k / 4) for k in range(-40, 41)]  # searched before bisection, 1 among them
QUANTITIES = ("accepted_length", "bias_per_token", "kl_per_token", "nll_drift")


@dataclass(frozen=True)
class Record:
    """The R rounds of a recorded run; 4 KB for each test, so 2 MB for an image of 100 rounds of 5 tests.

    target_mass, draft_mass: float32 [L, BINS, R], sums of p and of q over the tokens of each bin of log(q / p).
    target_nll, draft_nll: the same of p (-log p) and q (-log p), in nats, without tokens that the target excludes.
    odds: float32 [L, R], p / q of the drafted token. remaining: long [R], tokens the image still lacked before the
    round. image: long [R] in 0..images-1. image_tokens: T.
    """

    target_mass: Tensor
    draft_mass: Tensor
    target_nll: Tensor
    draft_nll: Tensor
    odds: Tensor
    remaining: Tensor
    image: Tensor
    images: int
    image_tokens: int

    @property
    def bytes(self) -> int:
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))


_BY_ROUND = ("target_mass", "draft_mass", "target_nll", "draft_nll", "odds", "remaining")


def join(records: Sequence[Record]) -> Record:
    """Several batches of images as one record."""
    offsets = [sum(record.images for record in records[:i]) for i in range(len(records))]
    return Record(
        **{name: torch.cat([getattr(record, name) for record in records], -1) for name in _BY_ROUND},
        image=torch.cat([record.image + offset for record, offset in zip(records, offsets, strict=True)]),
        images=sum(record.images for record in records),
        image_tokens=records[0].image_tokens,
    )


class Recorder:
    """An observer of one call of `generate` with a chain; nothing waits for the device before `record`."""

    def __init__(self, image_tokens: int) -> None:
        self.image_tokens = image_tokens
        self.rounds: list[tuple[Tensor, ...]] = []
        self.remaining: Tensor | None = None

    def __call__(self, seen: Round) -> None:
        """Raises ValueError for a tree that is no chain of sampled tokens."""
        tree, length = seen.tree, seen.tree.depth
        if not tree.is_chain or tree.chosen or tree.present is not None or length == 0:
            raise ValueError("only chains of sampled drafts can be replayed; record with the drafter Chain")
        p, q = seen.target_probs[:, :length], tree.draft_probs  # [B, L, V]
        place = ((q.log() - p.log() + SPAN) * (BINS / (2 * SPAN))).nan_to_num(0.0).clamp(0, BINS - 1).long()
        empty = p.new_zeros(*p.shape[:2], BINS)
        drafted = tree.tokens[:, 1:, None]
        odds = (p.gather(-1, drafted) / q.gather(-1, drafted)).squeeze(-1)
        if tree.forced is not None:  # accepted whatever w is, as if q were far below p
            forced = tree.forced >= 0
            place, odds = place.masked_fill(forced[..., None], 0), odds.masked_fill(forced, math.exp(SPAN))
        if self.remaining is None:
            self.remaining = torch.full_like(seen.verification.emitted, self.image_tokens - 1)
        nll = torch.where(p > 0, -p.log(), 0.0)
        masses = (empty.scatter_add(-1, place, mass) for mass in (p, q, p * nll, q * nll))
        self.rounds.append((*masses, odds, self.remaining, seen.active))
        self.remaining = self.remaining - seen.verification.emitted

    def record(self) -> Record:
        """What was seen of unfinished images, on the host."""
        *columns, active = (torch.stack(column) for column in zip(*self.rounds, strict=True))
        image = torch.arange(active.shape[1], device=active.device).expand_as(active)
        by_round = (column[active].movedim(0, -1).contiguous().cpu() for column in columns)
        return Record(
            **dict(zip(_BY_ROUND, by_round, strict=True)),
            image=image[active].cpu(),
            images=active.shape[1],
            image_tokens=self.image_tokens,
        )


@dataclass(frozen=True)
class Replayed:
    """Sums over the rounds of each image, float64 [S, I], for S schedules; calls: float64 [I], recorded rounds."""

    tokens: Tensor
    bias: Tensor
    kl: Tensor
    drift: Tensor
    calls: Tensor
    image_tokens: int

    def ratio(self, quantity: str) -> tuple[Tensor, Tensor, float]:
        """(x [S, I], y [S, I], c): the quantity is c * sum x / sum y."""
        if quantity == "accepted_length":
            return self.tokens, self.calls.expand_as(self.tokens), 1.0
        sums = {"bias_per_token": self.bias, "kl_per_token": self.kl, "nll_drift": self.drift}[quantity]
        return sums, self.tokens, (self.image_tokens - 1) / self.image_tokens

    def value(self, quantity: str) -> Tensor:
        """One of QUANTITIES, float64 [S]."""
        above, below, factor = self.ratio(quantity)
        return factor * above.sum(1) / below.sum(1)

    def summaries(self, index: int) -> dict[str, Any]:
        """Mean and 95% interval of each quantity for one schedule."""
        parts = {quantity: self.ratio(quantity) for quantity in QUANTITIES}
        return {name: ratio((x[index] * factor).tolist(), y[index].tolist()) for name, (x, y, factor) in parts.items()}


class Replay:
    """A record with its bins summed up, so that one test at one w is read off; 1.2 times the record's size again."""

    def __init__(self, record: Record) -> None:
        self.record = record
        p, q = record.target_mass, record.draft_mass
        self.depth = len(p)
        self.tail = _before(p.flip(1)).flip(1)  # [L, BINS + 1, R]: p in the bins k, k + 1, ...
        self.drafted = _before(q[:, :ONE])  # [L, ONE + 1, R]: q in the bins before k, k <= ONE
        self.excess = _before((q - p)[:, ONE:])  # [L, ONE + 1, R]: q - p in the bins ONE .. k - 1
        self.vanilla = self.drafted[:, ONE] + self.tail[:, ONE]  # [L, R]: sum min(p, q)
        self.owed = (p - q)[:, :ONE].sum(1)  # [L, R]: sum relu(p - q)
        p, q = record.target_nll, record.draft_nll
        self.nll_tail = _before(p[:, ONE:].flip(1)).flip(1)  # [L, ONE + 1, R]: p (-log p) in the bins k, k + 1, ...
        self.nll_excess = _before((q - p)[:, ONE:])  # [L, ONE + 1, R]: (q - p) (-log p) in the bins ONE .. k - 1
        self.nll_owed = (p - q)[:, :ONE].sum(1)  # [L, R]: sum relu(p - q) (-log p)

    @cached_property
    def above(self) -> Tensor:
        """[L, ONE + 1, R]: sum of q log(q / p) over the bins ONE .. k - 1."""
        p, q = self.record.target_mass[:, ONE:], self.record.draft_mass[:, ONE:]
        return _before(torch.where(p > 0, torch.xlogy(q, q / p), 0.0))

    @cached_property
    def below(self) -> Tensor:
        """[L, NODES, R]: sum of K log(K / p) over the bins before ONE at g = (node / (NODES - 1))^2."""
        p, q = self.record.target_mass[:, :ONE], self.record.draft_mass[:, :ONE]
        ratio = torch.where(p > 0, q / p, 0.0)
        at = (torch.lerp(ratio, torch.ones(()), (node / (NODES - 1)) ** 2) for node in range(NODES))
        return torch.stack([(p * torch.xlogy(k, k)).sum(1) for k in at], 1)

    def test(self, depth: int, relaxation: Tensor, drifts: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Acceptance probability a, bias N, KL and NLL drift D of all recorded tests at one depth (0-based).

        relaxation: float32 [S] of w >= 0. Returns four float32 [S, R]; KL and D are zeros where they are not wanted.
        """
        k = ((relaxation.log() + SPAN) * (BINS / (2 * SPAN))).clamp(0, BINS - 1).long()  # [S], the bin that holds w
        k_above = (k - ONE).clamp(min=0)
        w = relaxation[:, None]
        p, q, tail = self.record.target_mass[depth, k], self.record.draft_mass[depth, k], self.tail[depth, k + 1]
        here = torch.minimum(q, w * p)  # A in the bin of w; before it A = q, behind it A = w p
        bias = torch.where(w > 1, self.excess[depth, k_above] + (here - p).relu() + (w - 1) * tail, 0.0)
        tightened = self.drafted[depth, k.clamp(max=ONE)] + here + w * tail
        accepted = torch.where(w > 1, self.vanilla[depth] + bias, tightened)
        if not drifts:
            return accepted, bias, torch.zeros_like(bias), torch.zeros_like(bias)
        owed = self.owed[depth]
        again = torch.where(owed > 0, 1 - bias / owed, 1.0).clamp(0, 1)  # g, as 1 - a = owed - N
        node = again.sqrt() * (NODES - 1)
        left = node.floor().clamp(max=NODES - 2)
        table = self.below[depth]
        below = torch.lerp(table.gather(0, left.long()), table.gather(0, left.long() + 1), node - left)
        inside = torch.where(p > 0, torch.xlogy(here, here / p), 0.0)
        divergence = self.above[depth, k_above] + inside + torch.xlogy(w, w) * tail + below
        p, q = self.record.target_nll[depth, k], self.record.draft_nll[depth, k]
        more = self.nll_excess[depth, k_above] + (torch.minimum(q, w * p) - p).relu()
        more = more + (w - 1) * self.nll_tail[depth, k_above + 1]
        drift = more - (1 - again) * self.nll_owed[depth]
        return accepted, bias, torch.where(w > 1, divergence.relu(), 0.0), torch.where(w > 1, drift, 0.0)

    def __call__(self, schedules: Tensor, drifts: bool = True) -> Replayed:
        """Replay schedules float32 [S, L]."""
        if schedules.shape[1:] != (self.depth,):
            raise ValueError(f"schedules of {schedules.shape[-1]} depths, but the record's chain has {self.depth}")
        record = self.record
        reach = torch.ones(len(schedules), len(record.remaining))
        tokens, bias, kl, drift = reach.clone(), *torch.zeros(3, *reach.shape)
        for depth, relaxation in enumerate(schedules.unbind(1)):
            accepted, of_bias, of_kl, of_drift = self.test(depth, relaxation, drifts)
            reach = reach * (record.remaining > depth)  # behind the image's end nothing is counted
            tokens += reach * accepted * (record.remaining > depth + 1)
            bias += reach * of_bias
            kl += reach * of_kl
            drift += reach * of_drift
            reach = reach * (relaxation[:, None] * record.odds[depth]).clamp(max=1)
        calls = record.image.bincount(minlength=record.images).double()
        tokens, bias, kl, drift = (self._by_image(values) for values in (tokens, bias, kl, drift))
        return Replayed(tokens, bias, kl, drift, calls, record.image_tokens)

    def _by_image(self, values: Tensor) -> Tensor:
        sums = torch.zeros(len(values), self.record.images, dtype=torch.float64)
        return sums.index_add(1, self.record.image, values.double())


def _before(values: Tensor) -> Tensor:
    """[L, K, R] -> [L, K + 1, R]: the sum of all bins before k."""
    return torch.nn.functional.pad(values.cumsum(1), (0, 0, 1, 0))


@dataclass(frozen=True)
class Budget:
    """accepted_length >= limit, or bias_per_token or kl_per_token <= limit."""

    quantity: str
    limit: float

    @property
    def wants_length(self) -> bool:
        return self.quantity == "accepted_length"

    def fits(self, replayed: Replayed) -> Tensor:
        """bool [S]. A KL of 0 is a bias of 0, which has no rounding."""
        if self.wants_length:
            return replayed.value("accepted_length") >= self.limit
        return replayed.value(self.quantity if self.limit else "bias_per_token") <= self.limit


def schedules(rules: Sequence[Any], depth: int) -> Tensor:
    """float32 [S, L]."""
    return torch.stack([rule.schedule(depth) for rule in rules])


def choose(
    replay: Replay, budget: Budget, nus: Sequence[float], floor: float | None, objective: Literal["bias", "kl"] = "bias"
) -> CoolSD:
    """The best setting within the budget. For each nu the delta at the budget's edge, by bisection; of several nu the
    longest, or under a budget of length that with the smallest bias or KL, whatever `objective` says.

    Raises ValueError, with the range that can be reached, where no setting is within the budget.
    """
    drifts = budget.quantity == "kl_per_token" and budget.limit > 0
    found, reached = [], []
    for nu in nus:
        grid = replay(schedules([CoolSD(delta, nu, floor) for delta in DELTAS], replay.depth), drifts)
        reached.append(grid.value(budget.quantity))
        fitting = budget.fits(grid).nonzero().flatten().tolist()
        if fitting:
            found.append(CoolSD(_edge(replay, budget, nu, floor, fitting, drifts), nu, floor))
    if not found:
        values = torch.cat(reached)
        sign = ">=" if budget.wants_length else "<="
        raise ValueError(
            f"{budget.quantity} {sign} {budget.limit:g} is out of reach: with floor {floor} and nu "
            f"{', '.join(map(str, nus))} it goes from {float(values.min()):.4g} to {float(values.max()):.4g} "
            f"on these captions; change the budget, nu or floor"
        )
    if len(found) == 1:
        return found[0]
    replayed = replay(schedules(found, replay.depth), objective == "kl")
    if budget.wants_length:
        return found[int(replayed.value(f"{objective}_per_token").argmin())]
    return found[int(replayed.value("accepted_length").argmax())]


def _edge(replay: Replay, budget: Budget, nu: float, floor: float | None, fitting: list[int], drifts: bool) -> float:
    """delta within 1e-6 of where the budget ends, on its inner side. The length grows with delta, so the edge is below
    the first fitting delta for a budget of length, else above the last (bias per token need not grow everywhere)."""
    index, step = (fitting[0], -1) if budget.wants_length else (fitting[-1], 1)
    inside = DELTAS[index]
    if not 0 <= index + step < len(DELTAS):
        return inside
    outside = DELTAS[index + step]
    while abs(outside - inside) > 1e-7:
        middle = (inside + outside) / 2
        fits = bool(budget.fits(replay(schedules([CoolSD(middle, nu, floor)], replay.depth), drifts))[0])
        inside, outside = (middle, outside) if fits else (inside, middle)
    return (math.ceil if budget.wants_length else math.floor)(inside * 1e6) / 1e6
