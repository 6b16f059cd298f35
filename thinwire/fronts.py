"""Loads the hosts that run methods of islands in your own training loop; see `thinwire.methods.front`."""

from __future__ import annotations

import thinwire.islands.library
import thinwire.islands.meetings
import thinwire.islands.ticks  # noqa: F401
