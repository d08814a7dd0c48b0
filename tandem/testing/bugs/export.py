"""Bugs of exported models."""

# fmt: off
BUGS = {
    "export/weights.py": [
        ("settings are not kept", "export",
         "cls.Config.model_validate_json(json.dumps(settings))", "cls.Config()"),
    ],
}
# fmt: on
