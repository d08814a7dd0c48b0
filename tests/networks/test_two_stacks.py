"""What is Block-Based Double Decoders' own; what it shares with all networks is in test_contract.py."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tandem.corpus import Batch, PrefixRows, prompt_blocks
from tandem.corpus.partition import PartitionConfig
from tandem.networks.double_decoder import BlockReader, DoubleDecoder, Mixing
from tandem.networks.double_decoder_session import APART, CachedStack
from tandem.nn.attention import Source, attend
from tandem.nn.moe import MixtureConfig
from tandem.nn.spans import Span, causal, readable
from tandem.objectives.next_token import NextToken
from tandem.recipe import UserError, load
from tandem.testing.cases import VOCABULARY, Case, document, pack, packed, texts
from tandem.testing.comparing import EXACT, FLOAT, backward, close, same_gradients
from tandem.training.optimiser import AdamW


def build(seed=0, **settings) -> DoubleDecoder:
    shape = {"width": 32, "heads": 4, "context_layers": 2, "generation_layers": 2, "score_partitions": 1}
    return Case("", DoubleDecoder, DoubleDecoder.Config(**shape | settings)).build(seed)


def authors(**settings):
    """All that the authors' code adds to the definition."""
    return build(sink=True, mixing="biased", final_norm="layer", shared_kv=False, **settings)


def random_blocks(starts, seed):
    """Boundaries anywhere, documents ignored."""
    T, generator = starts.shape[1], np.random.default_rng(seed)
    rows = [np.sort(generator.choice(T, size=generator.integers(1, 5))) for _ in starts]
    edges = [np.r_[0, row][np.searchsorted(row, np.arange(T), side="right")] for row in rows]
    return torch.from_numpy(np.stack(edges))


def logits_of(network, text, blocks_T):
    """(T, V) of one text under a partition."""
    tokens = torch.tensor([text])
    batch = Batch(tokens, tokens, torch.zeros_like(tokens), blocks=torch.as_tensor(blocks_T)[None])
    with torch.no_grad():
        hidden, _ = network(network.embed(tokens), batch)
        return (hidden @ network.head.T)[0]


def blocks_at(boundaries, length):
    """(T,): where the block of each position begins."""
    edges = np.r_[0, boundaries].astype(np.int64)
    return torch.from_numpy(edges[np.searchsorted(boundaries, np.arange(length), side="right")])


# ---- who reads what -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("document_mask", [True, False])
def test_a_picture_shows_what_training_reads(document_mask):
    by_row = PartitionConfig(scope="row")
    network = build(document_mask=document_mask, partition=by_row, context_layers=1, generation_layers=1)
    text, starts = torch.tensor([document(12, 1)]), [0] * 7 + [7] * 5
    context, own, latents = (readable(span, n)[0] for _, span, n in DoubleDecoder.drawing(network.config, starts))
    x = network.embed(text).detach().requires_grad_()
    hidden, _ = network(x, Batch(text, text, torch.tensor([starts]), key=131))
    for i in range(12):
        (gradient,) = torch.autograd.grad(hidden[0, i].square().sum(), x, retain_graph=True)
        assert torch.equal(gradient[0].abs().amax(-1) > 0, own[i] | context[latents[i]].any(0))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sink", [False, True])
def test_a_token_reads_its_own_block_and_the_latents_before_it(sink, seed):
    network, batch = build(sink=sink), pack(texts())
    starts, blocks = batch.starts, random_blocks(batch.starts, seed)
    x = network.embed(batch.tokens).detach().requires_grad_()
    latents = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    hidden, j = network.generated(x, latents, starts, blocks), torch.arange(x.shape[1])
    for row in range(len(x)):
        for i in range(x.shape[1]):
            own, context = torch.autograd.grad(hidden[row, i].square().sum(), (x, latents), retain_graph=True)
            s, b = int(starts[row, i]), int(torch.maximum(blocks, starts)[row, i])
            end = max(b, s + 1) if sink else b
            for grad, read in ((own, (b <= j) & (j <= i)), (context, (s <= j) & (j < end))):
                reached = grad.abs().amax(-1) > 0
                assert torch.equal(reached[row], read)
                assert not reached[:row].any() and not reached[row + 1 :].any()


