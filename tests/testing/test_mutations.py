"""`python -m tandem.testing.mutations` runs them all; here, that it can, and one for each network."""

from pathlib import Path

import pytest

from tandem.recipe.settings import _registry
from tandem.testing.cases import cases, shipped
from tandem.testing.contract import CHECKS
from tandem.testing.mutations import MUTATIONS, applied, of_network

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_still_fits_the_code_and_names_a_test(mutation):
    compile(mutation.mutated, mutation.file, "exec")
    assert mutation.test in CHECKS or (ROOT / mutation.test.partition("::")[0]).is_file()


@pytest.mark.parametrize("network", shipped())
def test_the_contract_notices_a_bug_in_every_network(network):
    mutation = of_network(network)
    check, tiny = CHECKS[mutation.test], [case for case in cases() if case.name.startswith(network + "-")]
    with applied(mutation), pytest.raises(AssertionError):
        for case in tiny:
            check(case)
    check(case)  # the one that failed


def test_a_network_without_a_bug_is_named_with_the_cure(monkeypatch):
    monkeypatch.setitem(_registry["network"], "mine", Path)
    with pytest.raises(LookupError, match=r"network mine has no bug .* put one of .*tandem/testing/bugs/"):
        of_network("mine")
