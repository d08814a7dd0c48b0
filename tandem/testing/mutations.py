"""Bugs of the kind people ship, each with the test that must then fail: what keeps the tests honest.

    python -m tandem.testing.mutations                   all of them, about four seconds each
    python -m tandem.testing.mutations --only pads       those whose name contains a word
    python -m tandem.testing.mutations --one-per-network

From a checkout: package and tests are copied to a temporary folder, and there one mutation at a time is applied, its
test run, and taken back. Exit status 1 if any survives. `applied` does the same inside a running process, where the
mutation lies in functions, and takes no time.
"""

import argparse
import contextlib
import importlib
import inspect
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType

import tandem.networks  # noqa: F401 - importing it registers them
from tandem.recipe import registered

PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Mutation:
    """`text`, which occurs once in `file` of the package, is `replaced`; then `test` must fail.

    test: the name of a check of the contract, or a file of tests and, after ::, a test in it.
    """

    name: str
    file: str
    text: str
    replaced: str
    test: str

    @property
    def mutated(self) -> str:
        """The file with its bug."""
        source = (PACKAGE / self.file).read_text("utf-8")
        assert source.count(self.text) == 1, f"{self.name}: {self.text!r} occurs {source.count(self.text)} times"
        return source.replace(self.text, self.replaced)

    @property
    def pytest_arguments(self) -> list[str]:
        if self.test.startswith("tests/"):
            return [self.test]
        return ["tests/networks/test_contract.py", "-k", f"test_network and -{self.test}]"]


def _mutations(file: str, *rows: tuple[str, str, str, str]) -> list[Mutation]:
    """Of one file: (name, test, text, replaced)."""
    return [Mutation(name, file, text, replaced, test) for name, test, text, replaced in rows]


DECODER = "tests/networks/test_decoder.py"
LIKELIHOOD = "tests/evaluation/test_likelihood.py"
GENERATE = "tests/generation/test_generate.py"
CACHE = "tests/nn/test_cache.py"
VIEWS = "tests/corpus/test_views.py"
BAGS = "tests/corpus/test_bags.py"
MOE = "tests/nn/test_moe.py"
PHASES = "tests/objectives/test_phases.py"
SUPERPOSITION = "tests/objectives/test_superposition.py"
SWITCH = "tests/training/test_switch.py"
STATISTICS = "tests/comparison/test_statistics.py"
CHECKPOINT = "tests/training/test_checkpoint.py"
PARALLEL = "tests/training/test_parallel.py"

