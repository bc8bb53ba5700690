"""One run: a method learns one seed of a benchmark; it can be killed and continued."""

import json
import logging
import math
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from proxreplay.batch import Batch
from proxreplay.data import Stream, Subset
from proxreplay.distributed import Processes, compare, current
from proxreplay.errors import CheckpointError, DataError, DivergenceError, ProxreplayError
from proxreplay.evaluation import evaluate_each
from proxreplay.experiments.build import build_learner, build_stream
from proxreplay.experiments.checkpoint import load_checkpoint, remove_checkpoints, save_checkpoint
from proxreplay.experiments.config import RunConfig, differences
from proxreplay.experiments.configure import declared
from proxreplay.experiments.diagnose import Diagnostics
from proxreplay.experiments.environment import (
    keep_environment,
    logging_to,
    storage_trouble,
    threads,
)
from proxreplay.experiments.interrupt import StopRequest
from proxreplay.experiments.joint import NoJournal, check_same_start, evaluated_together
from proxreplay.experiments.journal import Journal
from proxreplay.experiments.ownership import mark_failed, owned, refuse_foreign
from proxreplay.experiments.results import (
    Record,
    Result,
    read_lines,
    read_run,
    read_timings,
    summarise,
)
from proxreplay.experiments.trackers import Tracking, check_trackers, hand_over
from proxreplay.files import write_json
from proxreplay.options import CHECKPOINT_EVERY, PREDICTORS, Count, Options
from proxreplay.replay import Learner
from proxreplay.replay.floors import Floor
from proxreplay.seeding import generator

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunOptions(Options):
    """How a run is made; none of it changes what the run computes."""

    data_root: Path | None = None  # where data sets are looked for
    checkpoint_every: Count = CHECKPOINT_EVERY  # stream batches between checkpoints
    track: tuple[str, ...] = ()  # names of trackers that are handed the records too

    def __post_init__(self) -> None:
        super().__post_init__()
        check_trackers(self.track)


class Interrupted(ProxreplayError):
    """Somebody asked the run to stop; its state is saved."""


@dataclass(frozen=True)
class RunProgress:
    """How far a run has come."""

    position: int  # stream batches done
    total: int  # stream batches in all
    task: int  # the task the last batch came from
    tasks: int  # how many there are
    accuracy: float | None  # at the last evaluation, over all tasks seen


def run(
    config: RunConfig,
    folder: Path,
    options: RunOptions | None = None,
    *,
    stop: StopRequest | None = None,
    on_progress: Callable[[RunProgress], None] = lambda progress: None,
) -> Result:
    """Make a run, or what is still missing of it, in a folder of its own.

    A complete run is not made again; an incomplete one goes on from its newest checkpoint, and its
    records and result are bit-identical to those of a run that was never interrupted. The folder
    must be new or belong to ``config``.

    ``stop`` is looked at after every batch; if set, the state is saved and `Interrupted` raised.
    ``on_progress`` is called after every batch. Where a process group of torch is up, all of its
    processes have to call this; they make the run together, and process 0 writes.
    """
    stop, options = StopRequest() if stop is None else stop, options or RunOptions()
    processes = current().holding(replicated=True)
    with storage_trouble(folder), threads(config.threads), ExitStack() as held:
        check_same_start(processes, config)

        begun = os.path.exists(folder / "config.yaml")

        def take() -> Result | None:
            held.enter_context(owned(folder, config))
            return _finished(config, folder, options)

        def open_folder() -> Result | None:
            if begun:
                return take()
            refuse_foreign(folder)
            return None

        def take_folder() -> Result | None:
            # somebody else may have made the run meanwhile
            if not begun and (done := take()) is not None:
                return done
            held.enter_context(logging_to(folder / "log.txt"))
            (folder / "failure.txt").unlink(missing_ok=True)
            return None

        def first(act: Callable[[], Result | None]) -> Result | None:
            own = act if processes.writes else lambda: None
            return processes.from_first(processes.together("opening the folder", own))

        if (done := first(open_folder)) is not None:
            return done
        # it may fail; until then nothing is written
        made = processes.together("getting ready", lambda: _Run(config, folder, options, processes))
        if not processes.alone:  # a digest may take its time
            compare(processes, "the stream", {"batches": len(made.stream), "data": made.digest()})
        if (done := first(take_folder)) is not None:
            return done
        try:
            return made.finish(stop, on_progress)
        except (Interrupted, OSError):  # resumable as it is
            raise
        except Exception as error:
            if isinstance(error, DivergenceError):
                good, batches = folder / "diverged.safetensors", made.stream.position
                made.learner.save(good)
                error.args = (f"{error} After {batches} stream batches; the learner is in {good}",)
            known = isinstance(error, ProxreplayError)
            if processes.writes:
                mark_failed(folder, str(error) if known else traceback.format_exc())
            raise


