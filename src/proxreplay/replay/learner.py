"""The learner: the paper's Algorithm 1."""

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from proxreplay.batch import Batch
from proxreplay.errors import InputError
from proxreplay.models.heads import GrowingHead, replace_in_optimizer_
from proxreplay.models.recipes import build_again, recipe_of
from proxreplay.proximal.layers.capture import as_written, untouched
from proxreplay.proximal.rules.base import GradientRule
from proxreplay.replay.averaging import EMA, frozen_copy
from proxreplay.replay.compiling import compile_
from proxreplay.replay.description import (
    check_same,
    describe,
    describe_rule,
    rebuild,
    rebuild_memory,
    rebuild_rule,
)
from proxreplay.replay.edge import InputKind, Labels, as_inputs
from proxreplay.replay.layout import channels_last_is_safe
from proxreplay.replay.losses import Loss, er, needs_of
from proxreplay.replay.memory import ClassBalancedMemory, Memory
from proxreplay.seeding import derive_seed, generator
from proxreplay.serialization import load_state, save_state

Transform = Callable[[Tensor, torch.Generator | None], Tensor]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], Optimizer]

REFRESH_SAMPLES = 100  # cheap, and for LPR as good as the whole memory (docs/speed.md)
ELEMENTS_A_PASS = 100 * 3 * 32 * 32  # of inputs that are predicted at once on a CPU


