"""`python -m overlap_probe`. An interrupt while the commands are loaded ends it as quietly as one at work."""

import sys

try:
    from overlap_probe.cli import main
except KeyboardInterrupt:
    print("overlap_probe: interrupted", file=sys.stderr)
    sys.exit(130)

main(prog_name="overlap_probe")
