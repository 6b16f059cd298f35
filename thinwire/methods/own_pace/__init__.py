"""The base of methods without a common step: every rank is an island and steps at its own pace."""
