"""Self-contained HTML pages of a run or a race: plots, figures, configuration."""

from thinwire.report.page import write_report
from thinwire.report.race import write_race_report

__all__ = ["write_race_report", "write_report"]
