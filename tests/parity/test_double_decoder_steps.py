"""Six optimiser steps of Block-Based Double Decoders against numbers that the authors' code made.

Groups of parameters with their rates and decay, warm-up from zero, micro-batches of unequal counts, clipping, AdamW.
"""

import pytest
import torch
from test_double_decoder import batch_of, double_decoder, factors, load, ours

from tandem.objectives.next_token import NextToken
from tandem.training.optimiser import AdamW
from tandem.training.schedule import Linear

LOSS, WEIGHTS = 2e-5, 1e-3
WARMUP = 0.05
"""Of the steps, in the authors' code."""


@pytest.fixture(scope="module")
def file():
    given = load("dd_train_steps")
    if factors(given["config"])[1] != 1:
        pytest.skip("heads of another width than the base: their attention scale is no option of ours")
    return given


def own(file, theirs):
    """Weights, or what else there is for each of them, by our names; logits are scaled by the final norm."""
    config = file["config"]
    return ours(theirs, config | {"mup_base_dim": config["dim"]}, {"context_stack.norm.bias"})


@pytest.fixture(scope="module")
def network(file):
    config = file["config"]
    made = double_decoder(config, base_width=config["mup_base_dim"], sink=True)  # as their training had it
    made.table = type(made.table)(*file["init_state_dict"]["embedding.weight"].shape)
    made.load_state_dict(own(file, file["init_state_dict"]))
    return made


@pytest.fixture(scope="module")
def optimiser(file, network):
    table = next(group for group in file["groups"] if "embedding.weight" in group["names"])
    options = {"betas": tuple(table["betas"]), "eps": table["eps"], "max_norm": file["clip"]}
    return AdamW(AdamW.Config(lr=table["lr"], weight_decay=table["weight_decay"], **options), network)


def test_every_parameter_is_in_the_group_that_the_authors_have_it_in(file, network, optimiser):
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    for key in ("lr", "weight_decay"):
        theirs = {name: group[key] for group in file["groups"] for name in group["names"]}
        weights = file["init_state_dict"].items()
        expected = own(file, {n: torch.full_like(w, theirs[n]) for n, w in weights if n in theirs})
        for group in optimiser.inner.param_groups:
            given = optimiser.config.lr * group["scale"] if key == "lr" else group["weight_decay"]
            for parameter in group["params"]:
                value = expected.pop(names[id(parameter)])
                torch.testing.assert_close(value, torch.full_like(value, given), rtol=1e-6, atol=0)
        assert not expected


def test_six_steps_go_where_theirs_go(file, network, optimiser):
    schedule = Linear(Linear.Config(warmup=WARMUP, floor=0.1, warmup_from_zero=True), file["total_steps"])
    objective = NextToken(NextToken.Config())
    for step, (expected, given) in enumerate(zip(file["log"], file["batches"], strict=True)):
        batches = [batch_of(piece, piece["blocks"]) for piece in given]
        counts = [objective.count(network, batch)["nll"] for batch in batches]
        assert sum(counts) == expected["n_valid"] and len(batches) == file["grad_accum"]
        total = 0.0
        for batch in batches:
            loss, _ = objective.loss(network, batch, {"nll": sum(counts)})
            loss.backward()
            total += float(loss)
        assert total == pytest.approx(expected["loss"], abs=LOSS)
        assert float(optimiser.clip()) == pytest.approx(expected["grad_norm_preclip"], rel=1e-3)
        rate = optimiser.step(schedule(step))
        rates = sorted({rate * group["scale"] for group in optimiser.inner.param_groups})
        assert rates == pytest.approx(sorted(set(expected["lrs"])), rel=1e-9)
    for name, theirs in own(file, file["final_state_dict"]).items():
        assert float((network.state_dict()[name] - theirs).norm() / theirs.norm()) < WEIGHTS, name