def _finished(config: RunConfig, folder: Path, options: RunOptions) -> Result | None:
    """The result of a run that is complete; None for one that is not."""
    stored = read_run(folder)
    if stored.status == "broken":
        raise DataError(
            f"{folder}: its result cannot be read ({stored.problem}). Remove that file to make the "
            "run again."
        )
    if stored.result is not None:
        try:
            stored.check_records()
        except DataError as error:
            raise DataError(f"{folder}: {error}") from error
        remove_checkpoints(folder / "checkpoint")
        hand_over(config, folder, options.track)
    return stored.result


class _Run:
    """The state of a run in progress."""

    def __init__(
        self, config: RunConfig, folder: Path, options: RunOptions, processes: Processes
    ) -> None:
        benchmark = declared(config)
        dataset = benchmark.load(options.data_root)
        self.config = config
        self.folder = folder
        self.options = options
        self.processes = processes
        self.stream = build_stream(config, benchmark, dataset)
        self.diagnostics = Diagnostics(config.diagnostics, self.stream)
        self.learner = build_learner(config, benchmark, dataset, self.stream, [self.diagnostics])
        self.seconds = dict.fromkeys(("learning", "evaluating", "saving"), 0.0)
        self.accuracy: float | None = None
        self.untreated: dict[str, str] | None = None
        writes = processes.writes
        self.records = Journal(folder / "records.jsonl") if writes else NoJournal()
        self.digest = dataset.digest
        self.tracking: Tracking | None = None

    def finish(self, stop: StopRequest, on_progress: Callable[[RunProgress], None]) -> Result:
        """Go through the rest of the stream and write the result."""
        if self.processes.writes:
            keep_environment(self.folder / "environment.json", self.digest)
        self._restore()
        with self.records, self._tracked() as self.tracking:
            for batch in self.stream:
                self.diagnostics.before_batch(self.learner, batch)
                self._learn(batch)
                due = evaluation_due(self.stream, self.stream.position - 1, self.config.eval_every)
                if due:
                    self._evaluate(batch)
                for record in self.diagnostics.after_batch(
                    _moment(batch), batch.labels, evaluated=due
                ):
                    self._record(record)
                on_progress(self._progress(batch))
                if self.processes.any(stop):
                    stop.signal = stop.signal or signal.SIGTERM  # it may have reached others only
                    self._save()
                    raise Interrupted(
                        f"stopped after {self.stream.position} of {len(self.stream)} stream "
                        f"batches; go on with: proxreplay resume {self.folder}"
                    )
                if self.stream.position % self.options.checkpoint_every == 0:
                    self._save()
            if self.config.test:
                self._judge("test", {}, [task.test for task in self.stream.tasks])
            last = {"position": self.stream.position - 1, "task": len(self.stream.tasks) - 1}
            for record in self.diagnostics.at_end(last):
                self._record(record)
            self._record_timings()
            self._say_if_idle()
            written = self.records.secure()
            self.tracking.complete(written["sha256"])
        if self.processes.writes:
            return self.processes.from_first(self._result(written))
        done: Any = self.processes.from_first(None)
        return done  # type: ignore[no-any-return]

    def _say_if_idle(self) -> None:
        """A rule that never had anything to do has changed nothing, which no number shows."""
        rule = self.learner.rule
        if rule is not None and rule.idle() is not None:
            log.warning(
                "%s: %s never acted, because the stream ended before its first refresh, so this is "
                "the method without it; refresh earlier: --set refresh.every=1",
                self.folder,
                type(rule).__name__,
            )

    def _result(self, written: dict[str, Any]) -> Result:
        """Write the result; nothing else is needed any more."""
        self.records.check(written)
        result = summarise(read_lines(self.records.path), self.config.eval_every)
        result = replace(result, records_sha256=written["sha256"])
        write_json(self.folder / "result.json", result.to_json())
        remove_checkpoints(self.folder / "checkpoint")
        log.info("complete: %s", result)
        return result

    def _tracked(self) -> Tracking:
        names = self.options.track if self.processes.writes else ()
        earlier = read_lines(self.records.path) if names else ()
        return Tracking(names, self.config, self.folder, earlier)

    def _learn(self, batch: Batch) -> None:
        with self._clock("learning"):
            learned = self.learner.learn(batch)
        if batch.train and not math.isnan(learned.loss):  # a floor has none
            self._record({"kind": "train", **_moment(batch), "loss": learned.loss})
        if learned.refreshed is not None:
            self._record_refresh(batch, learned.refreshed)
        if self.config.refresh.interval is None and self.stream.ends_task(self.stream.position - 1):
            self._refresh_from_task(batch)

    def _refresh_from_task(self, batch: Batch) -> None:
        """Let the rule see examples of the task that is over, as the network sees test inputs."""
        t = batch.task
        assert t is not None
        with self._clock("learning"):
            task = self.stream.arriving(t)
            rng = generator(self.config.seed, f"task-end/{t}")
            drawn = torch.randperm(len(task), generator=rng)[: self.config.refresh.samples]
            chosen = task.source[task.rows[drawn]].inputs
            assert isinstance(self.learner, Learner)  # a floor has no rule
            self.learner.refresh(chosen)
        self._record_refresh(batch, len(chosen))

    def _record_refresh(self, batch: Batch, examples: int) -> None:
        share = getattr(self.learner.rule, "share", None)
        known = {} if share is None else {"share": share}
        self._record({"kind": "refresh", **_moment(batch), "examples": examples, **known})
        untreated = getattr(self.learner.rule, "untreated", None)
        if untreated and untreated != self.untreated:
            self.untreated = dict(untreated)
            self._record({"kind": "rule", **_moment(batch), "untreated": self.untreated})

    def _evaluate(self, batch: Batch) -> None:
        assert batch.task is not None
        moment = _moment(batch)
        seen = [task.validation for task in self.stream.tasks[: batch.task + 1]]
        accuracies = self._judge("validation", moment, seen)
        self.accuracy = sum(accuracies) / len(accuracies)

    def _judge(self, split: str, moment: Record, tasks: list[Subset]) -> list[float]:
        """Record accuracy and loss per task; with an average, of every predictor there is."""
        chosen = (names := _predictors(self.learner))[0]

        def logits(x: Tensor) -> Mapping[str, Tensor]:
            return self.learner.logits_of_each(x, names)

        with self._clock("evaluating"):
            found = evaluate_each(lambda x: evaluated_together(self.processes, logits, x), tasks)
        if not all(map(math.isfinite, found[chosen].loss)):
            raise DivergenceError(f"the {split} loss is not finite: {found[chosen].loss}.")
        event = {"kind": "evaluation", "split": split, **moment}
        for name in names:
            which: Record = {"online": True} if name == "online" else {"predictor": name}
            values = {"accuracy": found[name].accuracy, "loss": found[name].loss}
            self._record({**event, **({} if name == chosen else which), **values})
        return found[chosen].accuracy

    def _record(self, record: Record) -> None:
        self.records.write(record)
        if self.tracking is not None:
            self.tracking.write(record)

    def _progress(self, batch: Batch) -> RunProgress:
        assert batch.task is not None
        done, total = self.stream.position, len(self.stream)
        return RunProgress(done, total, batch.task, len(self.stream.tasks), self.accuracy)

    def _save(self) -> None:
        with self._clock("saving"):
            state = {
                "config": self.config.to_dict(),
                "stream": self.stream.state_dict(),
                "records": self.records.secure(),
                "accuracy": self.accuracy,
                "untreated": self.untreated,
                "diagnostics": self.diagnostics.state_dict(),
            }
            parts = {"run": state, **self.learner.state_dict()}
            if self.processes.writes:
                save_checkpoint(self.folder / "checkpoint", self.stream.position, parts)
        self._record_timings()

    def _record_timings(self) -> None:
        """Append the seconds spent so far; a run never stops because that fails."""
        if not self.processes.writes:
            return
        line = json.dumps({"position": self.stream.position, **self.seconds})
        try:
            with (self.folder / "timings.jsonl").open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError as error:
            log.warning("timings.jsonl could not be written: %s", error)

    def _restore(self) -> None:
        """Go back to the newest checkpoint; what was recorded after it is made again.

        Process 0 reads it for all.
        """
        read = partial(load_checkpoint, self.folder / "checkpoint", self._check_fits)
        own = read if self.processes.writes else lambda: None
        parts = self.processes.from_first(self.processes.together("resuming", own))
        state: dict[str, Any] = {"records": 0, "accuracy": None, "untreated": None}
        if parts is not None:
            state = parts.pop("run")
            self.stream.load_state_dict(state["stream"])
            self.learner.load_state_dict(parts)
            self.diagnostics.load_state_dict(state["diagnostics"])
            log.info("resumed after %d stream batches", self.stream.position)
        self.records.check(state["records"])
        self.accuracy = state["accuracy"]
        self.untreated = state["untreated"]
        with suppress(DataError, OSError):  # a run never stops because of its timings
            spent = (read_timings(self.folder / "timings.jsonl") or [{}])[-1]
            self.seconds |= {k: spent[k] for k in self.seconds if isinstance(spent.get(k), float)}

    def _check_fits(self, parts: dict[str, Any]) -> None:
        """Raise a CheckpointError unless a checkpoint is of this run and its records are there."""
        try:
            saved = RunConfig("", "").with_values(parts["run"].get("config", self.config.to_dict()))
            if differing := differences(saved, self.config):
                raise CheckpointError(f"it is of another configuration ({'; '.join(differing)})")
            self.records.check(parts["run"]["records"])
        except (LookupError, TypeError, AttributeError) as error:
            raise CheckpointError(f"this is not the checkpoint of a run ({error!r})") from error

    @contextmanager
    def _clock(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - start


def _predictors(learner: Learner | Floor) -> list[str]:
    """What is recorded of a learner: what it predicts with first, then the other predictors.

    Of the paper's EMA only the two networks.
    """
    names = ["online"]
    if learner.averaging is not None:
        options = learner.averaging.options
        others = ("average",) if options.start == "copy" else PREDICTORS
        names = [options.predict, "online", *others]
    if learner.companion is not None:
        names = ["joint", *names, "companion"]
    return list(dict.fromkeys(names))


def _moment(batch: Batch) -> Record:
    return {"position": batch.position, "task": batch.task}


def evaluation_due(stream: Stream, position: int, every: int) -> bool:
    """Every so many batches, and always around a task switch, where the dips are.

    That is: after the last batch of a task, after the first three of the next, and at the end.
    """
    nearby = range(max(position - 3, 0), min(position + 2, len(stream)))
    around_switch = len({stream.task_at(p) for p in nearby}) > 1
    return (position + 1) % every == 0 or around_switch or position == len(stream) - 1