# fmt: off
MUTATIONS = [
    *_mutations(
        "networks/decoder.py",
        ("pads are read in decoding", "unequal_prompts",
         "starts = (self.pads[:, None]", "starts = (0 * self.pads[:, None]"),
        ("every step is at position 0", "decoding",
         "rotation(self.columns, tokens", "rotation(0, tokens"),
        ("columns are not counted", "decoding",
         "self.columns += tokens.shape[1]", "self.columns += 1"),
        ("window in the cache but not in the mask", "decoding",
         "causal(batch.starts, self.config.window)", "causal(batch.starts)"),
        ("a fork shares its caches", "fork",
         "[cache.fork() for cache in self.caches]", "self.caches"),
        ("a fork forgets its pads", "fork",
         "other.columns, other.pads = self.columns, self.pads", "other.columns = self.columns"),
        ("spare ids take part", "probabilities",
         ".weight[: self.vocabulary]", ".weight"),
        ("learned positions do not restart", "documents",
         "torch.arange(x.shape[1]) - batch.starts", "torch.arange(x.shape[1]) + 0 * batch.starts"),
        ("learned positions count the pads", "unequal_prompts",
         "(columns - self.pads[:, None])", "(columns + 0 * self.pads[:, None])"),
        ("no final norm", DECODER,
         "return self.norm(x)", "return x"),
        ("logits of the first of several tokens", "decoding",
         "network.norm(x[:, -1])", "network.norm(x[:, 0])"),
        ("a step costs one key too few", "flops",
         "keys=lambda n: read(n) + 1", "keys=lambda n: read(n)"),
        ("the cache costs one head", "cache",
         "2 * c.depth * c.key_heads", "2 * c.depth"),
    ),
    *_mutations(
        "nn/spans.py",
        ("a token reads the next", "causality",
         "i + 1 - window), i + 1)\n\n", "i + 1 - window), (i + 2).clamp_max(int(i.max()) + 1))\n\n"),
        ("a window too long", DECODER,
         "torch.maximum(starts, i + 1 - window)", "torch.maximum(starts, i - window)"),
        ("documents are ignored", "causality",
         "Span(starts if window is None", "Span(0 * starts if window is None"),
    ),
    *_mutations(
        "nn/tiled.py",
        ("a mask one key too wide", "tests/nn/test_attention.py",
         "[(lo[:, s] <= j) & (j < hi[:, s])", "[(lo[:, s] <= j) & (j <= hi[:, s])"),
    ),
    *_mutations(
        "nn/block.py",
        ("no norm before attention", "tests/nn/test_block.py",
         "self.qkv(self.norm_attention(x))", "self.qkv(x)"),
        ("keys are not normed", "tests/nn/test_block.py",
         "(self.norm_q(q), self.norm_k(k))", "(self.norm_q(q), k)"),
        ("the rotation's float32 reaches the reader", "tests/nn/test_block.py",
         ".to(v.dtype).split((H, G)", ".split((H, G)"),
        ("no residual of attention", "tests/nn/test_block.py",
         "return x + self.output(", "return self.output("),
        ("only the first block is compiled", "tests/nn/test_block.py",
         "for block in blocks:", "for block in blocks[:1]:"),
    ),
    *_mutations(
        "nn/rope.py",
        ("pairs of the other kind", "tests/nn/test_rope.py",
         "x_BTHD.unflatten(-1, (-1, 2)).unbind(-1)", "x_BTHD.chunk(2, dim=-1)"),
        ("angles of half the width", "tests/nn/test_rope.py",
         "-pairs / head_width", "-2 * pairs / head_width"),
        ("angles in float32", "tests/nn/test_rope.py",
         "dtype=torch.float64, device=positions_T.device",
         "dtype=torch.float32, device=positions_T.device"),
    ),
    *_mutations(
        "nn/norm.py",
        ("eps is ignored", "tests/nn/test_norm.py",
         "nn.RMSNorm(width, eps=eps)", "nn.RMSNorm(width)"),
        ("LayerNorm keeps its bias", "tests/nn/test_norm.py",
         "bias=bias)", "bias=True)"),
    ),
    *_mutations(
        "nn/mlp.py",
        ("gate and value exchanged", "tests/nn/test_mlp.py",
         "gate, h = h.chunk", "h, gate = h.chunk"),
        ("the wrong form of GELU", "tests/nn/test_mlp.py",
         "\"tanh\" if", "\"none\" if"),
    ),
    *_mutations(
        "nn/init.py",
        ("depth does not scale the outputs", "tests/nn/test_init.py",
         "0.02 / math.sqrt(2 * depth) if deep", "0.02 if deep"),
        ("embeddings are left to PyTorch", "initialisation",
         "_draw_table(module.weight, scheme, generator)", "pass"),
        ("norms decay", "tests/training/test_optimiser.py",
         "\"router\"} | EXPERTS", "\"router\", \"norm\"} | EXPERTS"),
    ),
    *_mutations(
        "nn/cache.py",
        ("a fork writes where its origin writes", CACHE,
         "Cache(self.window, held, 0, held.shape[3])", "Cache(self.window, self.kv, self.start, self.end)"),
        ("a ring one too short", CACHE,
         "self.end - self.window)", "self.end - self.window + 1)"),
        ("growing loses the oldest", CACHE,
         "self.kv[:, :, :, self.start : self.end]\n        self.kv,",
         "self.kv[:, :, :, self.start + 1 : self.end + 1]\n        self.kv,"),
    ),
    *_mutations(
        "nn/head.py",
        ("IGNORE is asked", "loss",
         "coefficients_NS.masked_fill(~asked_NS, 0)", "coefficients_NS"),
        ("a score of what is not asked", "rows",
         "ignore_index=IGNORE", "ignore_index=-1"),
    ),
    *_mutations(
        "nn/head.py",
        ("a token met twice is likely twice", SUPERPOSITION,
         "asked_NS & ~_repeated(targets_NS, asked_NS)", "asked_NS"),
    ),
    *_mutations(
        "nn/moe.py",
        ("weights of the chosen do not add up to one", MOE,
         "p_Nk / p_Nk.sum(-1, keepdim=True)", "p_Nk"),
        ("experts answer other tokens", MOE,
         "y_MC[by_expert.argsort()]", "y_MC[by_expert]"),
        ("the router in mixed precision", MOE,
         "enabled=False", "enabled=torch.is_autocast_enabled(x.device.type)"),
        ("the balance loss moves nothing", MOE,
         "p_NE.mean(0)))", "p_NE.detach().mean(0)))"),
    ),
    *_mutations(
        "networks/network.py",
        ("extra terms are recorded and not learned", MOE,
         "loss = loss + weight / max(1, counts[name]) * extra[name]", "pass"),
        ("routings pile up from pass to pass", MOE,
         "routings, self.routings = self.routings, []", "routings = self.routings"),
    ),
    *_mutations(
        "objectives/phases.py",
        ("a share in binary", PHASES,
         "Fraction(str(amount))", "Fraction(amount)"),
        ("positions pass for tokens of text", PHASES,
         "return phase.view.read(step - phase.first)", "return self.positions(step)"),
        ("every phase starts its view at the run's step", PHASES,
         "phase.view.batch(step - phase.first,", "phase.view.batch(step,"),
    ),
    *_mutations(
        "objectives/superposition.py",
        ("the stream starts anew at the switch", PHASES,
         "first, begin = last, view.read(last - first)", "first, begin = last, 0"),
        ("counts of one micro-batch in bags", "accumulation",
         "[counts[slot] for slot in slots]", "[self.count(network, batch)[slot] for slot in slots]"),
        ("weights are not divided by their sum", SUPERPOSITION,
         "weight / (count * mass)", "weight / count"),
        ("a mean over all targets", SUPERPOSITION,
         'if reduce == "tokens":', "if True:"),
        ("the mean of embeddings in bfloat16", SUPERPOSITION,
         "embedded.to(torch.promote_types(embedded.dtype, torch.float32))", "embedded"),
        ("the sum of a bag's embeddings", SUPERPOSITION,
         " / tokens.shape[2])", ")"),
        ("tables are drawn anew unasked", SWITCH,
         'if switched and c.reinit_at_switch == "embeddings" else ()', "if switched else ()"),
    ),
    *_mutations(
        "corpus/bags.py",
        ("a bag is asked for itself", BAGS,
         "asked = read + s + np.arange(self.slots)", "asked = read + 1 + np.arange(self.slots)"),
        ("the last bag is dropped", BAGS,
         "asked < L + self.tail", "asked < L"),
        ("bags know documents by their tokens", BAGS,
         "if self.documents:", "if True:"),
        ("short documents are folded", BAGS,
         "np.where(lengths > bag, lengths // bag, 0)", "lengths // bag"),
        ("a folded document is asked for the next one", BAGS,
         "np.where(asked < ends, store", "np.where(asked < ends + 1, store"),
        ("folded bags forget where their document starts", BAGS,
         "np.maximum(np.arange(l) - index.reshape(rows, l), 0)", "np.zeros((rows, l), np.int64)"),
    ),
    *_mutations(
        "comparison/trained.py",
        ("a model of bags passes for a language model", SWITCH,
         "if run.note and not unfinished:", "if False:"),
    ),
    *_mutations(
        "comparison/readings.py",
        ("losses on a line in the steps", "tests/comparison/test_readings.py",
         "(run.nats_per_token, math.log(spent(run)))", "(run.nats_per_token, math.log(math.log(spent(run))))"),
    ),
    *_mutations(
        "analysis/mutual_information.py",
        ("no correction for the sample", "tests/analysis/test_mutual_information.py",
         ".sum() - bias)", ".sum())"),
        ("pairs across documents", "tests/analysis/test_mutual_information.py",
         "document[:-distance] == document[distance:]", "document[:-distance] >= 0"),
    ),
    *_mutations(
        "objectives/next_token.py",
        ("counts of one micro-batch", "accumulation",
         "counts[\"nll\"])", "self.count(network, batch)[\"nll\"])"),
        ("a mean over positions, asked or not", "accumulation",
         'loss / max(1, counts["nll"])', "loss / batch.targets.numel()"),
    ),
    *_mutations(
        "corpus/order.py",
        ("every epoch is the same", "tests/corpus/test_order.py",
         "self.seed, number, self.number", "self.seed, 0, self.number"),
        ("sources take turns whatever their shares", "tests/corpus/test_order.py",
         "begins / share", "begins / 1"),
        ("a slice misses what was due long before it", "tests/corpus/test_order.py",
         "1 + sum(source.longest", "1 + min(source.longest"),
        ("a source begins again too early", "tests/corpus/test_order.py",
         "min(1 + int(np.searchsorted(epoch.ends, position)), len(epoch.ends))",
         "min(1 + int(np.searchsorted(epoch.ends, position)), len(epoch.ends) - 1)"),
    ),
    *_mutations(
        "corpus/prepare.py",
        ("a tokenizer is trained without the shares", "tests/corpus/test_prepare.py",
         "SAMPLE * share * done / size", "SAMPLE * done / size"),
        ("every document is of the first source", "tests/corpus/test_prepare.py",
         "[document.number for document in documents]", "[0 for document in documents]"),
    ),
    *_mutations(
        "corpus/files.py",
        ("a section of WikiText is an article", "tests/corpus/test_files.py",
         'marks.count("=") == 2', 'marks.count("=") >= 2'),
    ),
    *_mutations(
        "corpus/splitters.py",
        ("pysbd is trusted with every line", "tests/corpus/test_sentences.py",
         'if "".join(found) != bare or len(bare) > LONGEST_LINE', "if len(bare) > LONGEST_LINE"),
    ),
    *_mutations(
        "corpus/sentences.py",
        ("the document end is not counted", "tests/corpus/test_sentences.py",
         "append=len(document.sizes) + 1", "append=len(document.sizes)"),
    ),
    *_mutations(
        "corpus/boundaries.py",
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
    ),
    *_mutations(
        "corpus/views.py",
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
         "self.rows + part * rows", "self.rows"),
    ),
    *_mutations(
        "evaluation/likelihood.py",
        ("bytes of all tokens", LIKELIHOOD,
         "scoring.index.numpy()[asked]]", "scoring.index.numpy()[asked] - 1]"),
        ("scores in mixed precision", LIKELIHOOD,
         "enabled=False", "enabled=torch.is_autocast_enabled(device.type)"),
        ("sums in float32", LIKELIHOOD,
         "np.zeros(len(order)), np.zeros", "np.zeros(len(order), np.float32), np.zeros"),
        ("bits without ln 2", LIKELIHOOD,
         "self.nats / math.log(2)", "self.nats"),
        ("a rate is chosen by the documents it is compared on", LIKELIHOOD,
         "slice(1, None, 2)", "slice(0, None, 2)"),
    ),
    *_mutations(
        "comparison/study.py",
        ("arms may read different texts", "tests/comparison/test_study.py",
         "if recipe.value(key) != one.value(key)", "if False"),
        ("trials use the seeds of the comparison", "tests/comparison/test_study.py",
         "Job(arm, self.keys.tuning_seed, rate, True)", "Job(arm, self.seeds[0], rate, True)"),
        ("trials are not paid for", "tests/comparison/test_study.py",
         "(len(keys.seeds) + len(keys.rates))", "len(keys.seeds)"),
    ),
    *_mutations(
        "comparison/folder.py",
        ("seeds may be taken out again", "tests/comparison/test_study.py",
         "set(value) <= set(new or [])", "True"),
    ),
    *_mutations(
        "comparison/texts.py",
        ("other texts are the held-out one", "tests/comparison/test_texts.py",
         "            store,\n", "            run.corpus.validation,\n"),
    ),
    *_mutations(
        "corpus/prepare.py",
        ("further texts are not told apart", "tests/corpus/test_prepare.py",
         "[source.identity for source, _ in split], tokenizer.hash]", "tokenizer.hash]"),
    ),
    *_mutations(
        "generation/sampling.py",
        ("a nucleus one token too small", "tests/generation/test_sampling.py",
         "p_BK.cumsum(-1) - p_BK >= top_p", "p_BK.cumsum(-1) >= top_p"),
        ("all rows draw alike", "tests/generation/test_sampling.py",
         'f"{seed}/{row}"', 'f"{seed}"'),
    ),
    *_mutations(
        "generation/generate.py",
        ("a stopped row goes on", GENERATE,
         "[row for row in going if drawn[row] != stop]", "going"),
        ("one token too many", GENERATE,
         "if not going or not left:", "if not going:"),
        ("characters come in halves", GENERATE,
         "if piece.endswith(\"\\ufffd\")", "if False"),
    ),
    *_mutations(
        "export/weights.py",
        ("settings are not kept", "export",
         "cls.Config.model_validate_json(json.dumps(settings))", "cls.Config()"),
    ),
    *_mutations(
        "training/checkpoint.py",
        ("the optimiser is not restored", CHECKPOINT,
         "dcp.load(wanted,", "dcp.load({n: t for n, t in wanted.items() if n.startswith(NETWORK)},"),
        ("the network is not restored", CHECKPOINT,
         "dcp.load(wanted,", "dcp.load({n: t for n, t in wanted.items() if n.startswith(OPTIMISER)},"),
        ("a checkpoint gets its name before its manifest", CHECKPOINT,
         """        _write(partial / MANIFEST, json.dumps(manifest, indent=1).encode())
        _flush(partial)
        partial.rename(target)
""",
         """        partial.rename(target)
        _write(target / MANIFEST, json.dumps(manifest, indent=1).encode())
        _flush(target)
"""),
        ("what is read is not held against the manifest", CHECKPOINT,
         "if expected != _entry(data):", "if False:"),
    ),
    *_mutations(
        "training/parallel.py",
        ("ddp divides gradients by the processes", PARALLEL,
         "model.register_comm_hook(None, _add)", "pass"),
        ("fsdp divides gradients by the processes", PARALLEL,
         "module.set_gradient_divide_factor(1.0)", "pass"),
        ("targets are counted by every process for itself", PARALLEL,
         "for number in SIGNALS)])\n        dist.all_reduce(total)", "for number in SIGNALS)])"),
    ),
    *_mutations(
        "training/run.py",
        ("every process reads the same rows", PARALLEL,
         "self.ranks.rank * pieces", "0 * pieces"),
    ),
    *_mutations(
        "training/schedule.py",
        ("the first step is lost", "tests/training/test_schedule.py",
         "(step + 1) / self.warmup", "step / self.warmup"),
        ("the decay ends a step early", "tests/training/test_schedule.py",
         "(self.steps - step) / decay", "(self.steps - step - 1) / decay"),
    ),
    *_mutations(
        "training/loop.py",
        ("a resumed run repeats its last step", "tests/training/test_resume.py",
         "seconds = step + 1, run", "seconds = step, run"),
        ("the first micro-batch sends gradients, not the last", PARALLEL,
         "index == len(batches)", "index == 1"),
    ),
    *_mutations(
        "training/optimiser.py",
        ("gradients are not cleared", "tests/training/test_loop.py",
         "self.inner.zero_grad(set_to_none=True)", "pass"),
        ("the state moves on though the step is skipped", "tests/training/test_progress.py",
         "        if update:\n", "        if True:\n"),
        ("everything decays", "tests/training/test_optimiser.py",
         "weight_decay if decayed else 0.0", "weight_decay"),
    ),
    *_mutations(
        "training/progress.py",
        ("a spike enters the estimate whole", "tests/training/test_progress.py",
         "(limit if high else value) - mean", "value - mean"),
    ),
    *_mutations(
        "training/muon.py",
        ("the table is a hidden matrix", "tests/training/test_muon.py",
         "DECAYED - {\"embedding\", \"head\"}", "DECAYED - {\"head\"}"),
        ("q, k and v are one matrix", "tests/training/test_muon.py",
         "whole.split(group[\"parts\"], dim=-2)", "(whole,)"),
    ),
    *_mutations(
        "comparison/statistics.py",
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
         "if told and not missing", "if told"),
    ),
    *_mutations(
        "comparison/report.py",
        ("a sample is read as HTML", "tests/comparison/test_report.py",
         "…{escape(text)}</p>", "…{text}</p>"),
        ("folders of this machine are shown", "tests/comparison/test_report.py",
         'rpartition("/")[2] if', 'strip("\\t") if'),
    ),
]
# fmt: on


