"""What defines a run: one YAML file, read strictly, in which every value has a known origin.

A recipe has two keys of its own, `seed` and `budget`, and sections. A section belongs to the class that it builds: the
class declares its options in an inner `Config` and registers itself, and that is all a recipe knows about it.

    @register("network", "sps")                         extends: decoder/tiny      # a name or a path
    class SPS(Network):                                 budget: 5e6 tokens
        class Config(Settings):                         network:
            window: int | None = Field(64, ge=0)          name: sps                # another choice: a fresh section
            '''Tokens for which it stays readable.'''     window: 32
                                                        corpus:
        @classmethod                                      texts: ["${DATA}/wiki.txt"]
        def check(cls, recipe):
            if recipe.batch.context < 2:
                yield "batch.context", "sps needs two"

    recipe = load("mine.yaml", ["network.window=16"])
    recipe.network.window, recipe.choice("network"), recipe.origins["network.window"]     # 16, SPS, override

A value is a default of the class, comes from a line of a file, is an override, or is derived from other values by
`Settings.derive`. Nothing is dropped or guessed: mistakes are reported together, each on one line with its place, its
value, what is allowed and the nearest name; those between values show once each of these is valid.

    mine.yaml:7  network.windw = 64: no such key; did you mean network.window? sps takes depth, heads, width, window

The YAML is version 1.2 (`6e-4` is a number; `no` and `12:30` are text) without aliases and tags; a whole number may be
written `2e6`. Sections merge key by key with those that they extend, an option is replaced whole (`corpus.texts`,
also where it is a mixture; a dotted key, `evaluation.texts.more=..`, adds to such a mapping), and a section whose
`name` changes starts afresh, because the options of one choice mean nothing to another. `${NAME}` in a string is taken
from the environment when the recipe is read (not in `extends`); a saved recipe and its fingerprint keep it as written,
so that a run can move to a machine where its data are elsewhere. A saved recipe spells out every value: an override
that changes one from which others were derived must also say what becomes of those.
"""

from tandem.recipe.budget import Budget, parse_budget
from tandem.recipe.catalogue import explain, overview
from tandem.recipe.document import Origin, recipes
from tandem.recipe.resolve import Recipe, changed, configure, load
from tandem.recipe.settings import (
    SECTIONS,
    Settings,
    UserError,
    counted,
    describe,
    did_you_mean,
    plugins,
    register,
    register_all,
    registered,
    require,
)