def test_without_a_split_the_context_stack_is_idle():
    network, batch = build(partition=PartitionConfig(strategy="single")), pack(texts())
    hidden, _ = network(network.embed(batch.tokens), batch)
    network.nll(hidden, batch.targets)[0].backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad.any() != name.startswith("context_stack"), name


def test_every_token_reads_itself_and_latents():
    network, batch = build(partition=PartitionConfig(strategy="every_token")), pack(texts())
    x = network.embed(batch.tokens)
    own, latents = BlockReader(network, x, batch.starts, network.partition(batch), x).spans
    assert (own.hi - own.lo == 1).all()
    assert torch.equal(latents.hi, torch.arange(x.shape[1]).expand_as(batch.starts))


def test_documents_are_ignored_in_training_only_where_that_is_asked_for():
    batch = replace(pack(texts()), key=1)
    by_row = PartitionConfig(scope="row")
    network, masked = build(document_mask=False, partition=by_row), build(partition=by_row)
    x = network.embed(batch.tokens).detach().requires_grad_()
    i = int(batch.starts[0].max())
    for net, reads in ((network, True), (masked, False)):
        hidden, _ = net(x, batch)
        (grad,) = torch.autograd.grad(hidden[0, i:].square().sum(), x)
        assert bool(grad[0, :i].any()) is reads
    close(network.score(pack(texts())), masked.score(pack(texts())), EXACT, "scores, which are by document")
    hidden, wanted = (net(x, pack(texts()))[0] for net in (network, masked))
    close(hidden, wanted, EXACT, "what is read where nothing is drawn")


def test_partitions_that_cannot_be_are_refused():
    with pytest.raises(UserError, match=r"document_mask = false: reads a row as one document; take partition.scope"):
        load("double_decoder/tiny", ["network.document_mask=false"])
    small = ["network.partition.align=64", "batch.context=64"]
    with pytest.raises(UserError, match=r"network.partition.align = 64: no block can begin at .* in rows of 64"):
        load("double_decoder/tiny", small)
    load("double_decoder/tiny", [*small, "batch.context=65"])
    bags = ["objective={name: superposition, bag: 4, grow: rows}", "network.partition.align=32", "batch.rows=4"]
    refused = r"align = 32: no block can begin at .* in rows of 32, as bags of 4 with objective.grow: rows have; take"
    with pytest.raises(UserError, match=refused):
        load("double_decoder/tiny", [*bags, "batch.context=128"])
    load("double_decoder/tiny", [*bags, "batch.context=132"])
    load("double_decoder/tiny", [*bags, "batch.context=128", "objective.grow=length"])


# ---- one softmax ----------------------------------------------------------------------------------------------------


