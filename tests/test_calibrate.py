"""Replay of a recorded run: exact where it can be enumerated, right on average where chance is, and what is chosen."""

import json
import math

import pytest
import torch
from PIL import Image

from coolsd import calibrate, cli
from coolsd import tree as trees
from coolsd.calibrate import Curve
from coolsd.decode import generate
from coolsd.drafters.chain import Chain
from coolsd.interfaces import DraftTree, Round, Verification
from coolsd.replay import DELTAS, QUANTITIES, Budget, Recorder, Replay, choose, join, schedules
from coolsd.results import ratio
from coolsd.rules.relaxed import CoolSD, Uniform, Vanilla
from coolsd.sampling import residual
from coolsd.verify import bias_of_test, kl_of_test

WORDS = ["a b", "c", "a b c a", "b", "a a"]


def recorded(target, head, rule, images=600, length=4, first=0):
    """(record, result) of a run on a toy target."""
    recorder, captions = Recorder(target.image_tokens), [WORDS[i % 5] for i in range(images)]
    rows = range(first, first + images)
    result = generate(
        target, captions, Chain(head, length), rule, seed=3, rows=rows, decode_images=False, observer=recorder
    )
    return recorder.record(), result


@pytest.fixture(scope="module")
def toy_replay(toy):
    """A toy of 4 x 4 tokens, recorded under Cool-SD with a floor: 300 images."""
    record, _ = recorded(*toy(grid=(4, 4)), CoolSD(1.3, floor=1.0), 300)
    return Replay(record)


def one_block(target_probs, draft_probs, drafted):
    """A record of one round: drafted [B, L] from draft_probs [B, L, V], one image a row, far from its end."""
    batch, length = drafted.shape
    tree = DraftTree(torch.cat([drafted[:, :1], drafted], 1), trees.chain(length), draft_probs)
    ones = torch.ones(batch, dtype=torch.long)
    decision = Verification(tree.tokens, tree.tokens, ones)
    recorder = Recorder(image_tokens=100)
    recorder(Round(tree, torch.cat([target_probs, target_probs[:, :1]], 1), decision, ones.bool()))
    return recorder.record()


def drift_of_test(target_probs, accepted):
    """sum (K - p) (-log p) of the emitted law K."""
    emitted = accepted + (1 - accepted.sum(-1, keepdim=True)) * residual(target_probs, accepted)
    return -(emitted - target_probs).mul(target_probs.clamp(min=1e-38).log()).sum(-1)


# ------------------------------------------------------------------------------------------------- exact


