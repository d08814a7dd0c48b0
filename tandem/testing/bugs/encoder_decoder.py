"""Bugs of the encoder-decoder, of span corruption and of prefix LM."""

# fmt: off
BUGS = {
    "networks/encoder_decoder.py": [
        ("the encoder reads what it is asked for", "causality",
         "kinds = index <= last if reads_all else index < last, index >= last",
         "kinds = index >= 0, index >= last"),
    ],
}
# fmt: on
