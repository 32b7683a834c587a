"""Rollouts: engines, renderer, episode. See README.md."""