@contextlib.contextmanager
def applied(mutation: Mutation) -> Iterator[None]:
    """The bug in this process: functions and methods of the module stay who they are and get the mutated code.

    Raises: AssertionError where it lies in no function.
    """
    module = importlib.import_module("tandem." + mutation.file.removesuffix(".py").replace("/", "."))
    codes = _codes(compile(mutation.mutated, str(module.__file__), "exec"))
    functions = [f for f in _functions(vars(module), module.__name__) if f.__qualname__ in codes]
    assert any(f.__code__ != codes[f.__qualname__] for f in functions), f"{mutation.name}: it lies in no function"
    sound = [function.__code__ for function in functions]
    try:
        for function in functions:
            function.__code__ = codes[function.__qualname__]
        yield
    finally:
        for function, code in zip(functions, sound, strict=True):
            function.__code__ = code


def one_per_network() -> dict[str, Mutation]:
    """For every registered network a mutation of its own file that a check of the contract must notice."""
    files = {name: inspect.getfile(cls) for name, cls in registered("network").items()}
    return {
        name: next(m for m in MUTATIONS if file.endswith(m.file) and not m.test.startswith("tests/"))
        for name, file in files.items()
    }


def _codes(code: CodeType) -> dict[str, CodeType]:
    """All code inside a module's by qualified name."""
    inside = [c for c in code.co_consts if isinstance(c, CodeType)]
    return {c.co_qualname: c for c in inside} | {k: v for c in inside for k, v in _codes(c).items()}


