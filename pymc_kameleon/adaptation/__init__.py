"""What a chain learns while it is tuned."""
