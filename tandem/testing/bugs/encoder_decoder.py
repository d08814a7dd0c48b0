"""Bugs of the encoder-decoder, of span corruption and of prefix LM."""

NETWORKS = "tests/networks/test_encoders.py"
PREFIXES = "tests/corpus/test_prefixes.py"
CORRUPTION = "tests/corpus/test_corruption.py"
PREFIX_LM = "tests/objectives/test_prefix_lm.py"

# fmt: off
BUGS = {
    "networks/encoder_decoder.py": [
        ("texts with gaps cost what prompts do", "tests/networks/test_encoders.py",
         "            elif continued:\n", "            else:\n"),
        ("what opens a text stays on the host", "device",
         "((places == 0) & prompted)[:, None].to(x.device)", "((places == 0) & prompted)[:, None]"),
        ("the encoder reads what it is asked for", "causality",
         "kinds = index < last + torch.as_tensor(reads_all).expand_as(starts).flatten(),", "kinds = index >= 0,"),
        ("a document sees the context of the one before", "documents",
         "return Span(first, first + numbers", "return Span(first * 0, first + numbers"),
        ("what was generated before is of one document", "documents",
         "own=causal(writing[generated][None])", "own=causal(0 * writing[generated][None])"),
        ("a prompt of one token is its own context", "decoding",
         "[text[:-1] for text in texts]", "[text[:-1] or text for text in texts]"),
        ("generation starts from the first token of the prompt", "decoding",
         "[text[-1] for text in texts]", "[text[0] for text in texts]"),
        ("a session keeps the last token from the context, training does not", "decoding",
         "self.read(texts)", "self.read([text[:-1] for text in texts])"),
        ("a start of its own is of the session alone", "decoding",
         "opens = ((places == 0)", "opens = ((places < 0)"),
        ("what was cut out starts as after a prompt", NETWORKS,
         "return first != start_of_generation(self.vocabulary)", "return first >= 0"),
        ("the context that is padded is read with its pads", "unequal_prompts",
         "self.lo + N - pads, N if", "torch.full_like(pads, N), N if"),
        ("positions go on behind the context in training alone", "decoding",
         "N if goes_on else 0", "0"),
        ("latents are not turned in training", "decoding",
         "*block.keys(self.latents, self.turned))", "*block.keys(self.latents, None))"),
        ("forks write into one cache", "fork",
         "[cache.fork(rows) for cache in self.caches]", "self.caches"),
        ("latents are projected for nothing", "flops",
         "linear_work(c) + c.decoder_layers * latent", "linear_work(c)"),
        ("a start of its own is not kept", "cache",
         "G * D * (n + more)", "G * D * n"),
        ("a whole text is scored with its targets in the encoder", NETWORKS,
         "if batch.blocks is None:", "if batch.blocks is None and False:"),
        ("context is projected at every step", NETWORKS,
         "        if self.context:\n", "        if self.context and [b.keys(x, None) for b in network.stack[-1:]]:\n"),
    ],
    "networks/prefix_decoder.py": [
        ("a session reads its prompt causally", "decoding",
         "if self.reads_prompt else span", "if not queries else span"),
        ("a prompt reads one token too many", NETWORKS,
         "generated_from(batch.starts, batch.blocks) + 1", "generated_from(batch.starts, batch.blocks) + 2"),
    ],
    "nn/cross.py": [
        ("queries to the context skip their norm", "gradients",
         "self.cross_q(self.cross_norm(x))", "self.cross_q(x)"),
    ],
    "corpus/prefixes.py": [
        ("all rows have one break point", PREFIXES,
         "0 if self.shared else 1 + row", "0"),
        ("every process draws for rows from 0", PREFIXES,
         "first, T = part * equal_part(self.rows, parts)", "first, T = 0 * equal_part(self.rows, parts)"),
        ("a document is never asked for its last token alone", PREFIXES,
         "np.asarray(most) + 1)", "np.maximum(np.asarray(most), 2))"),
        ("the prefix is asked for, too", PREFIXES,
         "batch.targets.where(asked, IGNORE)", "batch.targets"),
        ("generation starts with the first token that is asked", PREFIXES,
         "np.maximum(asks, 1))[document] - 1)", "np.maximum(asks, 1))[document])"),
    ],
    "corpus/corruption.py": [
        ("documents are glued", CORRUPTION,
         "np.full(len(context) + len(asked), begin)", "np.full(len(context) + len(asked), 0)"),
        ("one sentinel stands for all", CORRUPTION,
         "names = sentinel + np.cumsum(opens) - 1", "names = sentinel + 0 * np.cumsum(opens)"),
        ("the document end is cut out", CORRUPTION,
         "(ordinary := text != store.eos).any()", "(ordinary := text >= 0).any()"),
        ("a text ends in a piece", CORRUPTION,
         "_parts(left + 2, k + 1, generator) - np.eye(k + 1, dtype=int)[[0, k]].sum(0)",
         "np.r_[left - k + 1, np.ones(k - 1, int), 0]"),
        ("every document draws alike", CORRUPTION,
         "drawing(CORRUPTED, self.packed.seed, step, row)", "drawing(CORRUPTED, self.packed.seed, 0, row)"),
    ],
    "objectives/next_token.py": [
        ("a share of the micro-batch's own mean", "accumulation",
         'loss / max(1, counts["nll"])', "loss / max(1, int(asked.sum()))"),
    ],
    "objectives/span_corruption.py": [
        ("the sampler asked for is not the one that cuts", NETWORKS,
         "Corruption(c.density, c.span, c.sentinels, c.sampler)", "Corruption(c.density, c.span, c.sentinels)"),
    ],
    "objectives/prefix_lm.py": [
        ("prefix LM reads again what was read before it", PREFIX_LM,
         "rows = rows.from_token(found[-1].view.read(since))", "pass"),
        ("sentinels are asked for among the words of texts", PREFIX_LM,
         "return self.first.loss(network, batch, counts)", "return asked_loss(network, batch, counts)"),
        ("what is asked first is asked to the end", PREFIX_LM,
         "Phase(since, PrefixRows(", "Phase(steps, PrefixRows("),
    ],
    "evaluation/likelihood.py": [
        ("suffixes are scored by the windows of whole texts", PREFIX_LM,
         "    if prefix:\n", "    if not prefix and prefix:\n"),
    ],
}
# fmt: on
