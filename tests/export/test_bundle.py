import pytest

import tandem.networks  # noqa: F401 - importing it registers them
from tandem.export import plain
from tandem.export.bundle import bundle
from tandem.export.hugging_face import model_source
from tandem.recipe import Settings
from tandem.testing.cases import shipped


@pytest.mark.parametrize("network", shipped().values())
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


def test_a_class_that_begins_with_a_method_left_at_home_keeps_its_own_line(tmp_path, monkeypatch):
    monkeypatch.setattr("tandem.export.bundle.ROOT", tmp_path)
    left, kept = "    @classmethod\n    def tiny(cls):\n        return {}\n", "    def read(self):\n        return 1\n"
    for name, body in (("first", f"{left}\n{kept}"), ("last", f"{kept}\n{left}")):
        (tmp_path / f"{name}.py").write_text(f"class Mine:\n{body}")
        source = bundle({f"tandem.{name}": {"Mine"}})[f"tandem_{name}.py"]
        assert source.split() == f"class Mine:\n{kept}".split()


def test_annotations_that_are_read_later_stay_so(tmp_path, monkeypatch):
    monkeypatch.setattr("tandem.export.bundle.ROOT", tmp_path)
    (tmp_path / "later.py").write_text('"""Mine."""\n\nfrom __future__ import annotations\n\nx: Absent = 1\n')
    assert "\nfrom __future__ import annotations\n" in bundle({"tandem.later": {"x"}})["tandem_later.py"]


def test_a_loop_that_fills_a_table_comes_along(tmp_path, monkeypatch):
    monkeypatch.setattr("tandem.export.bundle.ROOT", tmp_path)
    (tmp_path / "filled.py").write_text("table = {}\nfor n in (1, 2):\n    table[n] = n * n\n")
    exec(bundle({"tandem.filled": {"table"}})["tandem_filled.py"], made := {})
    assert made["table"] == {1: 1, 2: 4}


@pytest.mark.parametrize(
    "line", ["from .rope import rotate", "from . import rotate", "import tandem.rotate as rotate", "import pydantic"]
)
def test_an_import_that_can_not_be_rewritten_is_refused(line, tmp_path, monkeypatch):
    monkeypatch.setattr("tandem.export.bundle.ROOT", tmp_path)
    name = f"mine{len(line)}"
    (tmp_path / f"{name}.py").write_text(f"{line}\nx = {line.split()[-1]}\n")
    with pytest.raises(LookupError, match=rf"^{line.split(' as ')[0]}: .* rewritten$"):
        bundle({f"tandem.{name}": {"x"}})


@pytest.mark.parametrize("base", [Settings, plain.Settings])
def test_a_network_makes_settings_of_its_own_with_pydantic_and_without(base):
    class Config(base):
        width: int = 4
        inner: int | None = None

        def derive(self):
            return {"inner": 2 * self.width}

    made = [Config(), Config(width=3), Config(width=3, inner=1), Config().model_copy(update={"width": 3})]
    assert [(config.width, config.inner) for config in made] == [(4, 8), (3, 6), (3, 1), (3, 8)]
