"""A run as one page that can be mailed: plots, figures, configuration."""

from thinwire.report.page import write_report

__all__ = ["write_report"]
