from tests.store.conftest import valkey as valkey
