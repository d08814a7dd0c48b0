import pytest

import tandem.networks  # noqa: F401 - importing it registers them
from tandem.export.bundle import bundle
from tandem.export.hugging_face import model_source
from tandem.recipe import registered


@pytest.mark.parametrize("network", registered("network").values())
def test_the_source_of_a_network_has_no_more_than_it_needs(network):
    files = model_source(network)
    text = "\n".join(files.values())
    assert "import pydantic" not in text and "from pydantic" not in text
    assert not [line for line in text.splitlines() if line.lstrip().startswith(("from tandem", "import tandem"))]
    for name, source in files.items():
        compile(source, name, "exec")
    assert not {"tandem_corpus_store.py", "tandem_corpus_order.py", "tandem_recipe_resolve.py"} & files.keys()


def test_a_bundle_keeps_what_is_named_with_what_it_names():
    files = bundle({"tandem.nn.rope": {"rotate"}})
    assert list(files) == ["tandem_nn_rope.py"]
    source = files["tandem_nn_rope.py"]
    assert "def rotate" in source and "class Rotation" not in source
    assert "from torch import Tensor" in source and "\nPairing = " in source
    with pytest.raises(LookupError, match="BeforeValidator"):
        bundle({"tandem.recipe.resolve": {"Run"}})
