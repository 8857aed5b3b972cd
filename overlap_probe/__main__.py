"""`python -m overlap_probe`."""

from overlap_probe.cli import main

main(prog_name="overlap_probe")
