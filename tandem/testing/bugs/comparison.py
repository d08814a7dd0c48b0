"""Bugs of studies and of the statistics behind a verdict."""

STATISTICS = "tests/comparison/test_statistics.py"

# fmt: off
BUGS = {
    "comparison/study.py": [
        ("arms may read different texts", "tests/comparison/test_study.py",
         "if recipe.value(key) != one.value(key)", "if False"),
        ("trials use the seeds of the comparison", "tests/comparison/test_study.py",
         "Job(arm, self.keys.tuning_seed, rate, True)", "Job(arm, self.seeds[0], rate, True)"),
        ("trials are not paid for", "tests/comparison/test_study.py",
         "(len(keys.seeds) + len(keys.rates) * keys.trial_share)", "len(keys.seeds)"),
    ],
    "comparison/folder.py": [
        ("seeds may be taken out again", "tests/comparison/test_study.py",
         "set(value) <= set(new or [])", "True"),
        ("every judgement is the first", "tests/comparison/test_runner.py",
         "summary.judgement.is_test and not self.judged.exists()", "summary.judgement.is_test"),
        ("an arm starts from weights that are still in training", "tests/comparison/test_runner.py",
         "if run and run.resolve()", "if False and run.resolve()"),
    ],
    "comparison/texts.py": [
        ("all is done after the first of two passes", "tests/comparison/test_sentences_of_runs.py",
         "_part(progress, 0, parts)", "progress"),
        ("other texts are the held-out one", "tests/comparison/test_texts.py",
         "        store,\n", "        run.corpus.validation,\n"),
    ],
    "comparison/statistics.py": [
        ("arms are paired with other seeds", STATISTICS,
         "for seed in shared]) for arm", "for seed in shared[:: 1 if arm == one else -1]]) for arm"),
        ("seeds: n instead of n - 1", STATISTICS,
         "by_seed.var(ddof=1)", "by_seed.var()"),
        ("a sample: n instead of n - 1", STATISTICS,
         "np.std(values, ddof=1)", "np.std(values)"),
        ("documents do not vary", STATISTICS,
         "document_variance -= min(both, seed_variance, document_variance)", "document_variance = 0.0"),
        ("one seed does for a winner", STATISTICS,
         "math.nan, float(square.sum())", "0.0, float(square.sum())"),
        ("Holm left out", STATISTICS,
         "len(values) - np.arange(len(values))", "np.ones(len(values))"),
        ("a winner before all runs are there", STATISTICS,
         "and not missing else math.nan", "else math.nan"),
        ("equivalence by seeds alone", STATISTICS,
         "tail(abs(inside), *self._scales) / 2", "tail(abs(inside), *self._scales[:1]) / 2"),
    ],
    "comparison/summary.py": [
        ("every arm has an equivalence test of its own", "tests/comparison/test_report.py",
         "holm([difference.p_within(margin) for difference in found.values()])",
         "[difference.p_within(margin) for difference in found.values()]"),
        ("a trial is compared", "tests/comparison/test_report.py",
         "r.seed in order and not r.trial", "r.seed in order"),
        ("a loss cost what was spent by the first evaluation", "tests/comparison/test_report.py",
         "Spent(math.nan, math.nan, math.nan)", "Spent(curve[0].tokens, curve[0].flops, curve[0].seconds)"),
    ],
    "comparison/table.py": [
        ("bits per token pass for bits per byte", "tests/comparison/test_report.py",
         "/ np.log(2) / r.document_bytes.sum()", "/ np.log(2) / r.document_tokens.sum()"),
    ],
    "comparison/charts.py": [
        ("a better loss is drawn higher", "tests/comparison/test_report.py",
         "y_of = _axis(low, high, HEIGHT - BOTTOM, TOP)", "y_of = _axis(low, high, TOP, HEIGHT - BOTTOM)"),
    ],
    "comparison/results.py": [
        ("curves leave sentence ends unpaid", "tests/comparison/test_report.py",
         'nats.get("nats_per_token_with_boundaries", nats["nats_per_token"])', 'nats["nats_per_token"]'),
        ("curves end on other documents than they begin", "tests/comparison/test_report.py",
         'judged.get("of_curve", judged)', "judged"),
    ],
    "comparison/tasks.py": [
        ("nats of some documents by the words of others", "tests/comparison/test_tasks.py",
         "for i in found.order]", "for i in range(len(found.order))]"),
        ("sentence ends are free beside their name", "tests/comparison/test_sentences_of_runs.py",
         "found.nats_by_document + found.end_nats_by_document", "found.nats_by_document"),
    ],
    "comparison/report.py": [
        ("the higher of two arms is tested to be the lower", "tests/comparison/test_report.py",
         "welch_lower(low, high)", "welch_lower(high, low)"),
        ("a sample is read as HTML", "tests/comparison/test_report.py",
         "…{escape(text)}</p>", "…{text}</p>"),
    ],
    "comparison/page.py": [
        ("folders of this machine are shown", "tests/comparison/test_report.py",
         'rpartition("/")[2] if', 'strip("\\t") if'),
    ],
}
# fmt: on
