"""Bugs of tasks and of serving many prompts."""

CONTINUATIONS = "tests/evaluation/test_continuations.py"
HARNESS = "tests/evaluation/test_harness.py"
PROMPTS = "tests/comparison/test_prompts.py"

# fmt: off
BUGS = {
    "evaluation/continuations.py": [
        ("rows that are through count what they are fed", CONTINUATIONS,
         "nats[: len(row)].sum()", "nats.sum()"),
        ("the second continuation follows the first", CONTINUATIONS,
         "session.fork() if place < most - 1 else session", "session"),
        ("a sentence begin counts", HARNESS,
         "tokens_BT <= network.vocabulary", "tokens_BT <= network.vocabulary + 1"),
        ("greedy by its first token alone", CONTINUATIONS,
         "bool(is_best[: len(row)].all())", "bool(is_best[:1].all())"),
        ("a batch without room for its longest continuation", CONTINUATIONS,
         "is_too_long = longest is not None and", "is_too_long = False and longest is not None and"),
        ("the newest tokens are left out", CONTINUATIONS,
         "prompt[-room:]", "prompt[:room]"),
        ("the last token needs room, too", CONTINUATIONS,
         "network.context + 1 - len(continuation)", "network.context - len(continuation)"),
    ],
    "evaluation/harness.py": [
        ("an error of the adapter is told as the harness's", HARNESS,
         'name.startswith("tandem.")', 'name.startswith("lm_eval.tandem.")'),
        ("rolling likelihoods in the order of documents scored", HARNESS,
         "log_likelihoods[found.order]", "log_likelihoods[: len(found.order)]"),
        ("a stop string stays in the text", HARNESS,
         "text.index(stop) for stop", "text.index(stop) + len(stop) for stop"),
        ("texts in the order of their prompts' lengths", HARNESS,
         "in zip(rows, written, strict=True)", "in zip(sorted(rows), written, strict=True)"),
        ("the space before a continuation is lost", HARNESS,
         "self.tokenizer, context + continuation", "self.tokenizer, context + continuation.strip()"),
        ("white space at the end of a context is its own", HARNESS,
         "self.tokenizer.encode(context.rstrip())", "self.tokenizer.encode(context)"),
        ("a first token is asked", HARNESS,
         "text[max(1, given) - 1]", "text[given - 1] if given else 0"),
        ("sentences of a continuation are not known to end", HARNESS,
         "return read[:cut], read[cut:]", "return read[:cut], [t for t in read[cut:] if t < self.network.vocabulary]"),
        ("sentence ends of rolling texts are free", HARNESS,
         "-found.nats_by_document - found.end_nats_by_document", "-found.nats_by_document"),
    ],
    "evaluation/likelihood.py": [
        ("the error of a mean in place of that of a ratio", "tests/evaluation/test_likelihood.py",
         "above.sum() / below.sum() * below", "above.mean()"),
    ],
    "generation/generate.py": [
        ("prompts served later draw as the first ones did", "tests/generation/test_generate.py",
         "generators[first : first + len(starts)]", "generators[: len(starts)]"),
    ],
    "comparison/prompts.py": [
        ("a line for the newest only", PROMPTS,
         "while current in ended:", "if current in ended:"),
        ("texts show before their turn", PROMPTS,
         "if current not in ended:", "if False:"),
    ],
}
# fmt: on
