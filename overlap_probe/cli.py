"""The command line: gathers the commands, and turns errors and verdicts into exit codes.

The idea: errors of our own become one line and exit code 2 here and nowhere else; a command returns its exit code.
"""

from __future__ import annotations

import sys
from typing import Any

import click

import overlap_probe as op
from overlap_probe.commands.analyze import analyze
from overlap_probe.commands.assert_ import assert_
from overlap_probe.commands.report import report
from overlap_probe.commands.run import run

BAD_INPUT = 2
INTERRUPTED = 130


class _Commands(click.Group):
    def main(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["standalone_mode"] = False
        try:
            code = super().main(*args, **kwargs)
        except click.ClickException as error:
            error.show()
            code = error.exit_code
        except (click.Abort, KeyboardInterrupt):
            click.echo("overlap_probe: interrupted", err=True)
            code = INTERRUPTED
        except op.OverlapProbeError as error:
            click.echo(f"overlap_probe: {error}".encode("utf-8", "backslashreplace").decode(), err=True)
            signal_number = getattr(error, "signal_number", None)
            code = BAD_INPUT if signal_number is None else 128 + signal_number
        sys.exit(code or 0)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(op.__version__)
def main() -> None:
    """Do FSDP's all-gathers hide behind GEMMs, how much of them does, and why not the rest?"""


for command in (run, analyze, report, assert_):
    main.add_command(command)

if __name__ == "__main__":
    main()
