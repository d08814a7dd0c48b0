"""Texts in memory that a network can score as it scores the documents of a store.

given = GivenTexts([[[5, 2], [9, 4]]], vocabulary=257)      one text of two sentences, tokens 5 2 9 4
for scoring in network.scoring(given, context, rows): ...   every token but the first is scored, as in any document
"""

from collections.abc import Sequence

import numpy as np


class GivenSentences:
    """Where the sentences of each text start, counted from its first token."""

    def __init__(self, texts: Sequence[Sequence[Sequence[int]]]):
        self._starts = [np.cumsum([0, *map(len, sentences[:-1])]) for sentences in texts]

    def document(self, i: int) -> np.ndarray:
        return self._starts[i]


class GivenTexts:
    """The part of a `Store` that scoring needs, for texts that are lists of sentences of tokens.

    The last token of a text takes the place of the document end; nothing is appended.
    """

    eos = 0  # fills rows up, where nothing is asked

    def __init__(self, texts: Sequence[Sequence[Sequence[int]]], vocabulary: int):
        self.vocabulary, self.sentences = vocabulary, GivenSentences(texts)
        self._texts = [np.array([token for sentence in text for token in sentence], np.int64) for text in texts]
        self.lengths = np.array([len(text) for text in self._texts])

    def __len__(self) -> int:
        return len(self._texts)

    def document(self, i: int) -> np.ndarray:
        return self._texts[i]
