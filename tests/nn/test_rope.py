import pytest
import torch

from tandem.nn.rope import Rotation, rotate

PAIRINGS = ["adjacent", "halves"]


def turn(x, positions, pairing="adjacent", base=10_000.0):
    table = Rotation(positions, x.shape[-1], base=base, pairing=pairing, dtype=x.dtype)
    return rotate(x, table.cos_TJ, table.sin_TJ, pairing)


def test_adjacent_pairs_turn_as_complex_numbers():
    x = torch.randn(2, 9, 3, 8, dtype=torch.float64)
    frequency = torch.tensor([1.0, 100**-0.25, 100**-0.5, 100**-0.75], dtype=torch.float64)
    angle = torch.arange(9, dtype=torch.float64)[:, None] * frequency
    turned = torch.view_as_complex(x.unflatten(-1, (4, 2))) * torch.polar(torch.ones_like(angle), angle)[:, None]
    expected = torch.view_as_real(turned).flatten(-2)
    torch.testing.assert_close(turn(x, torch.arange(9), base=100.0), expected, rtol=1e-12, atol=1e-12)


def test_halves_are_adjacent_pairs_in_another_order_of_channels():
    x = torch.randn(2, 9, 3, 8, dtype=torch.float64)
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # where each channel of the adjacent layout lies in halves
    expected = turn(x[..., order], torch.arange(9))
    turned = turn(x, torch.arange(9), "halves")
    torch.testing.assert_close(turned[..., order], expected, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(turned, turn(x, torch.arange(9)))


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_scores_depend_on_distances_only_and_do_depend_on_them(pairing):
    q, k = torch.randn(2, 1, 12, 2, 16, dtype=torch.float64)
    q, k = q[:, :1].expand_as(q), k[:, :1].expand_as(k)  # the same content at every position

    def scores(first):
        at = torch.arange(first, first + 12)
        return torch.einsum("bihd,bjhd->bhij", turn(q, at, pairing), turn(k, at, pairing))

    torch.testing.assert_close(scores(1000), scores(0), rtol=1e-9, atol=1e-9)
    assert scores(0)[0, 0, :, 0].std() > 0.1


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_position_zero_does_not_turn(pairing):
    x = torch.randn(1, 1, 2, 8)
    assert torch.equal(turn(x, torch.zeros(1, dtype=torch.long), pairing), x)


def test_tables_are_exact_at_far_positions():
    far = torch.tensor([100_000])
    table = Rotation(far, 64)
    exact = Rotation(far, 64, dtype=torch.float64)
    # float32 angles would be wrong by up to 100,000 * 6e-8 = 6e-3; rounding the finished table costs 6e-8
    torch.testing.assert_close(table.cos_TJ.double(), exact.cos_TJ, rtol=0, atol=1e-7)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_half_precision_is_turned_in_float32_and_rounded_once(pairing):
    x = torch.randn(1, 40, 2, 16).bfloat16()
    table = Rotation(torch.arange(40), 16, pairing=pairing)
    turned = rotate(x, table.cos_TJ, table.sin_TJ, pairing)
    exact = turn(x.float(), torch.arange(40), pairing)
    assert turned.dtype == torch.bfloat16 and torch.equal(turned, exact.bfloat16())
