import pytest

from gac.sandbox.pool import Pool


@pytest.fixture
def pool():
    pool = Pool(workers=2)
    yield pool
    pool.close()