def sources_of(seed=0):
    """q, own and latents of 20 positions in blocks, the first of which has no context."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, kc, vc = (torch.randn(2, 4, 20, 8, dtype=torch.float64, generator=generator) for _ in range(5))
    leaves = [x.requires_grad_() for x in (q, k, v, kc, vc)]
    b = blocks_at([6, 7, 15], 20)[None]
    return leaves, Source(k, v, causal(b)), Source(kc, vc, Span(torch.zeros_like(b), b))


@pytest.mark.parametrize("backend", ["dense", "tiled"])
def test_one_softmax_is_two_merged_by_their_log_sum_exps(backend):
    leaves, own, latents = sources_of()
    one, two = attend(leaves[0], [own, latents], backend=backend), Mixing(4).double()(leaves[0], own, latents)
    close(two, one, 1e-10, "merged")
    weight = torch.randn(one.shape, dtype=one.dtype, generator=torch.Generator().manual_seed(1))
    grads = [torch.autograd.grad((y * weight).sum(), leaves) for y in (one, two)]
    for a, b in zip(*grads, strict=True):
        close(a, b, 1e-10, "gradient")


def test_a_source_that_is_empty_contributes_nothing_at_any_bias_and_temperature():
    leaves, own, latents = sources_of()
    mixing = Mixing(4).double()
    mixing.bias.data.uniform_(-3, 3)
    mixing.temperature.data.uniform_(0.1, 3)
    y = mixing(leaves[0], own, latents)
    alone = attend(leaves[0], [own], backend="dense")
    close(y[:, :, :6], alone[:, :, :6], 1e-12, "rows without context")
    grads = torch.autograd.grad(y[:, :, :6].sum(), [*leaves, *mixing.parameters()], retain_graph=True)
    assert all(grad.isfinite().all() for grad in grads)
    assert not any(grad.any() for grad in grads[3:])  # latents, bias, temperature
    grads = torch.autograd.grad(y.sum(), [*leaves, *mixing.parameters()])
    assert all(grad.isfinite().all() and grad.any() for grad in grads)


def test_two_sources_are_weighed_by_their_biased_log_sum_exps_times_a_temperature():
    """A query of a head at a time; the first biases are those of own tokens."""
    (q, k, v, kc, vc), own, latents = sources_of()
    mixing, bias, temperature = Mixing(4).double(), torch.linspace(-2, 3, 8), torch.linspace(0.3, 2, 4)
    mixing.load_state_dict({"bias": bias, "temperature": temperature})
    y = mixing(q, own, latents)
    for h in range(4):
        for i in (6, 7, 14, 19):
            b, seen = int(own.span.lo[0, i]), []
            for keys, values, read, of_source in ((k, v, slice(b, i + 1), bias[h]), (kc, vc, slice(b), bias[4 + h])):
                score = keys[0, h, read] @ q[0, h, i] / math.sqrt(8)
                seen.append((score.softmax(0) @ values[0, h, read], (score.logsumexp(0) + of_source) * temperature[h]))
            w = torch.stack([a for _, a in seen]).softmax(0)
            close(y[0, h, i], w[0] * seen[0][0] + w[1] * seen[1][0], EXACT, f"query {i} of head {h}")


# ---- scores ---------------------------------------------------------------------------------------------------------


def test_a_score_is_the_mean_of_its_partitions_and_each_of_them_shares_all_probability():
    network, batch = build(score_partitions=4, partition=PartitionConfig(min_context=3)), pack(texts())
    partitions = [network.partition(batch, number=number) for number in range(4)]
    assert len({str(blocks.tolist()) for blocks in partitions}) == 4
    scores = torch.stack([network.score(replace(batch, blocks=blocks)) for blocks in partitions])
    close(network.score(batch), scores.mean(0), EXACT, "mean of the partitions")
    ids = torch.arange(VOCABULARY)[:, None].expand(-1, 40)
    every = torch.tensor([document(40, 1)]).expand(VOCABULARY, -1)
    for number in range(4):
        given = Batch(every, ids, torch.zeros_like(ids))
        p = network.score(replace(given, blocks=network.partition(given, number=number))).neg().exp().sum(0)
        close(p, torch.ones_like(p), EXACT, "sum of the probabilities")


def test_a_batch_that_names_its_blocks_is_read_by_them():
    network, batch = build(score_partitions=2), pack(texts())
    named = replace(batch, blocks=prompt_blocks(batch.starts, 4))
    hidden, _ = network(network.embed(batch.tokens), replace(named, key=7))
    other, _ = network(network.embed(batch.tokens), replace(batch, key=7))
    assert not torch.equal(hidden, other)
    nll = -(hidden @ network.head.T).log_softmax(-1).gather(-1, batch.targets.clamp_min(0)[..., None])[..., 0]
    close(network.score(named), nll.masked_fill(batch.targets < 0, 0), EXACT, "score by named blocks")


# ---- sessions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [build, authors])
@pytest.mark.parametrize("prompt", [1, 2, 3, 20, 40])
def test_a_prompt_and_steps_are_the_forward_with_one_boundary(made, prompt):
    network, text = made(), document(40, 3)
    expected = logits_of(network, text, blocks_at([prompt - 1] if prompt > 1 else [], 40))
    session = network.session(1)
    close(session.prefill([text[:prompt]])[0].double(), expected[prompt - 1], FLOAT, "what follows the prompt")
    for i in range(prompt, 40):
        close(session.step(torch.tensor([text[i]]))[0].double(), expected[i], FLOAT, f"what follows token {i}")


@pytest.mark.parametrize("made", [build, authors])
@pytest.mark.parametrize("seed", range(4))
def test_commits_at_any_time_are_the_forward_with_these_boundaries(made, seed):
    network, text, generator = made(), document(40, seed), np.random.default_rng(seed)
    prompt = int(generator.integers(1, 10))
    times = np.unique(generator.integers(prompt, 40, size=4))
    expected = logits_of(network, text, blocks_at([prompt - 1, *times] if prompt > 1 else times, 40))
    session = network.session(1, keep="extendable")
    logits = session.prefill([text[:prompt]])
    for i in range(prompt, 40):
        close(logits[0].double(), expected[i - 1], FLOAT, f"what follows token {i - 1}")
        if i in times:
            session.commit()
        logits = session.step(torch.tensor([text[i]]))


@pytest.mark.parametrize("made", [build, authors])
def test_a_context_extended_after_a_fork_is_a_fresh_prefill(made):
    network, prompts = made(), [document(9, 1)[:-1], document(5, 2)[:-1]]
    session = network.session(2, keep="extendable")
    session.prefill(prompts)
    branches = [session, session.fork(), session.fork()]
    for n, branch in enumerate(branches):
        written = torch.tensor([document(4, 10 * n + row)[:-1] for row in range(2)])
        more = torch.tensor([document(8, 100 + 10 * n + row) for row in range(2)])
        branch.step(written)
        logits = branch.extend(more)
        fresh = network.session(2)
        texts = [p + w + m for p, w, m in zip(prompts, written.tolist(), more.tolist(), strict=True)]
        close(logits, fresh.prefill(texts), FLOAT, f"branch {n}")
        token = torch.tensor([3, 4])
        close(branch.step(token), fresh.step(token), FLOAT, f"branch {n}, a token later")


@pytest.mark.parametrize("made", [build, authors])
@pytest.mark.parametrize("lengths", [(9, 5), (6, 1), (1, 1)])
def test_forks_of_forks_go_on_as_if_they_had_read_it_all(made, lengths):
    network = made()
    prompts = [document(n + 1, row)[:-1] for row, n in enumerate(lengths)]
    session = network.session(2, keep="extendable")
    session.prefill(prompts)
    for n in (3, APART, 2):  # the second is more than a fork leaves apart
        session = session.fork()
        written, more = (torch.tensor([document(k + 1, k + row)[:-1] for row in range(2)]) for k in (n, 4))
        session.step(written)
        logits = session.fork(torch.tensor([1, 0])).extend(more[[1, 0]])[[1, 0]]
        prompts = [prompt + tokens for prompt, tokens in zip(prompts, written.tolist(), strict=True)]
        fresh = network.session(2).prefill([p + m for p, m in zip(prompts, more.tolist(), strict=True)])
        close(logits, fresh, FLOAT, f"after {n} tokens, the rows exchanged")


def test_a_fork_copies_nothing_of_a_prefix_for_a_few_tokens():
    network = build()
    held = network.session(1, keep="extendable")
    held.prefill([document(40, 0)])
    held.commit()
    fork, size = held.fork(), held.bytes
    fork.extend(torch.tensor([document(8, 1)]))
    for theirs, ours in ((held.context_caches, fork.context_caches), (held.generation, fork.generation)):
        for cache, kv in zip(theirs.caches, ours.shared, strict=True):
            assert kv.data_ptr() == cache.kv.data_ptr() and kv.shape[3] == 40
    assert held.bytes == size and len(held.generation.caches[0]) == 40
    fork.step(torch.tensor([document(APART + 1, 2)[:-1]]))
    assert not fork.generation.shared and len(fork.generation.caches[0]) == 48 + APART


def test_a_commit_leaves_what_forks_share():
    network, prompts = build(), [document(9, 1), document(5, 2)]
    session, alone = (network.session(2, keep="extendable") for _ in range(2))
    for one in (session, alone):
        one.prefill(prompts)
    fork, token = session.fork(), torch.tensor([3, 4])
    session.extend(torch.tensor([[5, 6, 7], [8, 9, 10]]))
    close(fork.step(token), alone.step(token), FLOAT, "a token after the other's commit")


def extendable_context(network, prompts):
    session = network.session(len(prompts), keep="extendable")
    session.prefill(prompts)
    return session.context()


@pytest.mark.parametrize("made", [build, authors])
@pytest.mark.parametrize("lengths", [(9, 5), (6, 1)])
@pytest.mark.parametrize("keep", ["latents", "extendable"])
def test_latents_alone_bring_a_context_back(keep, lengths, made):
    network, prompts = made(), [document(n + 1, row)[:-1] for row, n in enumerate(lengths)]
    session = network.session(2, keep=keep)
    session.prefill(prompts)
    context = session.context()
    other = network.session(2, keep=keep).reload(context)
    last = torch.tensor([prompt[-1] for prompt in prompts])
    close(other.step(last), network.session(2).prefill(prompts), 1e-5, "reloaded")
    close(other.step(last), session.step(last), 1e-5, "reloaded, a token later")
    if keep == "extendable":
        more = torch.tensor([[5, 6, 7], [8, 9, 10]])
        close(other.extend(more), session.extend(more), 1e-5, "reloaded and extended")
    else:
        closed = network.session(2, keep=keep).reload(extendable_context(network, prompts))
        assert closed.bytes == network.session(2, keep=keep).reload(context).bytes


def test_what_a_session_does_not_hold_is_refused_by_name():
    session = build().session(1)
    session.prefill([[1, 2, 3]])
    for ask in (session.commit, lambda: session.extend(torch.tensor([[1, 2]]))):
        with pytest.raises(ValueError, match="keep='extendable'"):
            ask()
    with pytest.raises(ValueError, match="keep='latents'"):
        session.context()
    closed = build().session(1, keep="latents")
    closed.prefill([[1, 2, 3]])
    with pytest.raises(ValueError, match="take it from a session that is extendable"):
        build().session(1, keep="extendable").reload(closed.context())
    with pytest.raises(ValueError, match="a session of 3 rows takes no context of 1"):
        build().session(3).reload(closed.context())


def test_a_session_holds_what_the_formulas_say():
    """C 32, 2 + 2 blocks, float64, of which a prompt of 21 tokens leaves 20 in the context."""
    network, C, L_c, L_g, b = build(), 32, 2, 2, 8
    for keep, more in (("generation", 0), ("latents", C), ("extendable", C + 2 * L_c * C)):
        session = network.session(1, keep=keep)
        session.prefill([document(21, 0)])
        assert session.bytes == session.fork().bytes == b * (2 * L_g * C * 21 + more * 20)
        session.step(torch.tensor([1]))
        assert session.bytes == b * (2 * L_g * C * 22 + more * 20)
        if keep != "generation":
            assert session.context().bytes == b * more * 20
    session.commit()
    assert session.bytes == b * (2 * L_g * C + C + 2 * L_c * C) * 22


def test_a_step_reads_no_latent_again(monkeypatch):
    network, counted = build(), []
    run, put = CachedStack.run, DoubleDecoder.latents
    monkeypatch.setattr(CachedStack, "run", lambda self, x: counted.append(self.stack) or run(self, x))
    monkeypatch.setattr(DoubleDecoder, "latents", lambda *given: counted.append("latents") or put(*given))
    keys_of = type(network.generation_stack.blocks[0]).keys_of
    for block in network.generation_stack.blocks:
        monkeypatch.setattr(block, "keys_of", lambda *given, b=block: counted.append("keys") or keys_of(b, *given))
    session = network.session(1)
    session.prefill([document(9, 0)])
    assert counted == [network.context_stack, "keys", "keys", network.generation_stack]
    counted.clear()
    for token in range(3):
        session.step(torch.tensor([token]))
    assert counted == 3 * [network.generation_stack]


def test_stacks_take_turns_on_a_device(monkeypatch):
    network, moved = build(), []
    names = {network.context_stack: "context", network.generation_stack: "generation"}
    for stack, name in names.items():
        monkeypatch.setattr(stack, "to", lambda device, name=name: moved.append((name, device)))
    session = network.session(1, swap="cpu:0")
    session.prefill([document(9, 0)])
    assert moved == [("generation", "cpu"), ("context", "cpu:0")] + 2 * [("context", "cpu"), ("generation", "cpu:0")]


@pytest.mark.parametrize("tied", [True, False])
def test_table_and_head_are_where_stacks_take_turns(tied):
    network = build(tied=tied)
    network.session(1, swap="meta")._work(network.generation_stack)
    devices = {name.split(".")[0]: value.device.type for name, value in network.named_parameters()}
    there = {name: "meta" for name in ("table", "generation_stack", *(() if tied else ("output",)))}
    assert devices == there | {"context_stack": "cpu"}


def test_stacks_that_took_turns_can_be_trained():
    network = build()
    with torch.inference_mode():
        network.session(1, swap="meta")._work(network.generation_stack)
    assert not any(parameter.is_inference() for parameter in network.parameters())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no second device")
def test_stacks_on_two_devices_one_of_them_cuda():
    network, prompt = build().float(), document(21, 0)
    expected, batch = network.session(1).prefill([prompt]), pack(texts())
    nll = network.score(batch)
    network.context_stack.to("cuda")
    close(network.session(1, keep="extendable").prefill([prompt]), expected, FLOAT, "prefill on two devices")
    close(network.score(batch), nll, FLOAT, "score on two devices")
    network.cpu()
    session = network.session(1, swap="cuda")
    close(session.prefill([prompt]).cpu(), expected, FLOAT, "prefill in turns")
    assert network.context_stack.device.type == "cpu" and network.generation_stack.device.type == "cuda"


# ---- options --------------------------------------------------------------------------------------------------------

OPTIONS = {
    "qk_norm": {"qk_norm": True},
    "per_matrix": {"init": "per_matrix"},
    "per_matrix_scaled": {"init": "per_matrix_scaled"},
    "context_loss": {"context_loss": 0.3},
    "early_context": {"partition": PartitionConfig(min_context=2)},
    "row_splits": {"partition": PartitionConfig(scope="row", shared=True)},
    "another_split": {"context_layers": 1, "generation_layers": 3},
}
SLOW_CONTEXT = {"context_stack": 0.3}


def learned(settings, steps=60, **options):
    """(losses, weights) of a small network that meets one batch over and over."""
    shape = {"width": 32, "heads": 4, "context_layers": 2, "generation_layers": 2}
    network = Case("", DoubleDecoder, DoubleDecoder.Config(**shape | settings)).fresh()
    batch, objective = replace(pack([[document(20, 1)], [document(9, 2), document(11, 3)]]), key=3), NextToken(None)
    optimiser, losses = AdamW(AdamW.Config(lr=1e-2, weight_decay=0.0, **options), network), []
    for _ in range(steps):
        losses.append(backward(network, objective, [batch]).item())
        optimiser.step(1.0)
    return losses, network.state_dict()


@pytest.mark.parametrize("name", [*OPTIONS, "lr_scale"])
def test_one_batch_is_learned_by_heart(name):
    losses, _ = learned(OPTIONS.get(name, {}), lr_scale=SLOW_CONTEXT if name == "lr_scale" else {})
    assert losses[-1] < 0.1 * losses[0]


def test_a_rate_of_its_own_slows_one_stack_and_at_1_changes_nothing():
    (_, start), (_, plain) = (learned({}, steps=steps) for steps in (0, 1))
    neutral, slow = (learned({}, steps=1, lr_scale={"context_stack": scale})[1] for scale in (1.0, 0.3))
    for name, value in start.items():
        share = 0.3 if name.startswith("context_stack") else 1.0
        assert torch.equal(neutral[name], plain[name]) and not torch.equal(plain[name], value), name
        torch.testing.assert_close(slow[name] - value, share * (plain[name] - value), rtol=1e-3, atol=1e-6)


def test_a_context_loss_asks_for_one_token_whatever_a_bag_asks():
    network, batch = build(context_loss=0.25), pack(texts())
    slots = torch.stack((batch.targets, batch.targets.roll(-1, 1), batch.targets.roll(-2, 1)), dim=2)
    bag = replace(batch, targets=slots)
    assert network.count(bag) == network.count(batch) == {"context_nll": 41}
    expected, found = (network(network.embed(b.tokens), b)[1]["context_nll"] for b in (batch, bag))
    close(found, expected, EXACT, "sum of the context's own loss")


def test_a_score_leaves_no_routings_to_the_next_pass():
    network, batch = build(moe=MixtureConfig(experts=4, active=2, balance=0.3), mlp_width=24), pack(texts())
    read = lambda: network(network.embed(batch.tokens), batch)[1]["balance"]
    expected = read()
    network.score(replace(batch, tokens=batch.tokens.flip(1)))
    close(read(), expected, EXACT, "balance behind a score")


def test_a_context_loss_of_its_own_is_added_and_counts_what_is_asked():
    network, plain, batch = build(context_loss=0.25), build(), pack(texts())
    objective = NextToken(None)
    counts = objective.count(network, batch)
    assert counts == {"nll": 41, "context_nll": 41} and (batch.targets >= 0).sum() == 41
    loss, sums = objective.loss(network, batch, counts)
    latents = plain.latents(plain.embed(batch.tokens), batch.starts)
    nll = plain.nll(latents, batch.targets)[0]
    expected = objective.loss(plain, batch, objective.count(plain, batch))[0] + 0.25 * nll / 41
    close(loss, expected, EXACT, "loss")
    close(sums["context_nll"], nll.detach(), EXACT, "sum of the context's own loss")
    loss.backward()
    expected.backward()
    same_gradients(network, plain, "context loss")


def test_a_context_loss_of_prefix_lm_asks_for_whole_documents():
    """Those latents have it that are read, which come before the break point."""
    network = build(context_loss=0.25)
    rows = packed([[document(20, 1), document(12, 2)], [document(32, 3)]])
    whole, suffixes = rows.batch(0), PrefixRows(rows).batch(0)
    assert (whole.targets[suffixes.targets < 0] >= 0).sum() > 5
    assert network.count(suffixes) == network.count(whole)
    expected, found = (network(network.embed(b.tokens), b)[1]["context_nll"] for b in (whole, suffixes))
    close(found, expected, EXACT, "sum of the context's own loss")


def test_a_context_loss_under_width_transfer_has_logits_as_small_as_the_others():
    """At four times the base width, half of them."""
    network, batch = build(context_loss=0.25, base_width=8), pack(texts())
    x = network.embed(batch.tokens)
    logits = network.latents(x, batch.starts) @ network.head.T / 2
    nll = -logits.log_softmax(-1).gather(-1, batch.targets.clamp_min(0)[..., None])[..., 0]
    close(network(x, batch)[1]["context_nll"], nll[batch.targets >= 0].sum(), EXACT, "sum of the context's own loss")
