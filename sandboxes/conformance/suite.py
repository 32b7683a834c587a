"""All checks, by what they attack."""

from __future__ import annotations

from k3rl.sandboxes.conformance import (
    failures,
    host,
    identity,
    neighbours,
    network,
    output,
    privileges,
    processes,
    resources,
    transfer,
)
from k3rl.sandboxes.conformance.check import Check

CHECKS: tuple[Check, ...] = (
    *failures.CHECKS,
    *processes.CHECKS,
    *neighbours.CHECKS,
    *resources.CHECKS,
    *host.CHECKS,
    *privileges.CHECKS,
    *network.CHECKS,
    *transfer.CHECKS,
    *output.CHECKS,
    *identity.CHECKS,
)
