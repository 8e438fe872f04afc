from tests.heads.conftest import trl_head_on_cpus

__all__ = ["trl_head_on_cpus"]
