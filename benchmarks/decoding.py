"""One decoding step from the cache against a forward pass over the whole text, which gives the same logits.

    python benchmarks/decoding.py [--pairs 20] [--threads 1] [--out results.jsonl]

The plain decoder of 3.9 M parameters (8 blocks, C 176, 4 heads, vocabulary 4,096), float32, one row, text of 512
tokens. A pair is a forward pass and eight steps, as in generation: after other work, the first step finds its weights
evicted from the processor's cache. Fails below 20 x. A step computes little and reads every weight once, so it gains
nothing from a second thread and loses much by it when the second core is busy: try --threads 1.
"""

import sys
from typing import Any

import torch
from machine import compare, header, options_of, write

from tandem.corpus import Batch
from tandem.networks.decoder import Decoder

LENGTH, STEPS, REQUIRED = 512, 8, 20


def main() -> int:
    arguments = options_of(__doc__, pairs=20)
    arguments.add_argument("--threads", type=int)
    options = arguments.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)

    shape: Any = {"width": 176, "heads": 4, "depth": 8}
    network = Decoder(Decoder.Config(**shape), 4096, 1024, torch.Generator().manual_seed(0))
    text = torch.randint(4096, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    batch = Batch(text, text, torch.zeros_like(text))
    session = network.session(1)
    logits = session.prefill(text.tolist())

    @torch.no_grad()
    def forward():
        hidden, _ = network(network.embed(text), batch)
        return hidden[:, -1] @ network.head.T

    def steps():
        for _ in range(STEPS):
            session.step(text[:, 0])
        session.columns -= STEPS  # every pair starts from the same 512 tokens
        for cache in session.caches:
            cache.end -= STEPS

    torch.testing.assert_close(forward(), logits, rtol=1e-4, atol=1e-4)
    print(header())
    record = compare(f"forward of {LENGTH} tokens / {STEPS} cached steps", forward, steps, pairs=options.pairs)
    record["ratio_per_step"] = STEPS * record["ratio"]
    low, high = (STEPS * quartile for quartile in record["quartiles"])
    print(f"  for one step {record['ratio_per_step']:.1f} x  [{low:.1f}, {high:.1f}]; required {REQUIRED} x")
    write(options.out, [record])
    return 0 if record["ratio_per_step"] >= REQUIRED else 1


if __name__ == "__main__":
    sys.exit(main())
