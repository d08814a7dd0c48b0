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
    assert found.steps_at_equal_loss * 20_000 == pytest.approx(36_321, abs=1)
    assert found.steps_at_equal_loss == pytest.approx(1.816, abs=5e-4)
    assert found.flops_at_equal_loss == pytest.approx(found.steps_at_equal_loss)
    assert found.seconds_at_equal_loss == pytest.approx(2 * found.steps_at_equal_loss)  # its steps take half as long


def test_beyond_the_runs_of_the_baseline_nothing_is_said():
    found = readings(METHOD._replace(nats=2.6), RUNS[1:])
    assert found.steps_at_equal_loss is None and found.equal_data is None
    assert found.equal_flops == pytest.approx(-0.208)


def test_between_two_lengths_the_loss_is_a_line_in_the_logarithm():
    lengths = [run(10, 100, 10.0, 1.0, 4.0), run(40, 400, 40.0, 4.0, 2.0)]
    assert readings(run(20, 200, 20.0, 2.0, 3.0), lengths) == pytest.approx((0.0, 0.0, 1.0, 1.0, 1.0))


def test_a_run_that_misses_the_longest_budget_by_a_step_is_compared_at_it():
    over, far = (METHOD._replace(flops=50_000.0 * more) for more in (1.009, 1.011))
    assert readings(over, RUNS).equal_flops == pytest.approx(0.036) and readings(far, RUNS).equal_flops is None
