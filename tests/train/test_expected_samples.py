"""How many samples a run expects to train: what its progress is measured by."""

from dataclasses import replace

import pytest
from test_run import CONFIG, stop_after

from rowhaul.train import train_run
from rowhaul.train.session import Listener


class Expecting(Listener):
    """Notes how many samples are expected, and how many were trained."""

    def started(self, samples, total_samples):
        self.expected = total_samples

    def stepped(self, samples, loss):
        self.trained = samples


@pytest.mark.parametrize(("batch_size", "max_steps"), [(700, 0), (700, 9), (700, 11), (700, 99), (7000, 2)])
def test_short_batches_at_the_end_of_epochs_are_expected(
    batch_size, max_steps, tmp_path, log_schema, log_folder
):
    config = replace(CONFIG, batch_size=batch_size, epochs=3, max_steps=max_steps, checkpoint_every=0)
    straight, resumed = Expecting(), Expecting()
    train_run(config, log_schema, log_folder, listener=straight)
    assert straight.expected == straight.trained
    train_run(config, log_schema, log_folder, out=tmp_path / "r", should_stop=stop_after(1))
    train_run(config, log_schema, log_folder, out=tmp_path / "r", resume=True, listener=resumed)
    assert resumed.expected == straight.expected