@pytest.mark.parametrize(("codes", "sharpness"), [(5, 1.0), (64, 1.5), (1024, 1.0), (1024, 3.0)])
def test_one_test_is_read_off_the_bins(rng, distributions, codes, sharpness):
    q = distributions(rng, 50, 1, codes, sharpness=sharpness)
    p = (q.log() + 0.7 * sharpness * torch.randn(q.shape, generator=rng)).softmax(-1)
    p[0, 0] = q[0, 0]  # a perfect draft
    p[1, 0, : codes // 2] = 0  # what the target excludes
    p[1] /= p[1].sum()
    relaxations = torch.tensor([0.3, 0.7, 1.0, 1.05, 1.3, 2.0, 2.86, 8.0])
    replay = Replay(one_block(p, q, q[:, 0].argmax(-1, keepdim=True)))
    found = replay.test(0, relaxations)
    for w, *numbers in zip(relaxations, *found, strict=True):
        mass = torch.minimum(q, w * p)[:, 0]
        wanted = mass.sum(-1), bias_of_test(p[:, 0], mass), kl_of_test(p[:, 0], mass), drift_of_test(p[:, 0], mass)
        for number, value, tolerance in zip(numbers, wanted, (1e-3, 1e-3, 1e-3, 4e-3), strict=True):
            torch.testing.assert_close(number, value, rtol=0, atol=tolerance)  # -log p is up to 4 times one bin's mass
        assert w > 1 or not any(number.any() for number in numbers[1:])  # exactly 0 where nothing is relaxed
        assert w < 2 or all(float(value.abs().mean()) > 0.02 for value in wanted[1:])  # else nothing is tested


# Every probability is a multiple of 1/8, so 64 rows hold each draft (x, y) as often as its probability says.
DRAFT = torch.tensor([4.0, 2, 1, 1]) / 8
FIRST = torch.tensor([1.0, 1, 3, 3]) / 8
SECOND = torch.tensor([[3.0, 4, 1, 0], [4, 2, 1, 1], [3, 4, 1, 0], [1, 1, 1, 5]]) / 8


def enumerated(w):
    """(tokens, bias, kl, drift) of one round of two drafts, summed over everything that can be drafted."""

    def test(p, relaxation):
        mass = torch.minimum(DRAFT, relaxation * p)
        return mass, torch.stack([of(p, mass) for of in (bias_of_test, kl_of_test, drift_of_test)])

    mass, sums = test(FIRST, w[0])
    tokens = 1 + float(mass.sum())
    for token in range(4):
        second, own = test(SECOND[token], w[1])
        tokens, sums = tokens + float(mass[token] * second.sum()), sums + mass[token] * own
    return tokens, *sums.tolist()


@pytest.mark.parametrize("w", [(1.0, 1.0), (2.0, 0.5), (2.0, 2.0), (2.86, 1.42), (1.3, 1.1), (0.6, 0.3), (8.0, 3.0)])
def test_replay_of_every_draft_is_the_enumeration(w):
    draws = torch.tensor([0, 0, 0, 0, 1, 1, 2, 3])
    drafted = torch.cartesian_prod(draws, draws)
    p = torch.stack([FIRST.expand(64, -1), SECOND[drafted[:, 0]]], 1)
    replay = Replay(one_block(p, DRAFT.expand(64, 2, -1), drafted))
    found = replay(torch.tensor([w]))
    tokens, bias, kl, drift = (float(sums.mean()) for sums in (found.tokens, found.bias, found.kl, found.drift))
    wanted = enumerated(w)
    assert abs(tokens - wanted[0]) < 1e-5 and abs(bias - wanted[1]) < 1e-5
    assert abs(kl - wanted[2]) < 1e-3 and abs(drift - wanted[3]) < 1e-5
    assert math.isclose(float(found.value("accepted_length")), tokens)
    assert math.isclose(float(found.value("bias_per_token")), 0.99 * bias / tokens, abs_tol=1e-9)
    reverse = enumerated(w[::-1])  # negative control: the order of the schedule matters
    assert w[0] == w[1] or abs(tokens - reverse[0]) > 1e-2


# ------------------------------------------------------------------------------------ a record and its own rule


@pytest.mark.parametrize("rule", [Vanilla(), Uniform(1.4), CoolSD(1.8), CoolSD(1.3, floor=1.0)], ids=str)
def test_a_record_replays_its_own_run(toy, rule):
    # tokens, bias and KL of a round have the replayed sums as expectations given all rounds before, so the differences
    # of whole images have mean 0; 2e-3 a call is what the bins may add
    target, head = toy()
    record, result = recorded(target, head, rule)
    total, images = target.image_tokens, len(result.tokens)
    own = Replay(record)(torch.stack([rule.schedule(4), rule.schedule(4).flip(0)]))
    assert torch.equal(own.calls.long(), result.target_calls)
    real = (torch.full((images,), total - 1.0), result.bias_per_token * total, result.kl_per_token * total)
    noise = []
    for sums, happened in zip((own.tokens, own.bias, own.kl), real, strict=True):
        apart = sums[0] - happened.double()
        noise.append(float(apart.std()) / images**0.5)
        assert abs(float(apart.mean())) < 4 * noise[-1] + 2e-3 * float(own.calls.mean())
    if isinstance(rule, Vanilla):
        assert not own.bias.any() and not own.kl.any()
        return
    assert float(own.bias[0].mean()) > 20 * noise[1]  # there is something to be right about
    if isinstance(rule, CoolSD):
        reverse = float((own.tokens[1] - real[0].double()).mean())  # negative control
        assert abs(reverse) > 10 * noise[0]

    replayed, happened = own.summaries(0), ratio(real[0].tolist(), own.calls.tolist())
    halves = [one["ci95"][1] - one["mean"] for one in (replayed["accepted_length"], happened)]
    assert abs(replayed["accepted_length"]["mean"] - happened["mean"]) < 2 * math.hypot(*halves)
    assert abs(replayed["bias_per_token"]["mean"] - float(result.bias_per_token.mean())) < 0.005


def test_replay_foretells_another_rule(toy):
    # off policy: blocks begin elsewhere, which costs a few hundredths of a token
    target, head = toy(grid=(4, 4))
    record, before = recorded(target, head, Vanilla())
    rule = CoolSD(2.0, floor=1.0)
    foretold = Replay(record)(rule.schedule(4)[None]).summaries(0)
    _, result = recorded(target, head, rule, first=600)
    length = 15 * 600 / float(result.target_calls.sum())
    assert abs(foretold["accepted_length"]["mean"] - length) < 0.1
    assert length - 15 * 600 / float(before.target_calls.sum()) > 0.2
    assert abs(foretold["bias_per_token"]["mean"] - float(result.bias_per_token.mean())) < 0.015


def test_batches_join_to_one_record_and_nothing_is_random(toy):
    target, head = toy()
    whole, _ = recorded(target, head, CoolSD(1.5), 30)
    parts = [recorded(target, head, CoolSD(1.5), 15, first=first)[0] for first in (0, 15)]
    rules = schedules([CoolSD(1.5), Uniform(2.0)], 4)
    again, joined = Replay(whole)(rules), Replay(join(parts))(rules)
    for one, other in ((again, Replay(whole)(rules)), (again, joined)):
        for name in ("tokens", "bias", "kl", "drift", "calls"):
            torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-4, atol=1e-5)


