"""Every codec against the conformance suite."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.conformance.codec_suite")

from tests.conformance.codec_suite import CASES, CodecSuite  # noqa: E402


@pytest.mark.parametrize("case", CASES, ids=str)
class TestCodecs(CodecSuite):
    pass
