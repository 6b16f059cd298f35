"""`python -m thinwire` is the console script."""

from __future__ import annotations

from thinwire.cli import main

main()
