"""In gefen-x a command that calibrates models of Hugging Face; here a hint."""

import sys

if __name__ == "__main__":
    sys.exit(
        "gefen.tools.run_model_calibration of gefen-x is not available: load the model yourself "
        "and call gefen.tools.calibrate_vs_adamw(optimizer, closure)"
    )