class Learner:
    """Learns from a stream, a batch at a time, and is ready to predict at every moment.

    Inputs are arrays or tensors ``[n, ...]``; floating ones are cast to the dtype of the model.
    Labels are integers of at least 0, which are the index of their output, or names (strings,
    anything hashable), which get indices in the order of arrival.

    Everything random draws from generators of its own, derived from ``seed``: learners that differ
    in loss or rule see the same replay and the same augmentation, and torch's global generator is
    left alone.

    Args:
        model: any module from inputs to logits; a `GrowingHead` inside it grows with the labels.
        memory: what is remembered for replay.
        rule: preconditions the gradients, or None for the plain optimizer.
        loss: the replay loss.
        averaging: an average of the weights that predicts in place of the model.
        lr: learning rate of SGD.
        optimizer: from parameters to an optimizer, instead of plain SGD with ``lr``.
        steps_per_batch: SGD steps a stream batch.
        replay_batch: examples replayed a step.
        refresh_every: stream batches between refreshes of the rule.
        refresh_samples: examples of the memory a refresh uses, drawn anew; None for all, which is
            what GPM and SGP should have.
        refresh_augment: whether a refresh sees augmented inputs, as training does.
        transform: from stored inputs to what the model sees; a generator switches augmentation on.
        device: where the model goes; None for where it is.
        channels_last: keep 4-d inputs and convolutions in NHWC order, which is faster; left off by
            itself for the few networks with which torch cannot do that safely.
        compile: let ``torch.compile`` take over all parts of the model that have no growing head,
            for the steps alone; the first ones then take minutes.
        seed: of everything random inside: replay, augmentation, refresh, new rows of the head.

    >>> from proxreplay import LPR
    >>> from proxreplay.models import mlp
    >>> model = mlp(in_features=2)
    >>> learner = Learner(model, rule=LPR(model, omega_0=1.0))
    >>> loss = learner.learn(torch.randn(10, 2), torch.randint(0, 3, (10,)))
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
        averaging: EMA | None = None,
        lr: float = 0.1,  # eta in the paper
        optimizer: OptimizerFactory | None = None,
        steps_per_batch: int = 3,  # S in the paper
        replay_batch: int = 10,
        refresh_every: int = 10,  # T in the paper
        refresh_samples: int | None = REFRESH_SAMPLES,  # n in the paper
        refresh_augment: bool = True,
        transform: Transform | None = None,
        device: torch.device | str | None = None,
        channels_last: bool = True,
        compile: bool = False,
        seed: int = 0,
    ) -> None:
        _check_counts(
            steps_per_batch=steps_per_batch,
            replay_batch=replay_batch,
            refresh_every=refresh_every,
            refresh_samples=refresh_samples,
        )
        _check_of_this_model(model, "averaging", None if averaging is None else averaging.online)
        _check_of_this_model(model, "rule", getattr(rule, "model", None))
        self.model = model
        self.memory = ClassBalancedMemory(2000) if memory is None else memory
        self.rule = rule
        self.loss = loss
        self.averaging = averaging
        self.lr = lr
        self.steps_per_batch = steps_per_batch
        self.replay_batch = replay_batch
        self.refresh_every = refresh_every
        self.refresh_samples = refresh_samples
        self.refresh_augment = refresh_augment
        self.transform = transform
        self.channels_last = channels_last
        self.seed = seed
        self.batches_seen = 0  # learned or only remembered
        self.batches_learned = 0
        self._place(device)
        if compile:
            compile_(model, self._device)
        self.optimizer = (
            torch.optim.SGD(model.parameters(), lr=lr)
            if optimizer is None
            else optimizer(model.parameters())
        )
        self._needs = needs_of(loss)
        if self._needs.draws == 0 and rule is not None and rule.reference_samples is None:
            raise InputError(
                f"Learner: {type(rule).__name__} looks at the replayed examples, but the loss "
                "replays none; give a loss that does, such as er."
            )
        self._heads = [m for m in model.modules() if isinstance(m, GrowingHead)]
        self._labels = Labels()
        self._kind: InputKind | None = None
        self._outputs: int | None = None  # of a fixed head
        self._rng = {purpose: generator(seed, purpose) for purpose in PURPOSES}
        self._meet_memory()
        self.teacher: nn.Module | None = None
        if self._needs.teacher_every is not None:
            self._take_snapshot()

    # Learning ------------------------------------------------------------------------------------

    def learn(self, x: Any, y: Any = None) -> float:
        """Learn from one stream batch: S steps, memory update, refresh when due.

        Args:
            x: inputs ``[n, ...]``, or a `Batch` (without ``y``). One that is not to be trained on
                is only remembered.
            y: labels ``[n]``.

        Returns:
            The mean loss over the steps; NaN if there were none.
        """
        incoming = self._admit(x, y)
        if not incoming.train:
            self._remember(incoming)
            return math.nan
        losses = []
        self.model.train()
        with self._own_randomness():
            for step in range(self.steps_per_batch):
                batch, replay = self._view(incoming, "incoming"), self._replay()
                if step == self.steps_per_batch - 1:
                    incoming = self._with_logits(incoming, batch)
                loss = self.loss(self.model, batch, replay)
                self.optimizer.zero_grad()
                loss.backward()
                if self.rule is not None:
                    self.rule.observe(batch, self._reference(replay))
                    self.rule.step_()
                self.optimizer.step()
                if self.averaging is not None:
                    self.averaging.update_()
                losses.append(loss.detach())
        self._store(incoming)
        self.batches_learned += 1
        if self.refresh_due:
            self.refresh()
        return float(torch.stack(losses).mean())

    def refresh(self) -> None:
        """Rebuild the rule from the memory now; `learn` does so when it is due."""
        if self.rule is None or len(self.memory) == 0:
            return
        self.rule.refresh(self._memorised_inputs(), of=len(self.memory))

    def view(self, x: Any) -> Tensor:
        """Inputs as the model sees them when it predicts: transformed, not augmented."""
        return self._see(self._check_inputs(x))

    @property
    def refresh_due(self) -> bool:
        """Whether the batch learned last is one after which the rule, if any, is refreshed."""
        return self.rule is not None and self.batches_learned % self.refresh_every == 0

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
            batch_size: examples a stream batch, where the source holds single examples.
        """
        _check_counts(batch_size=batch_size)
        for batch in _batches(source, y, batch_size):
            if isinstance(batch, Batch):
                self.learn(batch)
            else:
                self.learn(*batch)
        return self

    # Predicting ----------------------------------------------------------------------------------

    @property
    def labels(self) -> list[Any]:
        """The label that each column of `predict_proba` stands for."""
        if self._labels.kind == "names":
            return list(self._labels.names)
        return list(range(self._heads[0].out_features if self._heads else self._outputs or 0))

    @torch.no_grad()
    def logits(self, x: Any, *, online: bool = False, batch_size: int | None = None) -> Tensor:
        """Logits in evaluation mode, ``[n, outputs]``.

        Args:
            x: inputs ``[n, ...]``.
            online: with the model that is trained, even where there is an average of it.
            batch_size: inputs a forward pass; None for 500, or as many as a CPU's cache takes well.
        """
        inputs = self._check_inputs(x)
        batch_size = self._inputs_a_pass(inputs) if batch_size is None else batch_size
        _check_counts(batch_size=batch_size)
        model = self.model if online or self.averaging is None else self.averaging.model
        with evaluating(model), as_written():
            return torch.cat([model(self._see(part)) for part in inputs.split(batch_size)])

    def predict_proba(self, x: Any, *, online: bool = False) -> Tensor:
        """The probability of every label in `labels`, ``[n, labels]``."""
        return self._known(self.logits(x, online=online)).softmax(dim=1)

    def predict(self, x: Any, *, online: bool = False) -> Tensor | NDArray[Any]:
        """The most probable label of every input: int64 ``[n]``, or an array of names."""
        return self._labels.decode(self._known(self.logits(x, online=online)).argmax(dim=1))

    @torch.inference_mode()
    def evaluate(
        self, x: Any, y: Any, *, batch_size: int | None = None, online: bool = False
    ) -> float:
        """The share of inputs whose label is predicted; labels never met count as errors."""
        indices = self._labels.find(y)
        logits = self._known(self.logits(x, online=online, batch_size=batch_size))
        if len(indices) != len(logits):
            raise InputError(
                f"Learner: {len(logits)} inputs but {len(indices)} labels; give one each."
            )
        return float((logits.argmax(dim=1).cpu() == indices).double().mean())

    def _inputs_a_pass(self, inputs: Tensor) -> int:
        """Measured with a slim ResNet18 on 32x32: 100 are a quarter faster than 500 on a CPU."""
        if self._device.type != "cpu":
            return 500
        return min(500, max(20, ELEMENTS_A_PASS // max(1, inputs[:1].numel())))

    def _known(self, logits: Tensor) -> Tensor:
        """Without the outputs of a fixed head that have no name yet."""
        if self._labels.kind != "names":
            return logits
        return logits[:, : len(self._labels.names)]

    # Saving --------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides what happens next, a part each; code is only described."""
        parts = {
            "learner": self._own_state(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "memory": self.memory.state_dict(),
            "rule": None if self.rule is None else self.rule.state_dict(),
            "averaging": None if self.averaging is None else self.averaging.state_dict(),
            "teacher": None if self.teacher is None else self.teacher.state_dict(),
        }
        return {name: part for name, part in parts.items() if part is not None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where a learner composed of the same parts was saved.

        If anything does not fit, this learner stays as it was.
        """
        own = state["learner"]
        check_same({**own["options"], **own["parts"]}, {**self._options(), **self._parts()})
        mine = self.state_dict()
        del mine["memory"]  # which may be large, takes all or nothing, and comes last
        mine = copy.deepcopy(mine)
        try:
            self._load_all_but_memory(state)
            self.memory.load_state_dict(state["memory"])
        except BaseException:
            self._load_all_but_memory(mine)
            raise

    def _load_all_but_memory(self, state: dict[str, Any]) -> None:
        before = [list(head.parameters()) for head in self._heads]
        try:
            self.model.load_state_dict(state["model"])
        except RuntimeError as error:
            raise InputError(
                f"Learner: the saved weights do not fit the model; build it as it was. {error}"
            ) from error
        finally:  # a head has changed its size even if something else did not fit
            for old, head in zip(before, self._heads, strict=True):
                replace_in_optimizer_(self.optimizer, old, list(head.parameters()))
        # a copy: the optimizer would go on with the very tensors it is given
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        if self.rule is not None:
            self.rule.load_state_dict(state["rule"])
        if self.averaging is not None:
            self.averaging.load_state_dict(state["averaging"])
        if self._needs.teacher_every is not None:
            self._take_snapshot().load_state_dict(state["teacher"])
        self._load_own_state(state["learner"])

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
        was made before, and is checked against what was saved.

        Args:
            path: the file or folder written by `save`.
            model: only for a network of your own: freshly built; its weights are replaced.
            memory: only for a memory of your own.
            rule: only for a rule other than LPR: made for ``model``, with the options it had.
            loss: only for a loss of your own.
            optimizer: from parameters to an optimizer, if it was not plain SGD.
            transform: only for a transform of your own.
            device: where the model goes; None for where it is.
            compile: as when it was made; this is not saved.
        """
        state = load_state(Path(path))
        own = state["learner"]
        if model is None:
            if own["recipe"] is None:
                raise InputError(
                    f"Learner.load: {path} was saved with a network of your own; build it again "
                    "and hand it in as model=..."
                )
            model = build_again(own["recipe"])
        learner = cls(
            model,
            rebuild_memory(state["memory"]) if memory is None else memory,
            rebuild_rule(own["parts"]["rule"], model, rule),
            loss=rebuild("loss", own["parts"]["loss"], loss),
            averaging=EMA(model, state["averaging"]["momentum"]) if "averaging" in state else None,
            optimizer=optimizer,
            transform=rebuild("transform", own["parts"]["transform"], transform),
            device=device,
            compile=compile,
            **own["options"],
        )
        learner.load_state_dict(state)
        return learner

    def _options(self) -> dict[str, Any]:
        return {
            "lr": self.lr,
            "steps_per_batch": self.steps_per_batch,
            "replay_batch": self.replay_batch,
            "refresh_every": self.refresh_every,
            "refresh_samples": self.refresh_samples,
            "refresh_augment": self.refresh_augment,
            "channels_last": self.channels_last,
            "seed": self.seed,
        }

    def _parts(self) -> dict[str, Any]:
        return {
            "loss": describe(self.loss),
            "transform": describe(self.transform),
            "optimizer": type(self.optimizer).__name__,
            "rule": describe_rule(self.rule),
            "averaging": self.averaging is not None,
        }

    def _own_state(self) -> dict[str, Any]:
        return {
            "options": self._options(),
            "parts": self._parts(),
            "recipe": recipe_of(self.model),
            "batches_seen": self.batches_seen,
            "batches_learned": self.batches_learned,
            "labels": {"kind": self._labels.kind, "names": self._labels.names},
            "inputs": None if self._kind is None else self._kind.to_dict(),
            "outputs": self._outputs,
            "generators": {purpose: rng.get_state() for purpose, rng in self._rng.items()},
        }

    def _load_own_state(self, own: dict[str, Any]) -> None:
        self.batches_seen = own["batches_seen"]
        self.batches_learned = own["batches_learned"]
        self._labels = Labels(**own["labels"])
        self._kind = None if own["inputs"] is None else InputKind.from_dict(own["inputs"])
        self._outputs = own["outputs"]
        for purpose, state in own["generators"].items():
            self._rng[purpose].set_state(state)

    # What the lines of `learn` stand for ----------------------------------------------------------

    def _replay(self) -> Batch | None:
        """As many independent draws from the memory as the loss asks for, one after the other."""
        draws = [self._draw(self.replay_batch, "replay") for _ in range(self._needs.draws)]
        replay = _joined([draw for draw in draws if draw is not None])
        if replay is None or self.teacher is None:
            return replay
        with torch.no_grad():
            return replay.with_extras(teacher=self.teacher(replay.inputs))

    def _reference(self, replay: Batch | None) -> Batch | None:
        """What the rule compares this step with: a draw of its own, or what was replayed."""
        samples = 0 if self.rule is None else self.rule.reference_samples
        return replay if samples is None else self._draw(samples, "reference")

    def _draw(self, n: int, purpose: str) -> Batch | None:
        if len(self.memory) == 0 or n == 0:
            return None
        return self._view(self.memory.sample(n, self._rng[purpose]), purpose)

    def _view(self, batch: Batch, purpose: str) -> Batch:
        """A batch as the model sees it, newly augmented, on the model's device."""
        return Batch(
            self._see(batch.inputs, self._rng[f"{purpose}-view"]),
            batch.labels.to(self._device),
            {name: tensor.to(self._device) for name, tensor in batch.extras.items()},
        )

    def _see(self, inputs: Tensor, rng: torch.Generator | None = None) -> Tensor:
        inputs = inputs.to(self._device)
        if self.transform is not None:
            inputs = self.transform(inputs, rng)
        if self._channels_last and inputs.ndim == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return inputs

    def _memorised_inputs(self) -> Tensor:
        inputs = self.memory.inputs(self.refresh_samples, self._rng["refresh"])
        return self._see(inputs, self._rng["refresh-view"] if self.refresh_augment else None)

    @torch.no_grad()
    def _with_logits(self, incoming: Batch, view: Batch) -> Batch:
        """What the model says about a batch before it learns from it, stored for losses that ask.

        In train mode, as in the step that follows, but without a trace in its buffers.
        """
        if not self._needs.stored_logits:
            return incoming
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        with as_written():
            logits = functional_call(self.model, buffers, (view.inputs,))
        return incoming.with_extras(logits=logits)

    def _remember(self, incoming: Batch) -> None:
        self.model.train()
        with self._own_randomness():
            if self._needs.stored_logits:
                incoming = self._with_logits(incoming, self._view(incoming, "incoming"))
        self._store(incoming)

    def _store(self, incoming: Batch) -> None:
        self.memory.add(incoming, self._rng["memory"])
        every = self._needs.teacher_every
        if every is not None and self.batches_seen % every == 0:
            self._take_snapshot()
        self.batches_seen += 1

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """Seed the generators that dropout and the like draw from; on leaving, they are as before.

        The seed depends on the stream batch alone, so there is no state to keep. Not by way of
        ``torch.manual_seed``, which formats a stack trace for every kind of device that is absent.
        """
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            seed = derive_seed(self.seed, f"model/{self.batches_seen}")
            torch.default_generator.manual_seed(seed)
            if devices:
                torch.cuda.manual_seed(seed)
            yield

    def _take_snapshot(self) -> nn.Module:
        self.teacher = frozen_copy(self.model).train()
        return self.teacher

    # What comes in --------------------------------------------------------------------------------

    def _admit(self, x: Any, y: Any) -> Batch:
        """Check a batch; only if all of it is good, get ready for what is new in it."""
        given = x if isinstance(x, Batch) else None
        if (given is None) == (y is None):
            raise InputError("Learner: give inputs and labels, or one Batch.")
        if given is not None:
            x, y = given.inputs, given.labels
        inputs = self._check_inputs(x)
        indices, labels = self._labels.meet(y)
        batch = Batch(
            inputs,
            indices,
            position=None if given is None else given.position,
            train=given is None or given.train,
        )
        outputs = self._check_outputs(inputs, indices)
        self._labels, self._kind, self._outputs = labels, InputKind.of(inputs), outputs
        self._meet(indices)
        return batch

    def _check_inputs(self, x: Any) -> Tensor:
        inputs = as_inputs(x, self._dtype)
        kind = InputKind.of(inputs)
        if self._kind is not None and kind != self._kind:
            raise InputError(
                f"Learner: inputs of {kind} each, but earlier ones were {self._kind}; keep to one "
                "shape and dtype."
            )
        return inputs

    def _check_outputs(self, inputs: Tensor, indices: Tensor) -> int | None:
        """See that the model takes the inputs and, with a fixed head, has room for the labels."""
        outputs = self._outputs
        if self._kind is None or (outputs is None and not self._heads):
            outputs = self._try_out(inputs[:1])
        if self._heads:
            return None
        assert outputs is not None
        if int(indices.max()) >= outputs:
            raise InputError(
                f"Learner: {int(indices.max()) + 1} classes, but the model has {outputs} outputs; "
                "build it with more, or with a growing head (num_classes=None)."
            )
        return outputs

    def _try_out(self, inputs: Tensor) -> int:
        """The number of outputs the model has for inputs it has never seen."""
        try:
            with untouched(self.model):
                logits = self.model(self._see(inputs))
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise InputError(
                f"Learner: the model cannot take inputs of {InputKind.of(inputs)} each ({error}); "
                "give what it was built for, or a transform from one to the other."
            ) from error
        if not isinstance(logits, Tensor) or logits.ndim != 2:
            shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise InputError(
                f"Learner: for one input the model gives {shape}; let it give logits [1, classes]."
            )
        return logits.shape[1]

    def _meet(self, indices: Tensor) -> None:
        """Grow the head for labels that are new."""
        for head in self._heads:
            before = list(head.parameters())
            if head.grow(int(indices.max()) + 1, self._rng["head"]):
                replace_in_optimizer_(self.optimizer, before, list(head.parameters()))
            head.activate(indices)
        if self.averaging is not None:
            self.averaging.follow_growth_()

    def _meet_memory(self) -> None:
        """Get ready for what a memory already holds."""
        if len(self.memory) == 0:
            return
        self._kind = InputKind.of(self.memory.inputs(1, torch.Generator()))
        self._meet(torch.tensor(list(self.memory.class_counts)))

    def _place(self, device: torch.device | str | None) -> None:
        first = next(self.model.parameters(), None)
        if first is None:
            raise InputError("Learner: the model has no parameters; there is nothing to learn.")
        self._device = first.device if device is None else torch.device(device)
        self._channels_last = self.channels_last and channels_last_is_safe(self.model, self._device)
        models = [self.model] if self.averaging is None else [self.model, self.averaging.model]
        for model in models:
            model.to(self._device)
            if self._channels_last:
                # the stubs of torch do not know this overload
                model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._dtype = next(
            (p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32
        )


PURPOSES = (
    *("memory", "head", "incoming-view", "replay", "replay-view"),
    *("reference", "reference-view", "refresh", "refresh-view"),
)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; every module is in its own mode again on leaving."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


def _joined(batches: list[Batch]) -> Batch | None:
    """One batch after the other as one."""
    if len(batches) < 2:
        return batches[0] if batches else None
    return Batch(
        torch.cat([batch.inputs for batch in batches]),
        torch.cat([batch.labels for batch in batches]),
        {name: torch.cat([b.extras[name] for b in batches]) for name in batches[0].extras},
    )


def _batches(source: Any, y: Any, batch_size: int) -> Iterable[Any]:
    """What a source holds, as stream batches."""
    if y is not None:
        if len(source) != len(y):
            raise InputError(
                f"Learner.learn_stream: {len(source)} inputs but {len(y)} labels; give one each."
            )
        starts = range(0, len(source), batch_size)
        return ((source[i : i + batch_size], y[i : i + batch_size]) for i in starts)
    if isinstance(source, Dataset):
        # A generator of its own: a DataLoader would draw a seed from the global one.
        return DataLoader(source, batch_size=batch_size, generator=torch.Generator())
    if isinstance(source, Iterable):
        return source
    raise InputError(
        f"Learner.learn_stream: a {type(source).__name__}; give arrays x and y, a Dataset, or an "
        "iterable of batches."
    )


def _check_of_this_model(model: nn.Module, part: str, its_model: nn.Module | None) -> None:
    """A part made for another model would do nothing, without a word."""
    if its_model is None:
        return
    if {id(p) for p in its_model.parameters()} != {id(p) for p in model.parameters()}:
        raise InputError(
            f"Learner: the {part} was made for another model; make it for the one handed in."
        )


def _check_counts(**counts: int | None) -> None:
    for name, value in counts.items():
        if value is not None and value < 1:
            raise InputError(f"Learner: {name}={value}; give at least 1.")
