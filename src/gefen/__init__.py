"""AdamW and Muon at about one byte of optimizer state per parameter."""
