"""The release gate: audit a wheel, install it into a clean environment, and try to break it."""
