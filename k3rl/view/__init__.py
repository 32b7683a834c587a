"""Looking at a run without a terminal."""
