"""The built-in text reads as prose, is the same every time, and there is enough of it."""

import re
import sysconfig

import pytest

from tandem.corpus.builtin import Builtin, docstrings, paragraphs

NUMPY = """Add the two terms element by element.

Parameters
----------
x : array_like, shape (n,)
    The first of the two terms. It is broadcast
    against the second one.
y : array_like

Returns
-------
out : ndarray

See Also
--------
subtract : The difference of the two of them.

Notes
-----
The output has the :term:`dtype` that both **promote** to, see `numpy.result_type`.

.. math:: z = x + y

.. versionadded:: 1.0
   It is there since the beginning of the world.

.. note::
   This is the body of a note, and it stays.

Examples
--------
>>> add(1, 2)
3
"""
GOOGLE = """Applies the function to every element of the input, like this::

    def surely_this_is_code(x):
        return it to the caller as a value.

It is the inverse of :class:`~torch.nn.Module`. See [1]_ for how it is done:

Args:
    x (Tensor): The input that the function is applied to.
    dim (int, optional): the dimension

Returns:
    Tensor: The output of the function, one value for each.

:param y: The second term of the sum is optional.
:type y: int

* The first item of a list is a sentence.
* Another item
"""


def test_a_numpy_docstring_keeps_its_sentences_only():
    assert list(paragraphs(NUMPY)) == [
        "Add the two terms element by element.",
        "The first of the two terms. It is broadcast against the second one.",
        "The output has the dtype that both promote to, see numpy.result_type.",
        "This is the body of a note, and it stays.",
    ]


def test_a_google_docstring_keeps_its_sentences_only():
    assert list(paragraphs(GOOGLE)) == [
        "It is the inverse of Module.",
        "The input that the function is applied to.",
        "The output of the function, one value for each.",
        "The second term of the sum is optional.",
        "The first item of a list is a sentence.",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "The sum of x+y and a[i] is what the function returns to the caller in the end, b{c} or not.",
        "The make_fx of torch.compile and get_attr to set_item are numpy.array of a_b.",
        "lower case at the beginning of the sentence.",
        "There is no stop at the end of it",
        "Four words are few.",
        r"The value of \alpha is that of the sum.",
        "Apple Banana Cherry Damson Elder Fig Grape.",
    ],
)
def test_what_is_no_sentence_is_dropped(text):
    assert list(paragraphs(text)) == []


def test_docstrings_come_in_source_order_without_running_the_module(tmp_path):
    module = tmp_path / "module.py"
    filler = '"""' + "x" * 500 + '"""'
    module.write_text(
        '"""One."""\nraise SystemExit\nclass A:\n    """Two."""\n    def f(self):\n        """Three."""\n'
        f'add_docstr(g, """Four.""")\nprint("""Not this.""")\n{filler}\nasync def h():\n    """Five."""\n'
    )
    assert docstrings(module) == ["One.", "Two.", "Three.", "Four.", "Five."]
    module.write_text(filler + "\ndef this is not Python")
    assert docstrings(module) == []


@pytest.fixture(scope="module")
def modules():
    return Builtin().modules


def test_documents_repeat_nothing_and_are_the_same_again(modules, monkeypatch):
    chosen = [path for path in modules if path.parent.name in ("json", "email", "pydoc_data")]
    monkeypatch.setattr(Builtin, "modules", chosen + chosen)
    source = Builtin()
    documents = list(source.read())
    assert list(source.read()) == list(Builtin().read()) == documents
    found = [p for text, _ in documents for p in text.split("\n\n")]
    assert len(found) > 500 and len(set(found)) == len(found)
    assert [done for _, done in documents] == sorted(done for _, done in documents)
    assert documents[-1][1] <= source.size
    assert "The object must be an iterable" in " ".join(found) or "statement" in " ".join(found)


def test_the_modules_are_those_of_tandem_and_what_it_requires(modules):
    library = sysconfig.get_path("stdlib")  # may itself lie in a folder called tandem or test
    names = {re.sub(rf"^({library}|.*/(site|dist)-packages)/", "/", path.as_posix()) for path in modules}
    assert any(name.endswith("torch/nn/modules/linear.py") for name in names)
    assert any(name.endswith("sympy/core/expr.py") for name in names)  # required by torch
    assert not any(re.search(r"/(_pytest|hypothesis|tandem|tests?)/", name) for name in names)


@pytest.mark.slow
def test_there_are_six_megabytes_of_prose(modules, monkeypatch):
    monkeypatch.setattr(Builtin, "modules", modules[::8])  # an eighth of them tells of all
    documents = [text for text, _ in Builtin().read()]
    assert sum(len(text.encode()) for text in documents) >= 6_000_000 / 8
    assert len(documents) > 1000 / 8
    words = " ".join(documents).split()
    assert sum(word.lower() in ("the", "of", "a", "to", "is", "and") for word in words) > 0.15 * len(words)
