"""Analyses of a network, or of the text it reads, beyond its likelihood; importing this registers all of them.

An analysis requires a capability of a network (an attribute of its class), not a name: `tandem analyse` refuses a
network that lacks it and names those that have it. A new analysis is a file here that registers itself.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
