"""What a trained network, or the text it reads, is like inside; importing this registers every analysis.

An analysis asks a network for a capability (an attribute of its class), not for its name: `tandem analyse` refuses a
network that lacks it and names those that have it. A new analysis is a file here that registers itself.
"""

from tandem.analysis import (
    attention_mass,
    contraction,
    gradient_roles,
    mutual_information,
    partitions,
    state_window,
)

__all__ = ["attention_mass", "contraction", "gradient_roles", "mutual_information", "partitions", "state_window"]
