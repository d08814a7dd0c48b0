"""Likelihoods of continuations are what each network's own session says, whatever stands beside them."""

import numpy as np
import pytest
import torch

from tandem.corpus import IGNORE, Batch
from tandem.evaluation.continuations import Answer, Question, answers, question
from tandem.networks.decoder import Decoder
from tandem.recipe import UserError
from tandem.testing.cases import VOCABULARY, cases, document

ALONE = [
    Question((5, 2, 9), (7, 7)),
    Question((5, 2, 9), (7, 30, 4, 1, 12)),
    Question((7,), (1,)),
    Question(tuple(document(11, 3)[:-1]), (3, 0)),
    Question((5, 2, 9), (44,)),
]


def asked_of(network):
    """Questions of all lengths, some twice, one of them what the network itself would write."""
    session, written = network.session(1), ()
    logits = session.prefill([[8, 1, 4]])
    for _ in range(4):
        written += (int(logits[0, : network.ids].argmax()),)
        logits = session.step(torch.tensor(written[-1:]))
    return [
        *ALONE,
        Question((8, 1, 4), written),
        ALONE[1],
        Question((8, 1, 4), (*written[:3], (written[3] + 1) % VOCABULARY)),
    ]


def by_a_session_of_its_own(network, asked):
    session, total, is_greedy = network.session(1), 0.0, True
    logits = session.prefill([list(asked.prompt)])
    for token in asked.continuation:
        log_p = logits[0].log_softmax(-1)
        is_begin = token > network.vocabulary
        total, is_greedy = (
            total + (0.0 if is_begin else log_p[token].item()),
            is_greedy and token == int(log_p[: network.ids].argmax()),
        )
        logits = session.step(torch.tensor([token]))
    return Answer(total, is_greedy)


@pytest.mark.parametrize("case", cases(), ids=str)
def test_an_answer_is_what_a_session_of_its_own_says_at_any_batch_size(case):
    network = case.build()
    asked = asked_of(network)
    expected = [by_a_session_of_its_own(network, one) for one in asked]
    assert [answer.is_greedy for answer in expected[-3:]] == [True, False, False]
    for rows in (2, 7):
        found = answers(network, asked, rows=rows)
        assert [answer.is_greedy for answer in found] == [answer.is_greedy for answer in expected]
        for one, other in zip(found, expected, strict=True):  # sums of float32 log-probabilities
            assert one.log_likelihood == pytest.approx(other.log_likelihood, abs=1e-4)
        assert found[1] == found[6]  # asked once: equal to the last bit


def decoder(context=40, **settings):
    network = Decoder(
        Decoder.Config(width=32, heads=2, depth=2, **settings), VOCABULARY, context, torch.Generator().manual_seed(0)
    )
    for parameter in network.parameters():
        parameter.data *= 3
    return network


def test_a_decoders_answers_are_its_scores_of_the_whole_row():
    network = decoder()
    for one, found in zip(ALONE, answers(network, ALONE, rows=3), strict=True):
        text = torch.tensor([[*one.prompt, *one.continuation]])
        targets = text[:, 1:].clone()
        targets[:, : len(one.prompt) - 1] = IGNORE
        nll = network.score(Batch(text[:, :-1], targets, torch.zeros_like(targets)))
        assert found.log_likelihood == pytest.approx(-nll.sum().item(), rel=1e-5)


def test_rows_that_are_through_do_not_run_out_of_positions():
    network = decoder(context=12, positions="learned")
    asked = [Question((1,) * 10, (2, 3)), Question((4, 5), (6,) * 9), Question((1,) * 4, (2, 3))]
    alone = [answers(network, [one], rows=1)[0] for one in asked]
    for one, other in zip(answers(network, asked, rows=3), alone, strict=True):
        assert one.log_likelihood == pytest.approx(other.log_likelihood, abs=1e-4)


def test_prompts_are_read_once_and_nothing_runs_after_the_last_token(monkeypatch):
    network, prefilled, steps = decoder(), [], []
    new = network.session

    def session(rows):
        made = new(rows)
        prefill, kind = made.prefill, type(made)
        monkeypatch.setattr(made, "prefill", lambda prompts: prefilled.extend(prompts) or prefill(prompts))
        monkeypatch.setattr(
            kind, "step", lambda self, tokens, step=kind.step: steps.append(tokens) or step(self, tokens)
        )
        return made

    monkeypatch.setattr(network, "session", session)
    answers(network, [Question((1, 2), (3, 4, 5)), Question((1, 2), (9,)), Question((6,), (7,))] * 2, rows=8)
    assert sorted(prefilled) == [[1, 2], [6]]
    assert len([tokens for tokens in steps if tokens.ndim == 1]) == 2  # two of three tokens are stepped over


def test_a_question_keeps_the_newest_tokens_that_fit():
    network = decoder(context=6)
    assert question(network, range(20), [9, 9, 9]) == Question((16, 17, 18, 19), (9, 9, 9))
    assert question(network, range(4), [9, 9, 9]) == Question((0, 1, 2, 3), (9, 9, 9))
    assert question(network, range(4), [9] * 8) == Question((3,), (9,) * 8)  # rotary positions go on
    with pytest.raises(UserError, match=r"continuation of 7 tokens .* positions for 6 in all"):
        question(decoder(context=6, positions="learned"), range(4), [9] * 7)
    assert question(decoder(context=6, positions="learned"), range(4), [9] * 6).prompt == (3,)


def test_a_question_may_be_asked_in_arrays():
    network, prompt, continuation = decoder(), [1, 2, 3], [4, 5]
    plain = question(network, prompt, continuation)
    arrays = question(network, np.array(prompt, np.uint32), np.array(continuation, np.uint32))
    assert answers(network, [arrays], rows=1) == answers(network, [plain], rows=1)


def test_progress_ends_at_all_prompts():
    seen = []
    answers(decoder(), ALONE, rows=2, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(2, 3), (3, 3)]
