"""The automatic gamma, in a world whose times and acceptance are known."""

from __future__ import annotations

import random

import pytest

from specoffload.core.gamma import AutoGamma, tokens_per_verify


class World:
    """A pair with constant acceptance and times, decoded until `num_tokens` are made."""

    def __init__(self, acceptance: float, draft_s: float, verify_s: float, row_s: float) -> None:
        self.acceptance, self.draft_s = acceptance, draft_s
        self.verify_s, self.row_s = verify_s, row_s

    def time_of(self, gamma: int) -> float:
        return gamma * self.draft_s + self.verify_s + self.row_s * gamma

    def decode(
        self, num_tokens: int, controller: AutoGamma, seed: int = 0
    ) -> tuple[float, list[int]]:
        rng = random.Random(seed)
        seconds, made, gammas = 0.0, 0, []
        while made < num_tokens:
            gamma = controller.choose()
            accepted = 0
            while accepted < gamma and rng.random() < self.acceptance:
                accepted += 1
            noise = rng.uniform(0.95, 1.05)
            controller.observe(
                gamma=gamma,
                drafted=gamma,
                accepted=accepted,
                rejections=int(accepted < gamma),
                draft_s=gamma * self.draft_s * noise,
                verify_s=(self.verify_s + self.row_s * gamma) * noise,
            )
            seconds += self.time_of(gamma)
            made += accepted + 1
            gammas.append(gamma)
        return seconds / made, gammas


def test_a_poor_draft_costs_a_few_percent_at_most() -> None:
    world = World(acceptance=0.02, draft_s=0.5, verify_s=1.0, row_s=0.3)
    seconds, _ = world.decode(1000, AutoGamma(max_gamma=16))
    assert seconds < 1.03 * world.time_of(0)


@pytest.mark.parametrize("acceptance", [0.5, 0.7, 0.9, 0.97])
def test_a_good_draft_gets_close_to_the_best_fixed_gamma(acceptance: float) -> None:
    world = World(acceptance=acceptance, draft_s=0.1, verify_s=1.0, row_s=0.02)
    seconds, _ = world.decode(1500, AutoGamma(max_gamma=16))
    best = min(world.time_of(gamma) / tokens_per_verify(acceptance, gamma) for gamma in range(17))
    assert seconds < 1.1 * best


def test_a_draft_that_becomes_good_is_noticed() -> None:
    controller = AutoGamma(max_gamma=16)
    World(0.02, 0.1, 1.0, 0.02).decode(300, controller)
    seconds, gammas = World(0.95, 0.1, 1.0, 0.02).decode(2000, controller)
    assert max(gammas[-50:]) > 4
    assert seconds < 0.6


def test_costly_rows_make_gamma_small() -> None:
    cheap = World(0.8, 0.05, 1.0, 0.0).decode(800, AutoGamma(max_gamma=16))[1]
    costly = World(0.8, 0.05, 1.0, 0.25).decode(800, AutoGamma(max_gamma=16))[1]
    assert sum(cheap[-50:]) > 2 * sum(costly[-50:])
    assert all(gamma <= 16 for gamma in cheap)


def test_tokens_per_verify() -> None:
    assert tokens_per_verify(0.0, 4) == 1
    assert tokens_per_verify(1.0, 4) == 5
    assert tokens_per_verify(0.5, 2) == pytest.approx(1.75)
