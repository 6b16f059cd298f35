"""`python -m thinwire` runs the same command line as the script `thinwire`."""

from __future__ import annotations

from thinwire.cli import main

main()
