"""The command line. See README.md."""