def test_a_record_is_small(toy_replay):
    record = toy_replay.record
    assert record.bytes * 64 * 100 / len(record.remaining) * 5 / 4 < 160e6  # 64 images, 100 rounds, 5 tests
    assert set(record.remaining.tolist()) == set(range(1, 16))


# ------------------------------------------------------------------------------------------------- choosing


def test_length_grows_with_delta(toy_replay):
    for family in (Curve("u", "uniform"), Curve("c", nu=0.7), Curve("f", nu=0.3, floor=1.0), Curve("l", "linear-sd")):
        lengths = toy_replay(schedules(family.replayed_rules(), 4)).value("accepted_length")
        assert float(lengths.diff().min()) > -1e-6 and lengths[-1] - lengths[0] > 0.5
        assert lengths[0] > 1 and lengths[-1] < 5


@pytest.mark.parametrize("floor", [None, 1.0])
@pytest.mark.parametrize(
    "budget", [Budget("bias_per_token", 0.03), Budget("kl_per_token", 0.02), Budget("accepted_length", 3.0)], ids=str
)
def test_the_answer_lies_on_the_budgets_edge(toy_replay, budget, floor):
    rule = choose(toy_replay, budget, [0.7], floor)
    beyond = rule.delta + (-1e-5 if budget.wants_length else 1e-5)
    inside, outside = toy_replay(schedules([rule, CoolSD(beyond, 0.7, floor)], 4)).value(budget.quantity).tolist()
    sign = -1 if budget.wants_length else 1
    assert sign * inside <= sign * budget.limit < sign * outside
    assert abs(inside - budget.limit) < 1e-4
    assert choose(toy_replay, budget, [0.7], floor) == rule


@pytest.mark.parametrize("floor", [None, 1.0])
@pytest.mark.parametrize("quantity", ["bias_per_token", "kl_per_token"])
def test_a_budget_of_nothing_is_lossless(toy, toy_replay, quantity, floor):
    rule = choose(toy_replay, Budget(quantity, 0.0), [0.7], floor)
    assert 1 - 1e-5 < float(rule.schedule(4).max()) <= 1
    assert float(toy_replay(schedules([rule], 4)).value("bias_per_token")) == 0
    _, result = recorded(*toy(grid=(4, 4)), rule, 50)
    assert not result.bias_per_token.any()
    assert choose(toy_replay, Budget(quantity, 0.0), [0.0], floor).delta == 1  # uniform: vanilla itself


def test_searching_nu_is_no_worse_than_any_nu(toy_replay):
    nus = [0.0, 0.3, 0.7, 1.2]
    for budget, quantity, sign, objective in (
        (Budget("bias_per_token", 0.03), "accepted_length", 1, "bias"),
        (Budget("accepted_length", 3.0), "bias_per_token", -1, "bias"),
        (Budget("accepted_length", 3.0), "kl_per_token", -1, "kl"),
    ):
        alone = [choose(toy_replay, budget, [nu], 1.0) for nu in nus]
        best = choose(toy_replay, budget, nus, 1.0, objective)
        values = sign * toy_replay(schedules(alone, 4)).value(quantity)
        assert best == alone[int(values.argmax())] and float(values.max() - values.min()) > 1e-4


def test_what_is_out_of_reach_is_said_with_the_range(toy_replay):
    with pytest.raises(ValueError, match=r"accepted_length >= 4.99 is out of reach.* from 1\.\d+ to 4\.\d+"):
        choose(toy_replay, Budget("accepted_length", 4.99), [0.7], 1.0)
    with pytest.raises(ValueError, match=r"bias_per_token <= 0 is out of reach.* from 0\.\d+ to"):
        choose(toy_replay, Budget("bias_per_token", 0.0), [0.7], 2.0)
    assert choose(toy_replay, Budget("bias_per_token", 1.0), [0.7], 1.0).delta == max(DELTAS)
    with pytest.raises(ValueError, match="3 depths, but the record's chain has 4"):
        toy_replay(torch.ones(2, 3))


def test_only_sampled_chains_are_recorded():
    q, tokens = torch.full((1, 1, 3), 1 / 3), torch.zeros(1, 3, dtype=torch.long)
    ones = torch.ones(1, dtype=torch.long)
    for tree in (DraftTree(tokens, (-1, 0, 0), q), DraftTree(tokens[:, :2], (-1, 0), q, chosen=True)):
        with pytest.raises(ValueError, match="only chains of sampled drafts"):
            Recorder(9)(Round(tree, q.expand(-1, 3, -1), Verification(tokens, tokens, ones), ones.bool()))


