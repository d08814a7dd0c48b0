"""The command as it is typed, in this process."""

from typer.testing import CliRunner

from tandem.cli import main


def tandem(*arguments, given=None):
    return CliRunner().invoke(main, [str(argument) for argument in arguments], input=given)
