"""The three readings of the paper's runs of 3 B parameters."""

import pytest

from tandem.comparison.readings import readings
from tandem.comparison.scaling import Measured

ROW = 2**21


def run(steps, tokens, flops, seconds, nats):
    return Measured(3e9, tokens, flops, nats, steps, seconds)


def baseline(steps, loss):
    return run(steps, steps * ROW, float(steps), 2.0 * steps, loss)


RUNS = [baseline(50_000, 2.640), baseline(20_000, 2.808), baseline(36_000, 2.677)]
METHOD = run(20_000, 104_857_600_000, 20_000.0, 20_000.0, 2.676)


def test_readings_of_the_runs_of_the_paper():
    found = readings(METHOD, RUNS)
    assert found.equal_flops == pytest.approx(-0.132)
    assert found.equal_data == pytest.approx(0.036)
    (steps, bound), (flops, _), (seconds, _) = found[2:]
    assert steps * 20_000 == pytest.approx(36_321, abs=1) and not bound
    assert steps == pytest.approx(1.816, abs=5e-4)
    assert flops == pytest.approx(steps)
    assert seconds == pytest.approx(2 * steps)  # its steps take half as long


def test_beyond_the_runs_of_the_baseline_there_is_a_bound_or_nothing():
    found = readings(METHOD._replace(nats=2.6), RUNS[1:])
    assert found.steps_at_equal_loss == (36_000 / 20_000, ">") and found.equal_data is None
    assert found.equal_flops == pytest.approx(-0.208)
    worse = readings(METHOD._replace(nats=2.9), RUNS)
    assert worse.flops_at_equal_loss == (1.0, "<") and worse.seconds_at_equal_loss == (2.0, "<")
    assert readings(METHOD._replace(nats=2.64), RUNS).steps_at_equal_loss == (50_000 / 20_000, "")


@pytest.mark.parametrize(
    ("losses", "nats", "found"),
    [
        ((4.0, 4.05, 3.8), 3.9, (2 * 2**0.6, "")),  # not between the first and the third, which are no neighbours
        ((4.0, 4.1), 4.05, (1.0, "<")),  # the loss rises; its shortest run is below already
        ((4.0, 3.8, 3.9, 3.7), 3.85, (2**0.75, "")),  # three places: the cheapest
    ],
)
def test_equal_loss_is_where_the_baseline_first_has_it(losses, nats, found):
    lengths = [run(2**i, 2**i, 2.0**i, 2.0**i, loss) for i, loss in enumerate(losses)]
    value, bound = readings(run(1, 1, 1.0, 1.0, nats), lengths).flops_at_equal_loss
    assert (value, bound) == (pytest.approx(found[0]), found[1])


def test_between_two_lengths_the_loss_is_a_line_in_the_logarithm():
    lengths = [run(10, 100, 10.0, 1.0, 4.0), run(40, 400, 40.0, 4.0, 2.0)]
    flops, data, *multiples = readings(run(20, 200, 20.0, 2.0, 3.0), lengths)
    assert (flops, data, *(value for value, _ in multiples)) == pytest.approx((0.0, 0.0, 1.0, 1.0, 1.0))


def test_a_run_that_misses_the_longest_budget_by_a_step_is_compared_at_it():
    over, far = (METHOD._replace(flops=50_000.0 * more) for more in (1.009, 1.011))
    assert readings(over, RUNS).equal_flops == pytest.approx(0.036) and readings(far, RUNS).equal_flops is None
