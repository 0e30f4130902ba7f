"""When versions of a model are published: all ranks of a cluster have to ask in the same step."""

from types import SimpleNamespace

import pytest

from rowhaul.train.publish_config import PublishConfig
from rowhaul.train.publish_loop import Publishing


@pytest.mark.parametrize("begins", [True, False])
def test_a_step_is_asked_for_once_whether_or_not_a_version_could_begin(begins):
    """On rank 0 a version that fails has begun, on the others it has not."""
    asked = []

    def publish_beside(done, waits):
        asked.append((session.trainer.step, waits))
        return begins

    config = SimpleNamespace(publish=PublishConfig(to="served", every="5"))
    session = SimpleNamespace(
        trainer=SimpleNamespace(config=config, step=0), publish_due=False, publish_beside=publish_beside
    )
    publishing = Publishing(session, print)
    for step in (5, 5, 7, 10):  # a stream that ends after a step is seen to end in it
        session.trainer.step = step
        publishing.publish_if_due()
    assert asked == [(5, True), (10, True)]
