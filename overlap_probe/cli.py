"""The command line: gathers the commands, and turns errors and verdicts into exit codes.

The idea: errors of our own become one line and exit code 2 here and nowhere else; a command returns its exit code.
"""

from __future__ import annotations

import errno
import os
import shlex
import signal
import sys
import traceback
from typing import Any

import click

import overlap_probe as op
from overlap_probe.commands.analyze import analyze
from overlap_probe.commands.assert_ import assert_
from overlap_probe.commands.baseline import baseline
from overlap_probe.commands.diff import diff
from overlap_probe.commands.doctor import doctor
from overlap_probe.commands.report import report
from overlap_probe.commands.run import run
from overlap_probe.commands.scrub import scrub

BAD_INPUT = 2
INTERRUPTED = 128 + signal.SIGINT
NOBODY_READS = 128 + signal.SIGPIPE

_NO_ARGUMENTS: Any = getattr(click.exceptions, "NoArgsIsHelpError", ())
"""What a click from 8.2 on raises to show the help; an older one shows it and exits with 0."""


class _Commands(click.Group):
    def main(self, *args: Any, **kwargs: Any) -> Any:
        kwargs["standalone_mode"] = False
        typed = sys.argv[1:] if not args or args[0] is None else args[0]
        try:
            code = super().main(*args, **kwargs)
        except _NO_ARGUMENTS as error:
            error.show()
            code = BAD_INPUT
        except click.ClickException as error:
            context = getattr(error, "ctx", None)
            _say(error.format_message().rstrip("."), f"; try {context.command_path} --help" if context else "")
            code = BAD_INPUT
        except (click.Abort, KeyboardInterrupt):
            _say("interrupted")
            code = INTERRUPTED
        except op.OverlapProbeError as error:
            _say(str(error))
            signal_number = getattr(error, "signal_number", None)
            code = BAD_INPUT if signal_number is None else 128 + signal_number
        except Exception as error:  # nobody foresaw it; Python's own exit code would read as a check that failed
            traceback.print_exc()
            what = f"{type(error).__name__}: {' '.join(str(error).split())} (command {shlex.join(typed)})"
            _say(f"internal error: {what}; please report it with this traceback")
            code = BAD_INPUT
        sys.exit(code or 0)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. What the system refuses concerns the file that it names, else the output."""
        try:
            code = super().invoke(ctx)
            sys.stdout.flush()
            return code
        except OSError as error:
            if error.filename is not None:
                problem = f"{os.fsdecode(error.filename)}: {error.strerror}; give another name"
                raise op.OverlapProbeError(problem) from error
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would try again as it ends
            if error.errno == errno.EPIPE:
                return NOBODY_READS
            raise op.OverlapProbeError(f"the output cannot be written: {error.strerror or error}") from error


def _say(*parts: str) -> None:
    text = f"overlap_probe: {''.join(parts)}"
    click.echo(text.encode("utf-8", "backslashreplace").decode(), err=True)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(op.__version__)
def main() -> None:
    """Do FSDP's all-gathers hide behind GEMMs, how much of them does, and why not the rest?"""


for command in (run, analyze, report, assert_, diff, baseline, doctor, scrub):
    main.add_command(command)

if __name__ == "__main__":
    main()
