"""The command line: tvmhet plan | build | run | profile | predict | tune | calibrate | database | recommend | devices.

Every error that a user can mend is one message on standard error, with its code, and exit status 2. Anything else is
a defect and shows its traceback. Heavy imports happen inside the commands, so that help comes at once.

Adding a command: a function in a file of its own (or of its group) here, and one line in `COMMANDS`.
"""

from __future__ import annotations

import sys
import warnings
from typing import Annotated

import typer

from tvmhet.cli.calibrate import calibrate
from tvmhet.cli.database import database
from tvmhet.cli.devices import devices
from tvmhet.cli.output import show
from tvmhet.cli.place import build, plan
from tvmhet.cli.predict import predict
from tvmhet.cli.profile import profile
from tvmhet.cli.recommend import recommend
from tvmhet.cli.run import run
from tvmhet.cli.tune import tune
from tvmhet.errors import HetError

#: In the order of the help text.
COMMANDS = (
    plan,
    build,
    run,
    profile,
    tune,
    predict,
    calibrate,
    recommend,
    database,
    devices,
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Place a model over unlike devices: fusion, device types and counts, decided together.",
)
for command in COMMANDS:
    app.command()(command)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from tvmhet import __version__

        show(f"tvmhet {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line. Errors that a user can mend end it with status 2 and one message."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore", FutureWarning)  # torch's words to its own developers
    try:
        app()
    except HetError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
