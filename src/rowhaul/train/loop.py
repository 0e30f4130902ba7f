"""The training loop of a run, over a `Session`: one process, or one rank of a cluster."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rowhaul._activity import Activity, doing
from rowhaul.checkpoint import Place
from rowhaul.data.sources.live import UNKNOWN_END, LiveStream
from rowhaul.errors import CheckpointError, DataError
from rowhaul.monitoring.monitor import EVALUATING, TRAINING
from rowhaul.train.checkpoint_pace import pace_of
from rowhaul.train.metrics import MetricValues
from rowhaul.train.publish_loop import Publishing
from rowhaul.train.run_data import data_facts, write_contents
from rowhaul.train.run_folder import drop_old_checkpoints, run_facts
from rowhaul.train.run_stream import acknowledging
from rowhaul.train.session import Listener, RunResult, Session


def train(
    session: Session, checkpoints: Place | None, listener: Listener | None, notes: Sequence[str] = ()
) -> RunResult:
    """Train to the end, evaluating and saving on the way; ``notes`` are of how the run began."""
    return _Loop(session, checkpoints, listener).run(notes)


class _Loop:
    def __init__(self, session: Session, checkpoints: Place | None, listener: Listener | None) -> None:
        self._session, self._checkpoints, self._listener = session, checkpoints, listener
        self._trainer, self._config, self._log = session.trainer, session.trainer.config, session.log
        self._first_step = session.trainer.step
        self._pace = pace_of(self._config.checkpoint_every)
        self._publishing = Publishing(session, self._tell)
        self._saved_at = time.monotonic()
        self._saved_step = self._first_step  # 0: nothing is saved
        self._asked_step = self._first_step  # the last that was asked about
        self._under_way = 0  # the step of a save beside training that nothing was heard of; 0: none
        # Of saves that have ended: the step, the error, and what kept old checkpoints from being removed.
        self._outcomes: deque[tuple[int, Exception | None, Exception | None]] = deque()
        self._evaluated_step = -1  # the last of this call
        self._patience = session.trainer.patience
        session.should_save, session.tell = self._is_save_overdue, self._tell

    def run(self, notes: Sequence[str]) -> RunResult:
        session, trainer, config = self._session, self._trainer, self._config
        total, metrics = trainer.total_steps, None
        has_end = total < UNKNOWN_END
        known_last, known_total = (self._last_sample(), total) if has_end else (0, 0)
        if self._listener:
            self._listener.started(trainer.samples, known_last)
        self._log.monitor.started(trainer.step, trainer.samples, known_total, known_last)
        until = f"to {total:,}" if has_end else "on"
        self._log.event("start", trainer.step, f"training from step {trainer.step:,} {until}")
        with self._log:
            for note in (*notes, *config.prune.unused(total, config.model.embedding_dim)):
                self._tell(note)
            if config.eval_every and session.evaluation is None:
                self._tell(
                    f"eval_every is {config.eval_every:,}, but nothing is evaluated on the way: there are no "
                    "samples for it (--eval-data)"
                )
            session.start()
            if session.first_note:
                self._log.note(trainer.step, session.first_note)
            if trainer.step < total and self._is_evaluation_missing():
                metrics = self._evaluate()
            ends_early = trainer.step < total and self._ends_early(metrics)
            while trainer.step < total and not session.finished and not ends_early:
                self._train_until(self._next_pause())
                self._score(at_end=False)
                if session.stopped:
                    break
                if trainer.step < total:
                    if self._is_due(config.eval_every) and trainer.step != self._evaluated_step:
                        metrics = self._evaluate()
                        if ends_early := self._ends_early(metrics):
                            break
                    # What a session does at checkpoints may change bits later on, so not at the clock's.
                    at_checkpoint = self._is_checkpoint_due()
                    session.rest(at_checkpoint)
                    if session.hands_over:
                        break
                    if at_checkpoint or session.save_due:
                        self._save_beside()
                    self._publishing.publish_if_due()
            self._score(at_end=True)
            interrupted = (session.stopped or session.hands_over) and trainer.step < total
            self._check_trained(interrupted)
            self._save()  # before an evaluation that might fail
            self._publishing.publish_last()
            if not interrupted and trainer.step != self._evaluated_step:
                metrics = self._evaluate()
            session.finish()
        how = "handed over" if session.hands_over else "interrupted" if interrupted else "finished"
        self._log.event("end", trainer.step, how)
        num_rows, row_bytes = session.held()
        return RunResult(
            step=trainer.step,
            steps_taken=trainer.step - self._first_step,
            samples=trainer.samples,
            samples_per_second=self._log.samples_per_second,
            metrics=metrics,
            interrupted=interrupted,
            num_rows=num_rows,
            row_bytes=row_bytes,
            row_counts=self._log.row_counts,
            pruning=trainer.collection.source.report(),
            note=session.first_note,
            waits=session.waits,
            stream_ended=session.finished and isinstance(session.stream, LiveStream),
            ended_early=self._patience.is_over,
        )

    def _last_sample(self) -> int:
        """Return how many samples are trained after the last step: an epoch may end with a shorter batch."""
        trainer, size, epoch = self._trainer, self._config.batch_size, self._session.stream.num_samples
        steps, begun = max(trainer.total_steps - trainer.step, 0), trainer.samples
        if not epoch:  # a stream has none
            return begun + steps * size
        in_this_epoch = -(-(epoch - begun % epoch) // size)
        if steps < in_this_epoch:
            return begun + steps * size
        epochs, rest = divmod(steps - in_this_epoch, -(-epoch // size))
        return (begun // epoch + 1 + epochs) * epoch + rest * size

    def _check_trained(self, interrupted: bool) -> None:
        """Refuse to save a model that has seen nothing, as one of an empty file is refused."""
        stream, trained = self._session.stream, self._trainer.samples
        if not isinstance(stream, LiveStream) or trained or interrupted:
            return
        if not (stream.ended_idle or stream.stopped):
            raise DataError(
                f"{stream.source.name} has ended without one sample; nothing was trained. See whether what "
                "should write to it does, and train again (with --resume into the same --out)"
            )

    def _train_until(self, step: int) -> None:
        session, trainer = self._session, self._trainer
        self._log.resume_clock(trainer.samples)
        self._log.monitor.begin(TRAINING)
        for batch in session.batches(step - trainer.step):
            loss = session.train(batch)
            self._log.stepped(trainer.step, trainer.samples, loss)
            if self._listener:
                self._listener.stepped(trainer.samples, loss)
            self._tell_outcomes()
            self._publishing.tell_outcomes()
        if not isinstance(session.stream, LiveStream):
            for note in session.stream.news():
                self._tell(note)

    def _next_pause(self) -> int:
        """The step after which there is something else to do, counted from the beginning of the run."""
        step = self._trainer.step
        steps = self._config.eval_every, self._pace.steps, self._publishing.pace.steps
        every = [one for one in steps if one]
        pauses = [(step // one + 1) * one for one in every] + self._session.pauses()
        if (progressive := self._trainer.progressive) is not None:
            pauses.append(step + progressive.steps_left(self._trainer.samples, self._config.batch_size))
        return min(self._trainer.total_steps, *pauses, 1 << 62)

    def _is_due(self, every: int) -> bool:
        return bool(every) and self._trainer.step % every == 0

    def _is_checkpoint_due(self) -> bool:
        """Whether steps ask for a checkpoint; once a step, as streams may pause or end after one."""
        before, self._asked_step = self._asked_step, self._trainer.step
        return self._is_due(self._pace.steps) and self._trainer.step > before

    def _is_evaluation_missing(self) -> bool:
        """Whether the run was stopped at a step at which it should have been evaluated first."""
        return self._is_due(self._config.eval_every) and self._trainer.evaluated_step < self._trainer.step

    def _ends_early(self, metrics: MetricValues | None) -> bool:
        """Count an evaluation, if there is one, and tell that the run ends if there were too many."""
        self._patience.count(metrics)
        if self._patience.is_over:
            self._tell(f"ended early: {self._patience.reason}")
        return self._patience.is_over

    def _is_save_overdue(self) -> bool:
        by_clock = self._checkpoints is not None and self._pace.seconds > 0
        return by_clock and time.monotonic() - self._saved_at >= self._pace.seconds

    def _score(self, at_end: bool) -> None:
        """Report a window of progressive validation that has ended, or is cut off by the end of the run."""
        progressive, samples = self._trainer.progressive, self._trainer.samples
        if progressive is None:
            return
        if not progressive.is_due(samples) and not (at_end and progressive.began < samples):
            return
        scores = self._session.gather_scores(progressive.take(samples))
        if self._session.is_leader:
            values = scores.values()
            self._log.scored(self._trainer.step, values)
            self._publishing.scored(self._trainer.step, values)
            if self._listener:
                self._listener.scored(self._trainer.step, values)

    def _evaluate(self) -> MetricValues | None:
        session = self._session
        if session.evaluation is None:
            return None
        if self._listener:
            self._listener.evaluating(session.evaluation.num_samples)
        self._log.monitor.begin(EVALUATING)
        metrics = session.evaluate()
        self._evaluated_step = self._trainer.evaluated_step = self._trainer.step
        if session.is_leader:
            self._log.evaluation(self._trainer.step, metrics)
        if self._listener:
            self._listener.evaluated(self._trainer.step, metrics)
        return metrics

    def _save(self) -> None:
        """Save the last checkpoint, and wait until it is complete."""
        if self._checkpoints is None:
            return
        step, acknowledge = self._trainer.step, acknowledging(self._session.stream)
        self._keep_contents()
        try:
            with self._log.monitor.saving(step):
                self._session.save(self._checkpoints, self._facts())
        except CheckpointError as error:
            self._tell_outcomes()
            raise CheckpointError(f"{error}; of the checkpoints before, {self._newest()}") from error
        acknowledge()
        self._drop_old(step, None)
        self._tell_outcomes()

    def _save_beside(self) -> None:
        """Save while training goes on; a save that fails is tried again when the next is due."""
        if self._checkpoints is None:
            return
        step, self._saved_at = self._trainer.step, time.monotonic()
        self._keep_contents()
        try:
            # Checkpoints that are asked for by step are all there; one more by the clock can be left out.
            waits = self._is_due(self._pace.steps)
            done = partial(self._end_save, time.monotonic(), step, acknowledging(self._session.stream))
            if self._session.save_beside(self._checkpoints, self._facts(), done, waits=waits):
                self._under_way = step
            elif self._under_way:
                busy = f"the checkpoint of step {self._under_way:,} is still being written"
                self._tell(f"{busy}; there is none of step {step:,}")
                self._under_way = 0  # once is enough
        except CheckpointError as error:
            self._end_save(self._saved_at, step, lambda: None, error)
        self._tell_outcomes()

    def _facts(self) -> dict[str, Any]:
        facts = data_facts(self._session.stream) | run_facts(self._config, self._trainer.schema)
        return {**facts, **self._trainer.evaluation_facts(), **self._session.more_facts}

    def _keep_contents(self) -> None:
        """Keep digests of what was read so far; without them only less is noticed when the run resumes."""
        folder, stream = self._session.contents_folder, self._session.stream
        if folder is not None and not isinstance(stream, LiveStream):
            try:
                with doing(Activity.SAVING):
                    write_contents(folder, stream)
            except OSError as error:
                self._tell(f"digests of the data cannot be kept: {error}")

    def _end_save(
        self, began: float, step: int, acknowledge: Callable[[], None], error: Exception | None
    ) -> None:
        """Count a save beside training, in the thread that has saved."""
        if error is None:
            acknowledge()
            self._log.monitor.saved(step, time.monotonic() - began)
        else:
            self._log.monitor.save_failed(step)
        self._drop_old(step, error)

    def _drop_old(self, step: int, error: Exception | None) -> None:
        """Remove old checkpoints, in the thread that has saved; the main thread reports."""
        trouble: Exception | None = None
        if error is None and self._session.is_leader and self._checkpoints is not None:
            try:
                drop_old_checkpoints(self._checkpoints, self._config.keep_checkpoints)
            except Exception as found:  # the checkpoint is there all the same
                trouble = found
        self._outcomes.append((step, error, trouble))

    def _tell_outcomes(self) -> None:
        while self._outcomes:
            step, error, trouble = self._outcomes.popleft()
            if step == self._under_way:
                self._under_way = 0
            if error is None:
                self._saved_step = step
                self._log.event("checkpoint", step, f"saved a checkpoint of step {step:,}")
            else:
                self._tell(
                    f"the checkpoint of step {step:,} failed, training goes on: {error}; of the checkpoints "
                    f"before, {self._newest()}; saving is tried again when the next is due"
                )
            if trouble is not None:
                self._tell(f"old checkpoints cannot be removed: {trouble}")

    def _newest(self) -> str:
        return f"the newest is of step {self._saved_step:,}" if self._saved_step else "there is none yet"

    def _tell(self, text: str) -> None:
        if self._session.is_leader:
            self._log.note(self._trainer.step, text)
        if self._listener:
            self._listener.noted(text)
