"""The learner: the paper's Algorithm 1."""

import copy
from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from proxreplay.batch import Batch, length
from proxreplay.distributed import Processes
from proxreplay.errors import InputError
from proxreplay.options import (
    AveragingOptions,
    CompanionOptions,
    LearnerOptions,
    RefreshOptions,
    at_least,
    count,
)
from proxreplay.proximal.layers.calling import Caller
from proxreplay.proximal.rules.base import GradientRule, leaving_nothing, seen_by
from proxreplay.replay.admitting import Admitting
from proxreplay.replay.averaging import DEFAULT_AVERAGING, EMA
from proxreplay.replay.batching import stream_batches
from proxreplay.replay.companion import Companion
from proxreplay.replay.guard import Guard
from proxreplay.replay.losses import Loss, er, needs_of
from proxreplay.replay.memory import ClassBalancedMemory, Memory
from proxreplay.replay.parts import (
    Learned,
    Observer,
    OptimizerFactory,
    check_parts,
    make_optimizer,
    summary,
)
from proxreplay.replay.placement import compile_
from proxreplay.replay.predicting import Transform, changing
from proxreplay.replay.saving import Saving
from proxreplay.replay.together import Together
from proxreplay.replay.views import Provider, Views


class Learner(Saving, Admitting):
    """Learns from a stream, one batch at a time, and can predict at every moment.

    Inputs are arrays or tensors ``[n, ...]``, or a dict or tuple of these, which are the keyword
    arguments or the arguments of the model; floating ones are cast to the dtype of the model.
    Labels are integers of at least 0, which are the index of their output, or names (strings,
    anything hashable), which get indices in the order of arrival.

    Everything random draws from its own generators, derived from ``seed``: learners that differ in
    loss or rule see the same replay and augmentation. torch's global generator is left alone.

    Args:
        model: any module from inputs to logits, or to an object with ``logits``; a `GrowingHead`
            inside it grows with the labels.
        memory: what is remembered for replay; None for a `ClassBalancedMemory`.
        rule: preconditions the gradients, or None for the plain optimizer.
        loss: the replay loss.
        averaging: an average of the weights that predicts beside the model (docs/averaging.md):
            its options, an `EMA` made for ``model``, or None for the model alone.
        companion: streaming LDA that predicts beside the networks (docs/companion.md): its options,
            or None.
        lr: learning rate of SGD.
        optimizer: from parameters to an optimizer, instead of plain SGD with ``lr``.
        steps_per_batch: SGD steps per stream batch.
        replay_batch: examples replayed per step.
        refresh_every: stream batches between refreshes of the rule; None for no refresh but those
            you ask for with `refresh`. With the default, `LPR(work=...)` may leave some out; any
            other number is kept to.
        refresh_samples: examples of the memory per refresh, drawn anew; None for all, which is
            what GPM and SGP should have.
        refresh_augment: whether a refresh sees augmented inputs, as training does.
        transform: from stored inputs to what the model sees; a generator switches augmentation on.
        call: from the model and inputs to logits, where that is not ``model(inputs)``,
            ``model(*inputs)`` or ``model(**inputs)``.
        device: where the model goes; None for where it is.
        channels_last: keep 4-d tensors in NHWC order, which is faster, where torch does it safely.
        compile: let ``torch.compile`` take over what has no growing head; the first steps then
            take minutes.
        observers: see `Observer`.
        processes: those that learn this model together (docs/scale.md); None for those of torch's
            default process group, if one is up, each with its own share of every batch.
        seed: of everything random inside: replay, augmentation, refresh, new rows of the head.

    >>> from proxreplay import LPR
    >>> from proxreplay.models import mlp
    >>> model = mlp(in_features=2)
    >>> learner = Learner(model, rule=LPR(model, omega_0=1.0))
    >>> learned = learner.learn(torch.randn(10, 2), torch.randint(0, 3, (10,)))
    >>> learner.predict(torch.randn(4, 2)).shape
    (4,)
    """

    def __init__(
        self,
        model: nn.Module,
        memory: Memory | None = None,
        rule: GradientRule | None = None,
        *,
        loss: Loss = er,
        averaging: EMA | AveragingOptions | None = DEFAULT_AVERAGING,
        companion: CompanionOptions | None = None,
        lr: float | None = None,  # eta in the paper
        optimizer: OptimizerFactory | None = None,
        steps_per_batch: int = LearnerOptions.steps_per_batch,  # S in the paper
        replay_batch: int = LearnerOptions.replay_batch,
        refresh_every: int | None = RefreshOptions().interval,  # T in the paper
        refresh_samples: int | None = LearnerOptions.refresh_samples,  # n in the paper
        refresh_augment: bool = True,
        transform: Transform | None = None,
        call: Caller | None = None,
        device: torch.device | str | None = None,
        channels_last: bool = True,
        compile: bool = False,
        observers: Sequence[Observer] = (),
        processes: Processes | None = None,
        seed: int = 0,
    ) -> None:
        count(
            steps_per_batch=steps_per_batch,
            replay_batch=replay_batch,
            refresh_every=refresh_every,
            refresh_samples=refresh_samples,
        )
        at_least(0, lr=lr)
        check_parts(model, memory, rule, loss, averaging, transform, call, companion)
        if isinstance(averaging, AveragingOptions):
            averaging = EMA.of(model, averaging)
        partner = Companion(companion, seed) if companion and companion.weight > 0 else None
        super().__init__(model, averaging, transform, device, channels_last, call, partner)
        self.memory = ClassBalancedMemory(LearnerOptions.capacity) if memory is None else memory
        self.rule = rule if rule is None else rule.called_by(call)
        self.together = Together(processes, rule, self.memory)
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
        self._meet_memory()
        self.provider = Provider(model, needs_of(loss), averaging, call)
        self._fresh_rule = None if rule is None else copy.deepcopy(rule.state_dict())
        # whether one step with a sum of gradients is as several with each
        self._adds_up = type(self.optimizer) is torch.optim.SGD
        self._watched_loss = loss
        for observer in observers:
            self._watched_loss = observer.watch(self, self._watched_loss)

    @changing
    def learn(self, x: Any, y: Any = None, *, sample_weight: Any = None) -> Learned:
        """Learn from one stream batch: S steps, memory update, refresh when due.

        Args:
            x: inputs ``[n, ...]`` or one example; or a `Batch`, which may only be to remember.
            y: labels ``[n]``, or that of the one example; None with a `Batch`.
            sample_weight: how much each example counts in the loss, now and when it is replayed,
                ``[n]``; an example of weight 0 is left out. None for all the same.

        Raises:
            DivergenceError: a step's loss or gradient is not finite; that step was not made.
        """
        admitted = self._admit(*self.together.joint(self, x, y, sample_weight))
        incoming = admitted.batch
        if not incoming.train or len(incoming) == 0:
            return self._remember(admitted)
        losses, guard = [], Guard(self.model, self.views.generators)
        self.model.train()
        with self.together.randomness(self), leaving_nothing(self.rule):
            for step in range(self.steps_per_batch):
                with guard.step(), self.together.sharing(self.provider.models, len(incoming)):
                    batch = self.views.of(incoming, "incoming")
                    drawn = self.provider.replay(self.views, self.replay_batch)
                    batch, replay = self.provider.taught(batch, drawn)
                    if step == self.steps_per_batch - 1:
                        incoming = self.provider.with_logits(incoming, batch)
                    with seen_by(self.rule, batch, replay):
                        loss = self._watched_loss(self.network, batch, replay)
                        self.optimizer.zero_grad()
                        loss.backward()
                        self.together.average_(self.model)
                        guard.check_finite(loss)
                if self.rule is not None:
                    own = self.rule.reference_samples  # None: compared with what was replayed
                    reference = replay if own is None else self.views.draw(own, "reference")
                    self.rule.observe(batch, reference)
                    last = step == self.steps_per_batch - 1 or not self._adds_up
                    self.rule.step_() if last else self.rule.wait_()
                self.optimizer.step()
                if self.averaging is not None:
                    self.averaging.update_()
                losses.append(loss.detach())
        ids = self._store(incoming)
        self.batches_learned += 1
        due = self.refresh_every is not None and self.batches_learned % self.refresh_every == 0
        if due and self.rule is not None and self.stretches:
            due = self.rule.due(len(incoming) + self.replay_batch)
        refreshed = self.refresh() if due else None
        self.together.check(self)
        given = self.together.own(admitted.ids(ids))
        return Learned(float(torch.stack(losses).mean()), given, refreshed)

    @property
    def stretches(self) -> bool:
        """Whether the rule may leave out refreshes: not where another interval was asked for."""
        default = self.refresh_every == RefreshOptions().interval
        return default and self.rule is not None and self.rule.leaves_out

    @changing
    def refresh(self, inputs: Any = None) -> int | None:
        """Rebuild the rule now; `learn` does so by itself when it is due.

        ``inputs``, as `learn` takes them, must not be forgotten; None for ``refresh_samples``
        examples of the memory. Returns how many it was rebuilt from; None if it was not.
        """
        empty = inputs is None and len(self.memory) == 0
        if empty or self.rule is None or not self.rule.needs_refresh:
            return None
        if inputs is None:
            seen = self.views.to_refresh(self.refresh_samples, augment=self.refresh_augment)
        else:
            seen = self.view(inputs)
        n = length(seen)
        self.rule.refresh(seen, of=len(self.memory) if inputs is None else n)
        return n

    @changing
    def remember(self, x: Any, y: Any = None, *, sample_weight: Any = None) -> Learned:
        """Put a batch into the memory without learning from it now."""
        return self._remember(self._admit(*self.together.joint(self, x, y, sample_weight)))

    @changing
    def forget(self, *, label: Any = None, ids: Iterable[int] | Tensor | None = None) -> int:
        """Delete remembered examples and rebuild the rule; returns how many of them were stored.

        Their bytes are overwritten. What the weights have learned stays in them (docs/replay.md).

        Args:
            label: all examples of that class; it is not predicted until it is learned again.
            ids: instead of ``label``, single examples (`Learned.ids`).
        """
        if (label is None) == (ids is None):
            raise InputError("Learner.forget: give either label=... or ids=...")
        if ids is not None:
            removed = self.memory.remove(ids)
            if self.companion is not None:
                self.companion.statistic.fold_()
        else:
            index = self.intake.index_of(label)
            self.intake.labels = self.intake.labels.without(index)
            removed = self.memory.remove_class(index)
            for head in self.heads:
                head.active[index] = False
            if self.averaging is not None:
                self.averaging.follow_growth_()
            if self.companion is not None:
                self.companion.forget_(index)
        if self.rule is not None and self._fresh_rule is not None:
            self.rule.load_state_dict(copy.deepcopy(self._fresh_rule))
            for batch in self.memory.batches(self.replay_batch):
                self.rule.observe(Batch(self._see(batch.inputs), batch.labels))
            self.refresh()
        return removed

    def learn_stream(
        self,
        source: Any,
        y: Any = None,
        *,
        batch_size: int = LearnerOptions.batch_size,
        sample_weight: Any = None,
    ) -> Self:
        """Learn from everything a source holds, in its order.

        Args:
            source: arrays (with ``y``), a torch ``Dataset`` of single examples, or an iterable (a
                ``DataLoader``, a generator, a `Stream`) of `Batch` objects, ``(x, y)``,
                ``(x, y, weight)`` or dicts with ``labels``, each a batch or a single example.
            y: labels, where ``source`` is the inputs.
            batch_size: examples per stream batch, where the source holds single examples.
            sample_weight: see `learn`; with ``y``.
        """
        count(batch_size=batch_size)
        for inputs, labels, weights in stream_batches(source, y, batch_size, sample_weight):
            self.learn(inputs, labels, sample_weight=weights)
        self.together.ended()
        return self

    def __repr__(self) -> str:
        return summary(self)
