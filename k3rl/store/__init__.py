"""The trajectory store. See README.md."""
