"""The corpus: text -> documents -> tokens -> batches.

    corpus = prepare(Corpus.Config())                        # the built-in text, a BPE trained on it
    rows = PackedRows(corpus.train, seed=1337, rows=16, context=256)
    batch = rows.batch(step=0)                               # the same batch for this seed and step, always

A store is prepared once and mapped into memory; a batch is computed from (seed, step) and nothing else.
"""

from tandem.corpus.bags import BagRows, FoldedRows
from tandem.corpus.boundary_rows import BoundaryBatch, BoundaryRows, scoring_boundary_rows, widest_row
from tandem.corpus.corruption import CorruptedRows, Corruption, start_of_generation
from tandem.corpus.order import SUBSET, Order, documents_to_read, fixed_order, shuffled
from tandem.corpus.partition import prompt_blocks
from tandem.corpus.prefixes import PrefixRows, divided, generated_from, suffix_windows
from tandem.corpus.prepare import Corpus, prepare, prepare_texts
from tandem.corpus.sentences import Segmentation, Sentences, open_sentences, segment, sentences_of
from tandem.corpus.store import Store
from tandem.corpus.streams import SentenceStreams, StreamBatch, Streams, scoring_streams
from tandem.corpus.tokenizer import Tokenizer, load_tokenizer
from tandem.corpus.views import IGNORE, Batch, PackedRows, ScoringBatch, View, rows_of, scoring_rows, windows
