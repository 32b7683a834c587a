"""Objectives, advantage rules and budgets. See README.md."""
