"""Published policy versions. See README.md."""
