"""Bugs of sentence streams, of their baselines, and of what is asked of them."""

STREAMS = "tests/corpus/test_streams.py"
ROWS = "tests/corpus/test_boundary_rows.py"
GIST = "tests/networks/test_boundary_decoder.py"
LIKELIHOOD = "tests/evaluation/test_likelihood.py"
PROBE = "tests/evaluation/test_father_son.py"
GATES = "tests/analysis/test_gates.py"

# fmt: off
BUGS = {
    "corpus/streams.py": [
        ("steps of an epoch change with the streams", STREAMS,
         "// (2 * rows * context)", "// (2 * rows * settings.sentences)"),
        ("a document is cut anew where the streams grow", STREAMS,
         "self.most_sentences(epoch * self.per_epoch + begin * self.per_epoch // self.tokens)",
         "self.most_sentences(step)"),
        ("the weight of sentence ends restarts with the epoch", STREAMS,
         "1.0 if step < self._in_steps", "1.0 if step % self.per_epoch < self._in_steps"),
        ("dropout is warmed in by optimisation steps", STREAMS,
         "return self.sentence_steps(step) >= moment", "return step >= moment"),
        ("a run ends in a stage of one step", STREAMS,
         "math.ceil(round(every * self.steps, 6))", "round(every * self.steps)"),
        ("sentence steps forget that streams grew", STREAMS,
         "grown * (grown - 1) // 2 + rest * grown", "0 + rest * grown"),
        ("a document ends in a stream of what is left", STREAMS,
         "np.array_split(np.arange(len(lengths)), -(-len(lengths) // most))",
         "np.split(np.arange(len(lengths)), range(most, len(lengths), most))"),
        ("a stream that begins between two steps is lost", STREAMS,
         "if low <= begin + stream.offset < end:", "if low < begin + stream.offset < end:"),
        ("parts know their own totals alone", STREAMS,
         "rows_at, tokens_at = stream_totals(streams)", "rows_at, tokens_at = made.rows_at, made.tokens_at"),
        ("streams are dealt as they come", STREAMS,
         "key=lambda s: -len(s.lengths)", "key=lambda s: 0"),
        ("streams may be too long for a step", STREAMS,
         "if S * cap * self.per_epoch > self.tokens:", "if S * cap > self.tokens:"),
        ("the end of a document is a sentence end that is paid for", STREAMS,
         "np.append(np.full(len(index[-1]) - 1, i), -1)", "np.append(np.full(len(index[-1]) - 1, i), i)"),
    ],
    "corpus/boundary_rows.py": [
        ("windows ask the boundaries of their overlap twice", ROWS,
         "return following > asked if asked else", "return (following > asked) | (index < 0) if asked else"),
        ("a sentence ends behind the first token of the next", ROWS,
         "np.repeat(starts - first, 2)", "np.repeat(starts - first + 1, 2)"),
        ("a document is not begun", ROWS,
         "if first == 0:", "if first < 0:"),
        ("rows read by positions, not by tokens", ROWS,
         "self.begin + step * self.rows * self.row_tokens", "self.begin + step * self.rows * self.context"),
    ],
    "networks/boundary_decoder.py": [
        ("the ends of another document are read", GIST,
         "Span(before.gather(1, starts)[:, asking]", "Span(0 * before.gather(1, starts)[:, asking]"),
        ("the gist flag is asked of the queries", GIST,
         "before.gather(1, sentences)[:, asking])", "before.gather(1, starts)[:, asking])"),
        ("a session does not see where sentences begin", GIST,
         "tokens.cpu() == self.network.vocabulary + 1, columns, 0)",
         "tokens.cpu() == self.network.vocabulary + 2, columns, 0)"),
        ("every step of a session opens a sentence", "decoding",
         "self.sentences[:, -1:] if self.columns", "0 * self.sentences[:, -1:] + self.columns if self.columns"),
        ("boundaries have no share of the probability", GIST,
         "spare = 0 if self.config.sentences is None else 2", "spare = 0"),
    ],
    "evaluation/likelihood.py": [
        ("sentence ends are counted in the score", LIKELIHOOD,
         "(nats, index > 0)", "(nats, index != 0)"),
        ("first tokens are counted in the score", LIKELIHOOD,
         "(nats, index > 0)", "(nats, (index > 0) | (index == 0))"),
        ("the published count keeps the document end", LIKELIHOOD,
         "text = nats + firsts - lasts", "text = nats + firsts"),
    ],
    "analysis/gates.py": [
        ("memories of another sentence step are exchanged", GATES,
         "step = np.where(filled > 0, reading[windows[np.arange(len(filled)), filled - 1]], 0)", "step = filled"),
        ("nothing is exchanged", GATES,
         "other[same] = np.roll(same, -1)", "other[same] = same"),
        ("attention goes to thoughts that are not there", GATES,
         "score_RHLF.masked_fill(hidden, -torch.inf)", "score_RHLF"),
    ],
    "evaluation/father_son.py": [
        ("a space follows the query", PROBE,
         '[*(f"{sentence} " for sentence in text[:-1]), text[-1]]', '[f"{sentence} " for sentence in text]'),
        ("pairs are asked in one order", PROBE,
         "[*chosen, *((son, father) for father, son in chosen)]", "[*chosen, *chosen]"),
        ("pairs are the first of the list", PROBE,
         "[every[i] for i in shuffled(len(every), seed)[: count // 2]]", "every[: count // 2]"),
        ("the error of a margin holds how frequent names are", PROBE,
         "margin.reshape(2, -1).mean(0)", "margin"),
        ("a prompt may end anywhere", PROBE,
         "if not network.divides:", "if True:"),
        ("margins of the distractor", PROBE,
         "margin = nll[:, 1] - nll[:, 0]", "margin = nll[:, 0] - nll[:, 1]"),
        ("a deviation in place of an error", PROBE,
         " / math.sqrt(len(both))", ""),
        ("the first tokens of names are compared", PROBE,
         "if len(ids) == 1}", "if len(ids)}"),
    ],
}
# fmt: on
