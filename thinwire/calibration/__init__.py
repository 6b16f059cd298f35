"""Measures what this cluster can do, on all of its ranks together."""

from thinwire.calibration.levels import measure_links
from thinwire.calibration.links import measured_rates
from thinwire.calibration.machine import calibrate
from thinwire.calibration.work import matrix_flops, step_flops

__all__ = ["calibrate", "matrix_flops", "measure_links", "measured_rates", "step_flops"]
