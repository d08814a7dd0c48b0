"""Tasks of the harness by the adapter and by the exported model, through benchmarks/tasks.py as one would run it."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tandem.export.weights import export
from tandem.networks.decoder import Decoder
from tandem.networks.sps import SPS

for _module in ("transformers", "accelerate", "lm_eval"):
    pytest.importorskip(_module)

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "tasks.py"
ITEMS = {
    "hellaswag_val": [
        {"query": f"the cat {w} on", "choices": ["the mat", "the mat naïve", "café"], "gold": i % 3}
        for i, w in enumerate(("sat", "the", "naïve café sat on the mat " * 9, "on", "mat"))  # one is cut on the left
    ],
    "lambada_openai_test": [{"context": f"the {w} sat on the", "continuation": w} for w in ("cat", "mat", "the cat")],
}


@pytest.mark.slow
def test_the_exported_model_reaches_the_numbers_of_the_adapter_at_every_batch_size(tmp_path, tokenizer):
    (tmp_path / "eval").mkdir()
    for name, items in ITEMS.items():
        lines = "".join(json.dumps(item) + "\n" for item in items)
        (tmp_path / "eval" / f"{name}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    for network in Decoder, SPS:
        config, generator = network.Config(width=32, heads=2, depth=2), torch.Generator().manual_seed(0)
        drawn = network(config, tokenizer.vocabulary, 24, generator)
        for parameter in drawn.parameters():
            parameter.data *= 3
        export(drawn, tokenizer, {}, tmp_path / network.__name__)
    own = {"TANDEM_DATA": str(tmp_path), "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, SCRIPT, tmp_path / "Decoder", tmp_path / "SPS", "--tasks", "hellaswag,lambada_openai"]
    done = subprocess.run(
        [*map(str, command), "--rows", "1,3", "--out", str(tmp_path / "found")],
        **{"capture_output": True, "text": True, "env": {**os.environ, **own}},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    _, *found = map(json.loads, (tmp_path / "found").read_text().splitlines())
    assert len(found) == 2 * 2 * 2 * 2 and {record["items"] for record in found} == {5, 3}
    assert all(record["items that differ"] == record["metrics that differ"] == 0 for record in found)
    assert 0 < max(record["furthest nats"] for record in found) < 1e-3
