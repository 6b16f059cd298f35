from __future__ import annotations

from tests.conformance.reduction_suite import *  # noqa: F403
