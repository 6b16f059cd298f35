"""Every codec against the conformance suite."""

from __future__ import annotations

import pytest

from tests.conformance.codec_suite import CASES, CodecSuite


@pytest.mark.parametrize("case", CASES, ids=str)
class TestCodecs(CodecSuite):
    pass
