"""Bugs on the way from text to batches."""

LIKELIHOOD = "tests/evaluation/test_likelihood.py"
VIEWS = "tests/corpus/test_views.py"

# fmt: off
BUGS = {
    "corpus/order.py": [
        ("every epoch is the same", "tests/corpus/test_order.py",
         "self.seed, number, self.number", "self.seed, 0, self.number"),
        ("sources take turns whatever their shares", "tests/corpus/test_order.py",
         "begins / share", "begins / 1"),
        ("a slice misses what was due long before it", "tests/corpus/test_order.py",
         "1 + sum(source.longest", "1 + min(source.longest"),
        ("a source begins again too early", "tests/corpus/test_order.py",
         "min(1 + int(np.searchsorted(epoch.ends, position)), len(epoch.ends))",
         "min(1 + int(np.searchsorted(epoch.ends, position)), len(epoch.ends) - 1)"),
    ],
    "corpus/prepare.py": [
        ("held-out documents that are trained on are not counted", "tests/corpus/test_prepare.py",
         "sum(digest in stand_in_train", "sum(digest in ()"),
        ("a tokenizer is trained without the shares", "tests/corpus/test_prepare.py",
         "SAMPLE * share * done / size", "SAMPLE * done / size"),
        ("every document is of the first source", "tests/corpus/test_prepare.py",
         "[document.number for document in documents]", "[0 for document in documents]"),
        ("further texts are not told apart", "tests/corpus/test_prepare.py",
         "[part.source.identity for part in parts], tokenizer.hash]", "tokenizer.hash]"),
    ],
    "corpus/hub.py": [
        ("the text of a commit is that of the newest", "tests/corpus/test_hub.py",
         "revision=self.revision, ", ""),
    ],
    "corpus/store.py": [
        ("unknown words are counted, not their bytes", "tests/comparison/test_texts.py",
         "held.sum(dtype=np.int64)", "len(held)"),
        ("a process outlives the one that was killed as it began", "tests/corpus/test_sentences.py",
         "if os.getppid() != parent:", "if False:"),
        ("documents may end anywhere if as many do", "tests/corpus/test_store.py",
         "ends != len(self) or (self.tokens[self.offsets[1:] - 1] != self.eos).any()", "ends != len(self)"),
    ],
    "corpus/files.py": [
        ("a section of WikiText is an article", "tests/corpus/test_files.py",
         'marks.count("=") == 2', 'marks.count("=") >= 2'),
    ],
    "corpus/splitters.py": [
        ("pysbd is trusted with every line", "tests/corpus/test_sentences.py",
         'if "".join(found) != bare or len(bare) > LONGEST_LINE', "if len(bare) > LONGEST_LINE"),
        ("pysbd is given the white space around a line", "tests/corpus/test_sentences.py",
         "bare = line.strip()", 'bare = line.removesuffix("\\n")'),
        ("pysbd is given whole documents", "tests/corpus/test_sentences.py",
         '_LINE = re.compile(r"[^\\n]*\\n|[^\\n]+")', '_LINE = re.compile(r"(?s).+")'),
        ("a line that pysbd changes is cut inside numbers", "tests/corpus/test_sentences.py",
         r'(?<=[.!?])(?=\s)', r"(?<=[.!?])"),
    ],
    "corpus/sentences.py": [
        ("processes outlive the one that is killed", "tests/corpus/test_sentences.py",
         ", end_with_parent, asked", ""),
        ("the document end is not counted", "tests/corpus/test_sentences.py",
         "append=len(document.sizes) + 1", "append=len(document.sizes)"),
        ("the open sentence of a prompt is too short", "tests/networks/test_prompts_of_sentences.py",
         "max(capped[-1], min(SHORTEST, config.cap))", "max(capped[-1], 0)"),
        ("a document end is a span of its own", "tests/corpus/test_sentences.py",
         "max(1, len(document.sizes)), config.every", "len(document.sizes) + 1, config.every"),
        ("prompts have no cap", "tests/networks/test_prompts_of_sentences.py",
         "        if config.cap:", "        if config.cap and ends:"),
    ],
    "corpus/boundaries.py": [
        ("a token of two belongs to the later sentence", "tests/corpus/test_boundaries.py",
         "piece[visible[first[has_text]]]", "piece[visible[last[has_text]]]"),
        ("a long sentence is cut outside its middle", "tests/corpus/test_boundaries.py",
         "range(-(-length // 4), 3 * length // 4 + 1)", "range(1, length)"),
        ("the cut falls on the later of two places", "tests/corpus/test_boundaries.py",
         "abs(2 * n - length), n)", "abs(2 * n - length), -n)"),
        ("merging forgets the cap", "tests/corpus/test_boundaries.py",
         "merged and merged[-1] + length <= cap", "merged"),
        ("a short sentence joins the next first", "tests/corpus/test_boundaries.py",
         "merged[-1] + length <= cap", "length + following > cap"),
    ],
    "corpus/views.py": [
        ("the document end is not asked", LIKELIHOOD,
         "while last < end:", "end -= 1\n        while last < end:"),
        ("windows score their overlap twice", LIKELIHOOD,
         "column + asked - first, column", "column, column"),
        ("windows do not overlap", LIKELIHOOD,
         "max(1, context // 2)", "context"),
        ("a row goes on in the next document", VIEWS,
         "np.where(is_first, IGNORE, tokens)", "tokens"),
        ("a document reads the row before", VIEWS,
         "begins[:-1].reshape(rows, T) - row_begins[:, None]", "0 * begins[:-1].reshape(rows, T)"),
        ("micro-batches repeat their rows", VIEWS,
         "self.read(step) + part * rows * T", "self.read(step)"),
    ],
}
# fmt: on
