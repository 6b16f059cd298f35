from __future__ import annotations

from tests.conformance.layout_suite import LayoutSuite


class TestLayouts(LayoutSuite):
    pass
