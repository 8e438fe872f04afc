"""`loss.gradient_filter` in a training run."""

from gac.training.trainer import Trainer
from tests.tiny import metrics, tiny_config

REPORT = "kept_columns", "dropped_mass"


def test_a_run_filters_its_gradient_and_reports_it(task, tmp_path) -> None:
    runs = {}
    for name, settings in (
        ("exact", None),
        ("eps 0", {"eps": 0}),
        ("filtered", {"eps": 0.3, "max_columns": 1.0, "max_dropped": 1.0}),
    ):
        Trainer(
            tiny_config(task, tmp_path / name, loss={"gradient_filter": settings}, steps=2)
        ).run()
        runs[name] = metrics(tmp_path / name)
    for exact, same, filtered in zip(*runs.values(), strict=True):
        assert not {*REPORT} & {*exact}
        assert [same[x] for x in REPORT] == [1, 0]
        assert all(same[x] == exact[x] for x in ("grad_norm", "rollout_loss", "demo_loss"))
        assert 0 < filtered["kept_columns"] < 1
        assert 0 < filtered["dropped_mass"] < 1
    assert filtered["grad_norm"] != exact["grad_norm"]
