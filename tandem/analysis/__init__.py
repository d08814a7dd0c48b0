"""Questions to a network, or to the text it reads, beside its likelihood; importing this registers every analysis.

An analysis asks a network for a capability (an attribute of its class), not for its name: `tandem analyse` refuses a
network that lacks it and names those that have it. A new analysis is a file here that registers itself.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
