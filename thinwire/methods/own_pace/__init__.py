"""The ground of methods without a common step: every rank is an island, and takes steps at its own pace."""
