"""Bugs of exported and imported models."""

OUTSIDE = "tests/export/test_hugging_face.py"
FOREIGN = "tests/export/test_foreign.py"

# fmt: off
BUGS = {
    "export/weights.py": [
        ("settings are not kept", "export",
         "cls.Config.model_validate_json(json.dumps(settings))", "cls.Config()"),
    ],
    "export/modelling.py": [
        ("padding takes learned positions", "tests/export/test_modelling.py",
         "longest is not None and longest < n", "longest is not None and longest < T"),
        ("a lost cache is taken for padding", "tests/export/test_modelling.py",
         "if shown.shape[1] > tokens.shape[1]:", "if False:"),
        ("nothing is recomputed", "tests/export/test_modelling.py",
         "module.recompute = enable", "module.recompute = False"),
        ("training under transformers reads every text in the same blocks", "tests/export/test_modelling.py",
         "if self.training and torch.is_grad_enabled() else None", "if False else None"),
        ("beams go on with the wrong text", OUTSIDE,
         "self.session.fork(beam_idx)", "self.session.fork()"),
        ("padding before a text is read", OUTSIDE,
         "hidden = self.network.read(Batch(moved, moved,", "hidden = self.network.read(Batch(tokens, tokens,"),
        ("a mask with holes is read as text", OUTSIDE,
         "(begins.sum(1) != 1).any()", "False"),
        ("the first token after padding has a loss", "tests/export/test_modelling.py",
         "if attention_mask is not None:  # nothing", "if False:  # nothing"),
        ("a part of a step weighs as much as any other", "tests/export/test_modelling.py",
         "(asked != IGNORE).sum() if num_items_in_batch is None else num_items_in_batch", "(asked != IGNORE).sum()"),
        ("a mask hides what a cache has read", "tests/export/test_modelling.py",
         "not torch.equal(mask.bool(), read)", "False"),
    ],
    "export/bundle.py": [
        ("a bundle leaves out what its parts name", "tests/export/test_bundle.py",
         "self.need(source.name, name)", "pass"),
    ],
    "export/foreign.py": [
        ("a head of its own is thrown away", "tests/export/test_foreign.py",
         "if not torch.equal(head, weights.get(table, head)):", "if False:"),
        ("rotary pairs of neighbours", FOREIGN,
         '"positions": "halves"', '"positions": "adjacent"'),
        ("gate and up change places", FOREIGN,
         '"mlp.gate_proj mlp.up_proj"', '"mlp.up_proj mlp.gate_proj"'),
        ("the base of rotary positions is the usual one", FOREIGN,
         'float(_rotary(described).get("rope_theta", 10_000))', "10_000.0"),
        ("scaled rotary positions are taken as they are not", FOREIGN,
         'kind in (None, "default")', "True"),
        ("layers that are too many are left out", FOREIGN,
         "if missing or weights:", "if missing:"),
        ("a Mistral reads all of a document", FOREIGN,
         'LLAMA.keys | {"window": "sliding_window"}', "LLAMA.keys"),
        ("a GPT-2 has the other GELU", FOREIGN,
         '"gelu_new": "gelu_tanh"', '"gelu_new": "gelu"'),
        ("a GPT-2 is read only with the prefix that transformers writes", FOREIGN,
         "architecture.prefix if any(name.startswith(architecture.prefix) for name in weights) else \"\"",
         "architecture.prefix"),
    ],
    "nn/cache.py": [
        ("a fork of rows keeps the order of its caches", "fork_of_rows",
         ":entries], rows, dim=1)", ":entries], rows if rows is None else 0 * rows, dim=1)"),
    ],
    "networks/decoder.py": [
        ("a fork of rows keeps the order of its padding", "fork_of_rows",
         "rows_of_state(self.pads, rows)", "rows_of_state(self.pads, rows if rows is None else 0 * rows)"),
    ],
    "networks/context_ready_session.py": [
        ("a fork of rows keeps the order of what is carried", "fork_of_rows",
         "rows_of_state(self.carry, rows)", "rows_of_state(self.carry, rows if rows is None else 0 * rows)"),
    ],
}
# fmt: on
