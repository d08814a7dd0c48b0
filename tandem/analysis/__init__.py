"""What a trained network, or the text it reads, is like inside; importing this registers every analysis."""

from tandem.analysis import mutual_information

__all__ = ["mutual_information"]
