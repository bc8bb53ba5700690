"""The learner: the paper's Algorithm 1."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from proxreplay.batch import Batch
from proxreplay.models.heads import replace_in_optimizer_
from proxreplay.options import AveragingOptions, LearnerOptions, RefreshOptions, at_least
from proxreplay.proximal.rules.base import GradientRule
from proxreplay.replay.averaging import EMA
from proxreplay.replay.intake import InputKind, stream_batches
from proxreplay.replay.losses import Loss, er, needs_of
from proxreplay.replay.memory import ClassBalancedMemory, Memory
from proxreplay.replay.parts import Learned, Observer, OptimizerFactory, check_parts, make_optimizer
from proxreplay.replay.placement import compile_
from proxreplay.replay.predicting import Predictor, Transform
from proxreplay.replay.saving import load_state_, rebuilt, state_of
from proxreplay.replay.views import Provider, Views
from proxreplay.seeding import seeded
from proxreplay.serialization import load_state, save_state


class Learner(Predictor):
    """Learns from a stream, one batch at a time, and can predict at every moment.

    Inputs are arrays or tensors ``[n, ...]``; floating ones are cast to the dtype of the model.
    Labels are integers of at least 0, which are the index of their output, or names (strings,
    anything hashable), which get indices in the order of arrival.

    Everything random draws from generators of its own, derived from ``seed``: learners that differ
    in loss or rule see the same replay and the same augmentation, and torch's global generator is
    left alone.

    Args:
        model: any module from inputs to logits; a `GrowingHead` inside it grows with the labels.
        memory: what is remembered for replay; None for a `ClassBalancedMemory`.
        rule: preconditions the gradients, or None for the plain optimizer.
        loss: the replay loss.
        averaging: an average of the weights that predicts in place of the model: its options, or
            an `EMA` made for ``model``.
        lr: learning rate of SGD.
        optimizer: from parameters to an optimizer, instead of plain SGD with ``lr``.
        steps_per_batch: SGD steps per stream batch.
        replay_batch: examples replayed per step.
        refresh_every: stream batches between refreshes of the rule; None for no refresh but those
            you ask for with `refresh`.
        refresh_samples: examples of the memory per refresh, drawn anew; None for all, which is
            what GPM and SGP should have.
        refresh_augment: whether a refresh sees augmented inputs, as training does.
        transform: from stored inputs to what the model sees; a generator switches augmentation on.
        device: where the model goes; None for where it is.
        channels_last: keep 4-d inputs and convolutions in NHWC order, which is faster; left off
            for the few networks with which torch cannot do that safely.
        compile: let ``torch.compile`` take over all parts of the model that have no growing head,
            for the steps only; the first ones then take minutes.
        observers: see `Observer`.
        seed: of everything random inside: replay, augmentation, refresh, new rows of the head.

    >>> from proxreplay import LPR
    >>> from proxreplay.models import mlp
    >>> model = mlp(in_features=2)
    >>> learner = Learner(model, rule=LPR(model, omega_0=1.0))
    >>> learned = learner.learn(torch.randn(10, 2), torch.randint(0, 3, (10,)))
    >>> learner.predict(torch.randn(4, 2)).shape
    torch.Size([4])
    """

    def __init__(
        self,
        model: nn.Module,
        memory: Memory | None = None,
        rule: GradientRule | None = None,
        *,
        loss: Loss = er,
        averaging: EMA | AveragingOptions | None = None,
        lr: float | None = None,  # eta in the paper
        optimizer: OptimizerFactory | None = None,
        steps_per_batch: int = LearnerOptions.steps_per_batch,  # S in the paper
        replay_batch: int = LearnerOptions.replay_batch,
        refresh_every: int | None = RefreshOptions().interval,  # T in the paper
        refresh_samples: int | None = LearnerOptions.refresh_samples,  # n in the paper
        refresh_augment: bool = True,
        transform: Transform | None = None,
        device: torch.device | str | None = None,
        channels_last: bool = True,
        compile: bool = False,
        observers: Sequence[Observer] = (),
        seed: int = 0,
    ) -> None:
        at_least(
            1,
            steps_per_batch=steps_per_batch,
            replay_batch=replay_batch,
            refresh_every=refresh_every,
            refresh_samples=refresh_samples,
        )
        if isinstance(averaging, AveragingOptions):
            averaging = EMA(model, averaging.momentum)
        check_parts(model, rule, loss, averaging)
        super().__init__(model, averaging, transform, device, channels_last)
        self.memory = ClassBalancedMemory(LearnerOptions.capacity) if memory is None else memory
        self.rule = rule
        self.loss = loss
        self.lr = LearnerOptions.lr if lr is None and optimizer is None else lr
        self.steps_per_batch = steps_per_batch
        self.replay_batch = replay_batch
        self.refresh_every = refresh_every
        self.refresh_samples = refresh_samples
        self.refresh_augment = refresh_augment
        self.seed = seed
        self.batches_seen = 0  # learned or only remembered
        self.batches_learned = 0
        if compile:
            compile_(model, self.placement.device)
        self.optimizer = make_optimizer(model, lr, optimizer)
        self.views = Views(self.memory, self._see, self.placement.device, seed)
        if len(self.memory) > 0:
            self.intake.kind = InputKind.of(self.memory.inputs(1, torch.Generator()))
            self._meet(torch.tensor(list(self.memory.class_counts)))
        self.provider = Provider(model, needs_of(loss))
        self._watched_loss = loss
        for observer in observers:
            self._watched_loss = observer.watch(self, self._watched_loss)

    def learn(self, x: Any, y: Any = None) -> Learned:
        """Learn from one stream batch: S steps, memory update, refresh when due.

        Args:
            x: inputs ``[n, ...]``, or a `Batch` (without ``y``). One that is not to be trained on
                is only remembered.
            y: labels ``[n]``.
        """
        incoming = self._admit(x, y)
        if not incoming.train:
            self._remember(incoming)
            return Learned(math.nan)
        losses = []
        self.model.train()
        with self._own_randomness():
            for step in range(self.steps_per_batch):
                batch = self.views.of(incoming, "incoming")
                replay = self.provider.replay(self.views, self.replay_batch)
                if step == self.steps_per_batch - 1:
                    incoming = self.provider.with_logits(incoming, batch)
                loss = self._watched_loss(self.model, batch, replay)
                self.optimizer.zero_grad()
                loss.backward()
                if self.rule is not None:
                    self.rule.observe(batch, self._reference(self.rule, replay))
                    self.rule.step_()
                self.optimizer.step()
                if self.averaging is not None:
                    self.averaging.update_()
                losses.append(loss.detach())
        self._store(incoming)
        self.batches_learned += 1
        due = self.refresh_every is not None and self.batches_learned % self.refresh_every == 0
        refreshed = self.refresh() if due else None
        return Learned(float(torch.stack(losses).mean()), refreshed)

    def refresh(self, inputs: Any = None) -> int | None:
        """Rebuild the rule now; `learn` does so by itself when it is due.

        Args:
            inputs: what must not be forgotten, ``[n, ...]`` as `learn` takes them; None for
                ``refresh_samples`` examples of the memory.

        Returns:
            How many examples it was rebuilt from; None if there is no rule or nothing to remember.
        """
        if self.rule is None or (inputs is None and len(self.memory) == 0):
            return None
        if inputs is None:
            seen = self.views.to_refresh(self.refresh_samples, augment=self.refresh_augment)
            of = len(self.memory)
        else:
            seen = self.view(inputs)
            of = len(seen)
        self.rule.refresh(seen, of=of)
        return len(seen)

    def remember(self, x: Any, y: Any = None) -> None:
        """Put a batch into the memory without learning from it now."""
        self._remember(self._admit(x, y))

    def learn_stream(self, source: Any, y: Any = None, *, batch_size: int = 10) -> Self:
        """Learn from everything a source holds, in its order.

        Args:
            source: arrays (with ``y``), a torch ``Dataset`` of single examples, or an iterable of
                stream batches, `Batch` objects or ``(x, y)`` pairs: a ``DataLoader``, a generator,
                a `Stream`.
            y: labels, where ``source`` is the inputs.
            batch_size: examples per stream batch, where the source holds single examples.
        """
        at_least(1, batch_size=batch_size)
        for batch in stream_batches(source, y, batch_size):
            if isinstance(batch, Batch):
                self.learn(batch)
            else:
                self.learn(*batch)
        return self

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides what happens next, a part each; code is only described."""
        return state_of(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where a learner composed of the same parts was saved.

        If anything does not fit, this learner stays as it was.
        """
        load_state_(self, state)

    def save(self, path: Path | str) -> None:
        """Write the learner to a ``.safetensors`` file, or to ``state.safetensors`` in a folder."""
        save_state(Path(path), self.state_dict())

    @classmethod
    def load(
        cls,
        path: Path | str,
        model: nn.Module | None = None,
        memory: Memory | None = None,
        rule: GradientRule | None = None,
        *,
        loss: Loss | None = None,
        optimizer: OptimizerFactory | None = None,
        transform: Transform | None = None,
        device: torch.device | str | None = None,
        compile: bool = False,
    ) -> Self:
        """Read a learner that goes on exactly where it was saved.

        Code is not saved. What is proxreplay's own is built again: its networks, memories, losses
        and transforms, and LPR with layers chosen by name. What is yours has to be handed in as it
        was made before, and is checked against what was saved. ``device`` and ``compile`` are not
        saved either.
        """
        state = load_state(Path(path))
        parts = rebuilt(state, model, memory, rule, loss, optimizer, transform)
        learner = cls(**parts, device=device, compile=compile)
        learner.load_state_dict(state)
        return learner

    # What the lines of `learn` stand for ----------------------------------------------------------

    def _admit(self, x: Any, y: Any) -> Batch:
        """Check a batch; only if all of it is good, get ready for what is new in it."""
        batch = self.intake.admit(x, y, self._try_out)
        self._meet(batch.labels)
        return batch

    def _meet(self, indices: Tensor) -> None:
        """Grow the head for labels that are new."""
        for head in self.heads:
            before = list(head.parameters())
            if head.grow(int(indices.max()) + 1, self.views.generators["head"]):
                replace_in_optimizer_(self.optimizer, before, list(head.parameters()))
            head.activate(indices)
        if self.averaging is not None:
            self.averaging.follow_growth_()

    def _reference(self, rule: GradientRule, replay: Batch | None) -> Batch | None:
        """What the rule compares this step with: a draw of its own, or what was replayed."""
        samples = rule.reference_samples
        return replay if samples is None else self.views.draw(samples, "reference")

    def _remember(self, incoming: Batch) -> None:
        if self.provider.needs.stored_logits:
            self.model.train()
            with self._own_randomness():
                view = self.views.of(incoming, "incoming")
                incoming = self.provider.with_logits(incoming, view)
        self._store(incoming)

    def _store(self, incoming: Batch) -> None:
        self.memory.add(incoming, self.views.generators["memory"])
        self.provider.after_batch(self.batches_seen)
        self.batches_seen += 1

    def _own_randomness(self) -> AbstractContextManager[None]:
        """Seeds what dropout and the like draw from, by the stream batch: no state to keep."""
        return seeded(self.seed, f"model/{self.batches_seen}", self.placement.device)
