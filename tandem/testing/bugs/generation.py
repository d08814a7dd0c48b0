"""Bugs of sampling and streaming."""

GENERATE = "tests/generation/test_generate.py"

# fmt: off
BUGS = {
    "generation/sampling.py": [
        ("a nucleus one token too small", "tests/generation/test_sampling.py",
         "p_BK.cumsum(-1) - p_BK >= top_p", "p_BK.cumsum(-1) >= top_p"),
        ("all rows draw alike", "tests/generation/test_sampling.py",
         'f"{seed}/{row}"', 'f"{seed}"'),
    ],
    "generation/generate.py": [
        ("a stopped row goes on", GENERATE,
         "if drawn[row] != stop and left[row]]", "if left[row]]"),
        ("one token too many", GENERATE,
         "if drawn[row] != stop and left[row]]", "if drawn[row] != stop and left[row] >= 0]"),
        ("a prompt and what follows are one word", GENERATE,
         "TextStream(tokenizer, _end(tokenizer, text))", "TextStream(tokenizer)"),
        ("prompts keep the types of their arrays", GENERATE + "::test_prompts_are_any_sequences_of_whole_numbers",
         "[ids_of(prompt) for prompt in prompts]", "[list(prompt) for prompt in prompts]"),
        ("characters come in halves", GENERATE,
         "if piece.endswith(\"\\ufffd\")", "if False"),
    ],
}
# fmt: on
