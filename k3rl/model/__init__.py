"""K3 in plain PyTorch. See README.md."""
