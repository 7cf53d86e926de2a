"""Learning rates: measured in trial steps, after which everything is as it was before."""

from gefen.tools.lr_calibration import (
    GroupUpdateStats,
    LRRangeResult,
    ParamVsAdamw,
    RelativeCalibration,
    calibrate_relative,
    calibrate_vs_adamw,
    lr_range_test,
    measure_update_rms,
)

__all__ = [
    "GroupUpdateStats",
    "LRRangeResult",
    "ParamVsAdamw",
    "RelativeCalibration",
    "calibrate_relative",
    "calibrate_vs_adamw",
    "lr_range_test",
    "measure_update_rms",
]