def _functions(names: dict, module: str) -> Iterator[FunctionType]:
    """Functions and methods defined in a module, without what wraps them."""
    for value in names.values():
        if inspect.isclass(value) and value.__module__ == module:
            yield from _functions(dict(vars(value)), module)
        value = getattr(value, "fget", value)  # a property
        value = inspect.unwrap(getattr(value, "__func__", value))  # a classmethod; a decorator
        if inspect.isfunction(value) and value.__module__ == module and value.__name__ != "<lambda>":
            yield value


def main() -> int:
    parser = argparse.ArgumentParser("python -m tandem.testing.mutations", description="Bugs that tests must notice.")
    parser.add_argument("--only", default="", metavar="WORD", help="those whose name or file contains it")
    parser.add_argument("--one-per-network", action="store_true", help="one bug in the file of each network")
    options = parser.parse_args()
    chosen = list(one_per_network().values()) if options.one_per_network else MUTATIONS
    chosen = [m for m in chosen if options.only in m.name or options.only in m.file]
    root = PACKAGE.parent
    if not (root / "tests").is_dir():
        parser.error(f"{root} has no tests: run this in a checkout")
    survived = []
    with tempfile.TemporaryDirectory() as folder:
        left_out = shutil.ignore_patterns(".*", "__pycache__", "runs", "corpora", "build", "dist")
        copy = shutil.copytree(root, Path(folder) / "copy", ignore=left_out)
        for mutation in chosen:
            killed = _is_killed(mutation, copy)
            print(f"{'killed  ' if killed else 'SURVIVED'}  {mutation.file:26} {mutation.name}", flush=True)
            survived += [] if killed else [mutation]
    print(f"{len(chosen) - len(survived)} of {len(chosen)} killed")
    return 1 if survived or not chosen else 0


def _is_killed(mutation: Mutation, copy: Path) -> bool:
    """Whether the test fails in `copy` while the mutation is applied there.

    Raises: RuntimeError with the output where pytest could not run the test at all.
    """
    file = copy / "tandem" / mutation.file
    sound = file.read_bytes()
    file.write_text(mutation.mutated, "utf-8")
    try:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutation.pytest_arguments]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        run = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    finally:
        file.write_bytes(sound)
    if run.returncode not in (0, 1):
        raise RuntimeError(
            f"{mutation.name}: pytest ended with {run.returncode}\n{run.stdout[-3000:]}{run.stderr[-1000:]}"
        )
    return run.returncode == 1


if __name__ == "__main__":
    sys.exit(main())
