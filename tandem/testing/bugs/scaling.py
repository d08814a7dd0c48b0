"""Bugs of scaling: fits, multipliers and intervals, and the grid that they are made from."""

SCALING = "tests/comparison/test_scaling.py"
GRID = "tests/comparison/test_grid.py"

# fmt: off
BUGS = {
    "comparison/scaling.py": [
        ("a line is fitted to losses, not to their logarithms", SCALING,
         "np.log([run.nats for run in runs])", "np.array([run.nats for run in runs])"),
        ("a multiplier is upside down", SCALING,
         "return self.size(nats) / x", "return x / self.size(nats)"),
        ("what no size removes may be negative", SCALING,
         '''require("scipy.optimize", "statistics").nnls(columns, L)''',
         "(lambda found: (found[0], float(np.linalg.norm(columns @ found[0] - L))))(np.linalg.lstsq(columns, L))"),
        ("coefficients are those of shrunken sizes", SCALING,
         "A * N.min() ** alpha", "A"),
        ("the search for exponents moves in one of them alone", SCALING,
         '"initial_simplex": first + 0.3 * np.eye(3, 2, -1)', '"disp": False'),
        ("residuals are not widened", SCALING,
         "error = wider * off[", "error = 0.5 * off["),
        ("residuals are widened as for 95 % at any level", SCALING,
         "1 - level / 2\n    for", "0.975\n    for"),
        ("every run is a cell", SCALING,
         "range(len(runs)) if cells is None else cells[name]", "range(len(runs))"),
        ("every method is drawn for itself", SCALING,
         "np.random.default_rng(seed), []", "np.random.default_rng([seed, len(found)]), []"),
        ("a loss that cannot be reached is", SCALING,
         "_root(self.B / left, self.beta) if left > 0 else math.inf", "_root(self.B / max(left, 1e-9), self.beta)"),
        ("the frontier holds what costs more and is no better", SCALING,
         "run.nats < best[-1].nats", "run.nats <= best[-1].nats"),
    ],
    "comparison/grid.py": [
        ("sizes change nothing", GRID,
         "[on_top, read_overrides(given, problems), asked], problems)\n            if",
         "[read_overrides(given, problems), asked], problems)\n            if"),
        ("rows by the rule go down, not up", GRID,
         "-(-(96 * (parameters / 5e6) ** 0.4) // 32) * 32", "(96 * (parameters / 5e6) ** 0.4) // 32 * 32"),
        ("runs may be too short for 500 steps", GRID,
         "min(wanted, 1024, most)", "min(wanted, 1024)"),
    ],
    "comparison/scaling_report.py": [
        ("tables count as parameters", GRID,
         "float(non_embedding(result.parameters))", "float(sum(result.parameters.values()))"),
        ("cells may be scored on different documents", GRID,
         "        require_same_documents(results)\n", ""),
        ("a loss that is not finite is not missed", GRID,
         "if not odd:", "if own := [result for result in own if math.isfinite(result.paid_per_token)]:"),
        ("seeds and cells of one arm against those of another", GRID,
         " and not self.lacking & {arm, baseline}", ""),
        ("readings of unlike seeds", GRID,
         "[_mean(runs[s] for s in seeds) for runs in lengths]", "[_mean(runs.values()) for runs in lengths]"),
        ("an interval beyond the runs", GRID,
         "return min(xs) <= x <= max(xs)", "return True"),
        ("sentence ends are free in a grid", GRID,
         "nats=result.paid_per_token", "nats=result.nats_per_token"),
        ("seeds that differ by a few tokens are several budgets", GRID,
         "if value >= 1.05 * found[-1]", "if value > found[-1]"),
        ("two budgets tell an exponent", GRID,
         "_values(runs, axis) > 2", "_values(runs, axis) > 1"),
    ],
}
# fmt: on
