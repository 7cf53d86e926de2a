"""Quantised optimizer updates."""
