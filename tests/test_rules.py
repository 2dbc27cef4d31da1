"""Schedules and accepted masses against the closed forms of the papers (THEORY.md section 3)."""

import math

import pytest
import torch

from coolsd.rules.relaxed import CoolSD, Uniform, Vanilla


def test_the_schedule_of_the_paper_at_length_five():
    # THEORY.md section 3, printed to two digits: w_1 = 5.5 (1 - e^-0.7) / (1 - e^-3.5) = 2.85499
    w = CoolSD(delta=1.1, nu=0.7).schedule(5)
    torch.testing.assert_close(w, torch.tensor([2.86, 1.42, 0.70, 0.35, 0.17]), rtol=0, atol=0.0051)
    first = 5.5 * (1 - math.exp(-0.7)) / (1 - math.exp(-3.5))
    torch.testing.assert_close(w, first * torch.exp(-0.7 * torch.arange(5)), rtol=1e-6, atol=0)
    floored = CoolSD(delta=1.1, nu=0.7, floor=1.0).schedule(5)
    assert floored.tolist()[2:] == [1.0, 1.0, 1.0] and torch.equal(floored[:2], w[:2])


@pytest.mark.parametrize("delta", [0.7, 1.0, 1.1, 2.0, 3.0])
@pytest.mark.parametrize("nu", [0.0, 0.3, 0.7, 2.0])
@pytest.mark.parametrize("length", [1, 2, 5, 16])
def test_annealing_keeps_the_mean_relaxation(delta, nu, length):
    w = CoolSD(delta, nu).schedule(length).double()
    assert w.shape == (length,)
    assert math.isclose(float(w.mean()), delta, rel_tol=1e-6)
    ratio = w[1:] / w[:-1]
    torch.testing.assert_close(ratio, torch.full_like(ratio, math.exp(-nu)), rtol=1e-5, atol=0)
    floored = CoolSD(delta, nu, floor=1.0).schedule(length).double()
    assert torch.equal(floored, w.clamp(min=1.0))


def test_a_jacobi_window_would_start_high_without_a_length():
    assert round(float(CoolSD(1.1).schedule(16)[0]), 2) == 8.86  # THEORY.md section 3
    given = CoolSD(1.1, length=5).schedule(16)
    torch.testing.assert_close(given[:5], CoolSD(1.1).schedule(5))
    assert bool((given.diff() < 0).all())


def test_a_length_beyond_the_depth_is_the_head_of_the_longer_schedule():
    torch.testing.assert_close(CoolSD(1.5, length=8).schedule(3), CoolSD(1.5).schedule(8)[:3])


def test_special_cases_coincide():
    assert torch.equal(Vanilla().schedule(4), torch.ones(4))
    assert torch.equal(Uniform(1.3).schedule(4), torch.full((4,), 1.3))
    torch.testing.assert_close(CoolSD(1.3, nu=0.0).schedule(4), Uniform(1.3).schedule(4))
    assert torch.equal(CoolSD(1.0, nu=0.0).schedule(4), Vanilla().schedule(4))
    assert all(rule.schedule(0).shape == (0,) for rule in (Vanilla(), Uniform()))


def test_vanilla_mass_is_the_smaller_of_the_two_exactly(rng, distributions):
    target, draft = distributions(rng, 50, 7), distributions(rng, 50, 7)
    mass = Vanilla().accepted_mass(target, draft, torch.ones(1))
    assert torch.equal(mass, torch.minimum(target, draft))


@pytest.mark.parametrize("rule", [Vanilla(), Uniform(1.7), CoolSD(2.0), CoolSD(1.1, floor=1.0)])
def test_accepted_mass_never_exceeds_draft_nor_relaxed_target(rng, distributions, rule):
    target, draft = distributions(rng, 6, 5, 7), distributions(rng, 6, 5, 7)
    w = rule.schedule(5)[:, None]
    mass = rule.accepted_mass(target, draft, w)
    assert torch.equal(mass, torch.minimum(draft, w * target))
    accept = mass / draft
    torch.testing.assert_close(accept, (w * target / draft).clamp(max=1), rtol=1e-6, atol=0)


def test_only_vanilla_calls_itself_lossless():
    assert Vanilla().lossless
    assert not Uniform(1.0).lossless and not CoolSD(1.0, nu=0.0).lossless


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Uniform(0), "delta is 0, but must be a number > 0"),
        (lambda: Uniform(-1.0), "delta is -1.0, but must be a number > 0"),
        (lambda: Uniform(math.nan), "delta is nan"),
        (lambda: CoolSD(delta=0.0), "delta is 0.0, but must be a number > 0"),
        (lambda: CoolSD(delta=math.inf), "delta is inf"),
        (lambda: CoolSD(nu=-0.1), "nu is -0.1, but must be a number >= 0"),
        (lambda: CoolSD(nu=math.nan), "nu is nan"),
        (lambda: CoolSD(floor=-1.0), "floor is -1.0, but must be None or a number >= 0"),
        (lambda: CoolSD(floor=math.nan), "floor is nan"),
        (lambda: CoolSD(length=0), "length is 0, but must be None or an integer >= 1"),
    ],
)
def test_bad_parameters_are_refused_with_value_and_limit(make, message):
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        make()
