"""Sharded stepping."""