# ------------------------------------------------------------------------------------------------ the command


@pytest.fixture(scope="module")
def command(saved_toy):
    return [
        "--target", str(saved_toy / "target"), "--head", str(saved_toy / "draft"), "--dtype", "float32",
        "--prompts", json.dumps(WORDS * 4), "--length", "3",
    ]  # fmt: skip


def run(arguments, out):
    def refuse(word):
        raise ValueError(f"{word} is not JSON")

    assert cli.main(["calibrate", *arguments, "--out", str(out)]) == 0
    assert Image.open(out / "calibration.png").width > 600
    return json.loads((out / "calibration.json").read_text("utf-8"), parse_constant=refuse)


def test_the_command_answers_and_shows_what_it_is_worth(command, tmp_path, capsys):
    budget = ["--max-bias-per-token", "0.03"]
    found = run([*command, *budget], tmp_path / "one")
    said = capsys.readouterr().out
    answer, last = found["answer"], found["runs"][-1]
    assert f"--delta {answer['delta']!r} --nu 0.7 --floor 1.0" in said and "run 1 replayed" in said
    assert found["budget"] == {"quantity": "bias_per_token", "limit": 0.03} and 2 <= len(found["runs"]) <= 3
    assert {key: last["rule"][key] for key in ("delta", "nu", "floor")} == {
        key: answer[key] for key in ("delta", "nu", "floor")
    }
    assert 0.029 < last["replayed_before"]["bias_per_token"]["mean"] <= 0.03 and last["agree"] is not None
    for name in QUANTITIES:
        for source in ("replayed", "replayed_before", "real"):
            if (source, name) != ("real", "nll_drift"):  # real drift needs a lossless run beside it
                low, high = last[source][name]["ci95"]
                assert low < last[source][name]["mean"] < high
    real = last["real"]["bias_per_token"]["mean"]
    assert found["within_budget"] == (real <= 0.03) == ("outside the budget" not in said)
    points = [curve["accepted_length"][16] for curve in found["curves"]]  # delta 1
    assert "replayed: accepted length, bias per token" in said and all(f"{point:.2f}, " in said for point in points)
    assert len(last["rule"]["schedule"]) == 3 and min(last["rule"]["schedule"]) >= 1
    assert [curve["name"] for curve in found["curves"]] == [curve.name for curve in calibrate.CURVES]
    assert all(len(curve["accepted_length"]) == len(curve["delta"]) > 30 for curve in found["curves"])

    again = run([*command, *budget], tmp_path / "two")
    for different in ("environment", "batch_size"):
        again.pop(different), found.pop(different)
    assert again == found


def test_curves_can_be_measured(command, tmp_path):
    curves = "[{name: u, rule: uniform, measure: [1.5]}, {name: l, rule: lantern++, k: 2, measure: [2, 3]}]"
    found = run([*command, "--curves", curves], tmp_path)
    uniform, lantern = found["curves"]
    assert found["answer"] is None and len(found["runs"]) == 1
    (point,) = uniform["measured"]
    assert point["delta"] == 1.5 and point["replayed"]["accepted_length"]["mean"] > 1
    assert point["real"]["bias_per_token"]["mean"] > 0 and len(point["real"]["nll_of_images"]) == 20
    assert [point["bound"] for point in lantern["measured"]] == [2, 3] and lantern["delta"] == []
    assert all(point["replayed"] is None and point["real"]["nll_drift"] for point in lantern["measured"])


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("choose one budget", ["--max-bias-per-token", "0.1", "--min-accepted-length", "2"]),
        ("max_bias_per_token is -0.1, but must be a number >= 0", ["--max-bias-per-token=-0.1"]),
        ("max_kl_per_token is nan", ["--max-kl-per-token", ".nan"]),
        ("but a chain of 3 gives 1 to 4 tokens", ["--min-accepted-length", "4.5"]),
        ("out of reach", ["--min-accepted-length", "4"]),
        ("at least 2", ["--limit", "1"]),
        ("batch_size is 0", ["--batch-size", "0"]),
        ("CoolSD nu is -1", ["--nu=-1"]),
        ("no rule named", ["--curves", "[{name: a, rule: warm}]"]),
        ("has no delta", ["--curves", "[{name: a, rule: vanilla}]"]),
        ("objective", ["--objective", "speed"]),
    ],
)
def test_mistakes_are_one_sentence(words, arguments, command, tmp_path, capsys):
    assert cli.main(["calibrate", *command, "--out", str(tmp_path / "none"), *arguments]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("coolsd calibrate:")]
    assert len(said) == 1 and words in said[0] and not (tmp_path / "none").exists()
