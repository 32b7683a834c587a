"""The learner. See README.md."""
