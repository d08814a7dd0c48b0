"""Bugs of the plain decoder and of what it costs."""

DECODER = "tests/networks/test_decoder.py"
DROPOUT = "tests/networks/test_dropout.py"

# fmt: off
BUGS = {
    "networks/decoder.py": [
        ("experts of an interrupted pass count in the next", "tests/nn/test_moe.py",
         "        self.routings = []  # those of a pass that was interrupted\n", ""),
        ("learned positions stay on the host", "device",
         "index.to(x.device)", "index"),
        ("pads are read in decoding", "unequal_prompts",
         "starts = (self.pads[:, None]", "starts = (0 * self.pads[:, None]"),
        ("every step is at position 0", "decoding",
         "rotation(self.columns, x.shape[1]", "rotation(0, x.shape[1]"),
        ("columns are not counted", "decoding",
         "self.columns += x.shape[1]", "self.columns += 1"),
        ("a restricted state is not", "restricted",
         "reads = window + 1 if", "reads = given if"),
        ("window in the cache but not in the mask", "decoding",
         "causal(starts, self.config.window, positions)", "causal(starts, None, positions)"),
        ("a fork shares its caches", "fork",
         "[cache.fork(rows) for cache in self.caches]", "self.caches"),
        ("a fork forgets its pads", "fork",
         "other.columns, other.pads = self.columns, pads", "other.columns = self.columns"),
        ("learned positions do not restart", "documents",
         "torch.arange(x.shape[1]) - batch.starts", "torch.arange(x.shape[1]) + 0 * batch.starts"),
        ("learned positions count the pads", "unequal_prompts",
         "(columns - self.pads[:, None])", "(columns + 0 * self.pads[:, None])"),
        ("no final norm", DECODER,
         "hidden = self.norm(self.states(reader", "hidden = (self.states(reader"),
        ("attention drops no weights", DROPOUT,
         "plan=self.plan, dropout=self.masks.rate)", "plan=self.plan)"),
        ("logits of the first of several tokens", "decoding",
         "self.network.norm(x[:, -1])", "self.network.norm(x[:, 0])"),
        ("a second prompt is read on", "prompts",
         "self.rows, self.columns > 0", "self.rows, False"),
        ("without a generator nothing is drawn", "initialisation",
         "        initialise(self, c.init", "        if generator: initialise(self, c.init"),
        ("learned positions end in an index error", DECODER,
         "if index.numel() and int(index.max()) >= self.context", "if False"),
        ("a step costs one key too few", "flops",
         "keys=lambda n: read(n) + 1", "keys=lambda n: read(n)"),
        ("the cache costs one head", "cache",
         "2 * c.depth * c.key_heads", "2 * c.depth"),
    ],
    "networks/network.py": [
        ("rows of a step are mixed", "steps",
         "len(tokens) != rows or ", ""),
        ("prompts keep the types of their arrays", "prompts",
         "list(map(index, text.tolist() if isinstance(text, np.ndarray | Tensor) else text))", "list(text)"),
        ("spare ids take part", "probabilities",
         "self.output_weight[: self.vocabulary]", "self.output_weight"),
    ],
}
# fmt: on
