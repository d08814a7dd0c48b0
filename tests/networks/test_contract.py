"""The contract of `tandem.testing`, held by every registered network at each of its tiny settings."""

import pytest
import torch
from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

from tandem.testing.cases import cases, first_cases
from tandem.testing.contract import CHECKS
from tandem.testing.learning import check_compiled
from tandem.training.device import Training, choose_compile

COMPILER = choose_compile(Training.Config(), torch.device("cpu"), steps=None, seconds=1e9)
FIRST = first_cases()


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", cases(), ids=str)
def test_network(case, check):
    if check == "compiled" and case in FIRST:
        clear_compilation_metrics()
        check_compiled(case, backend="aot_eager")  # its backward, too
        graphs = get_compilation_metrics()
        assert graphs and not any(graph.restart_reasons for graph in graphs), "traced twice"
    else:
        CHECKS[check](case)


@pytest.mark.slow
@pytest.mark.skipif(not COMPILER.value, reason=COMPILER.reason)
def test_compiled_to_machine_code_is_eager():
    check_compiled(cases()[0], backend="inductor")
