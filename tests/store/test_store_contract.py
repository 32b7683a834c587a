"""Every implementation of TrajectoryStore against the contract."""

import asyncio

import pytest

from tests.store.store_builders import service
from tests.store.store_contract import CASES

IMPLEMENTATIONS = {"service": service}


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return IMPLEMENTATIONS[request.param]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_contract(implementation, case, tmp_path, valkey):
    async def go():
        async with implementation(tmp_path / "store", valkey) as store:
            await asyncio.wait_for(case(store), 30)

    asyncio.run(go())
