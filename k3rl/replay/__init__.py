"""Replay of stored trajectories. See README.md."""
