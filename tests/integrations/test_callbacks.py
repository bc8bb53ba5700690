"""Callbacks inside the real frameworks: bit by bit what the same loop by hand does."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from proxreplay import LPR, Batch, RingMemory
from proxreplay.errors import CheckpointError, InputError
from proxreplay.integrations.refreshing import Refreshing

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*'pin_memory' argument is set as true"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]
EVERY, STEPS = 2, 6


def data(n=48):
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(n, 4, generator=rng)
    return x, (x[:, 0] > 0).long()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def memory(n=20):
    filled = RingMemory(64)
    x, y = data()
    filled.add(Batch(x[:n] + 1, y[:n]), torch.Generator())
    return filled


def by_hand(source, steps=STEPS, accumulate=1, size=4, rule=LPR):
    """The same training without any framework."""
    net = network()
    x, y = data()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    refreshing = Refreshing(source, EVERY, samples=8, rule=rule)
    refreshing.begin(net, optimizer)
    batches = iter(zip(x.split(size), y.split(size), strict=True))
    for step in range(steps):
        refreshing.before_step(step)
        for _ in range(accumulate):
            inputs, labels = next(batches)
            (F.cross_entropy(net(inputs), labels) / accumulate).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(net), refreshing


def weights(net):
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def without_rule():
    return by_hand(memory(), rule=lambda net: LPR(net, omega_0=0.0))[0]


# --- the schedule itself


def test_the_schedule_counts_steps_and_waits_for_an_empty_memory():
    net, empty = network(), RingMemory(64)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    refreshing = Refreshing(empty, 3, samples=5)
    refreshing.begin(net, optimizer)
    assert not refreshing.before_step(0)
    empty.add(Batch(*data()), torch.Generator())
    due = [refreshing.before_step(step) for step in (1, 1, 2, 3, 4, 4, 5, 6, 7)]
    assert due == [True, False, False, False, True, False, False, False, True]


@pytest.mark.parametrize("kind", ["memory", "loader", "tensor", "function", "list"])
def test_every_source_gives_examples_and_leaves_the_rng_alone(kind):
    x, y = data()
    source = {
        "memory": memory(),
        "loader": DataLoader(TensorDataset(x, y), batch_size=5, shuffle=True),
        "tensor": x,
        "function": lambda: x,
        "list": [(x[:5],), (x[5:12],)],
    }[kind]
    inputs = (lambda batch: batch[0]) if kind == "loader" else None
    net = network()
    rule = partial(LPR, omega_0=1.0)
    refreshing = Refreshing(source, 1, samples=8, inputs=inputs, rule=rule)
    refreshing.begin(net, torch.optim.SGD(net.parameters(), lr=0.1))
    before = torch.random.get_rng_state()
    assert refreshing.before_step(0)
    assert torch.equal(torch.random.get_rng_state(), before)
    seen = 1 / refreshing.rule.layers["0"].omega
    assert seen == pytest.approx({"memory": 8, "loader": 10, "list": 12}.get(kind, 48))


def test_bad_arguments_are_refused():
    with pytest.raises(InputError, match="every=0"):
        Refreshing(memory(), 0)
    net = network()
    wrong = Refreshing(memory(), rule=lambda net: net)
    with pytest.raises(InputError, match="gave a Sequential; give a function from a model"):
        wrong.begin(net, torch.optim.SGD(net.parameters(), lr=0.1))


# --- Lightning


def lightning():
    return pytest.importorskip("lightning.pytorch", reason="needs the extra 'integrations'")


def lit_module():
    class Lit(lightning().LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network()

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, _):
            return F.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    return Lit()


def lit_trainer(callback, tmp_path, steps=STEPS, keep=None, **options):
    return lightning().Trainer(
        max_steps=steps,
        callbacks=[callback] if keep is None else [callback, keep],
        default_root_dir=tmp_path,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=keep is not None,
        **options,
    )


def lit_callback(source=None):
    lightning()
    from proxreplay.integrations.lightning import RefreshCallback

    return RefreshCallback(source or memory(), EVERY, samples=8)


def batches(size=4):
    return DataLoader(TensorDataset(*data()), batch_size=size)


@pytest.mark.parametrize("accumulate", [1, 2], ids=["every-batch", "accumulated"])
def test_lightning_does_what_a_loop_by_hand_does(tmp_path, accumulate):
    module, callback = lit_module(), lit_callback()
    trainer = lit_trainer(callback, tmp_path, accumulate_grad_batches=accumulate)
    trainer.fit(module, batches())
    expected, by_us = by_hand(memory(), accumulate=accumulate)
    torch.testing.assert_close(weights(module), expected, rtol=0, atol=0)
    assert callback._refreshed_at == by_us._refreshed_at == STEPS - EVERY
    assert not torch.equal(expected, without_rule())
    assert callback.rule._optimizer is None  # nothing stays attached


def test_lightning_resumes_bit_by_bit(tmp_path):
    x, y = data(4)  # all batches alike: which ones Lightning takes after resuming is its affair
    epoch = DataLoader(TensorDataset(x.repeat(3, 1), y.repeat(3)), batch_size=4)
    keep = lightning().callbacks.ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    whole, resumed = lit_module(), lit_module()
    lit_trainer(lit_callback(), tmp_path, keep=keep).fit(whole, epoch)
    emptied = lit_callback(RingMemory(64))
    lit_trainer(emptied, tmp_path).fit(resumed, epoch, ckpt_path=tmp_path / "epoch=0.ckpt")
    assert torch.equal(weights(resumed), weights(whole))
    assert len(emptied.source) == 20  # the memory came with the checkpoint


def test_lightning_fits_twice_with_the_same_callback(tmp_path):
    callback = lit_callback()
    first = lit_module()
    lit_trainer(callback, tmp_path, steps=2).fit(first, batches())
    rule = callback.rule
    lit_trainer(callback, tmp_path, steps=2).fit(first, batches())
    assert callback.rule is rule  # the same model keeps its rule
    other = lit_module()
    lit_trainer(callback, tmp_path, steps=2).fit(other, batches())
    assert callback.rule is not rule


def test_lightning_with_two_optimizers_is_refused(tmp_path):
    class Two(type(lit_module())):
        def configure_optimizers(self):
            return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]

        automatic_optimization = False

    with pytest.raises(InputError, match="Two has 2 optimizers"):
        lit_trainer(lit_callback(), tmp_path).fit(Two(), batches())


# --- transformers' Trainer


class WithLoss(nn.Module):
    """What the Trainer wants of a model."""

    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, x, labels=None):
        logits = self.net(x)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


def hf_train(tmp_path, source=None, steps=STEPS, accumulate=1, resume=None, callback=None):
    transformers = pytest.importorskip("transformers", reason="needs the extra 'integrations'")
    from proxreplay.integrations.transformers import RefreshCallback

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *args):
            return None

    callback = callback or RefreshCallback(source or memory(), EVERY, samples=8)
    x, y = data()
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=accumulate,
        save_steps=3,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        dataloader_pin_memory=False,
        logging_strategy="no",
    )
    model = WithLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = InOrder(
        model,
        args,
        train_dataset=[{"x": a, "labels": b} for a, b in zip(x, y, strict=True)],
        callbacks=[callback],
        optimizers=(optimizer, None),
    )
    trainer.train(resume_from_checkpoint=resume)
    return weights(model), callback, trainer


@pytest.mark.parametrize("accumulate", [1, 2], ids=["every-batch", "accumulated"])
def test_the_trainer_does_what_a_loop_by_hand_does(tmp_path, accumulate):
    trained, callback, _ = hf_train(tmp_path, accumulate=accumulate)
    expected, by_us = by_hand(memory(), accumulate=accumulate)
    torch.testing.assert_close(trained, expected, rtol=0, atol=1e-7)
    assert callback._refreshed_at == by_us._refreshed_at == STEPS - EVERY
    assert float((expected - without_rule()).abs().max()) > 1e-3
    assert callback.rule._optimizer is None


def test_the_trainer_resumes_bit_by_bit(tmp_path):
    whole, _, _ = hf_train(tmp_path / "whole")
    hf_train(tmp_path / "half", steps=3)
    resumed, callback, trainer = hf_train(tmp_path / "half", RingMemory(64), resume=True)
    assert torch.equal(resumed, whole)
    assert len(callback.source) == 20
    rule = callback.rule
    trainer.train()  # once more, with the same callback
    assert callback.rule is rule


def test_the_trainer_resumes_from_a_checkpoint_that_was_moved(tmp_path):
    hf_train(tmp_path / "half", steps=3)
    moved = (tmp_path / "half" / "checkpoint-3").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"no .*checkpoint-3.* call resume\(folder\)"):
        hf_train(tmp_path / "new", resume=str(moved))
    from proxreplay.integrations.transformers import RefreshCallback

    callback = RefreshCallback(memory(), EVERY, samples=8)
    callback.resume(moved)
    resumed, _, _ = hf_train(tmp_path / "new", resume=str(moved), callback=callback)
    assert torch.equal(resumed, hf_train(tmp_path / "whole")[0])


# --- accelerate


def test_accelerate_works_by_itself(tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="needs the extra 'integrations'")

    def run(steps, folder=None, resume=False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        net = network()
        plain = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = accelerator.prepare(net, plain)
        lpr = LPR(model).attach(optimizer)
        accelerator.register_for_checkpointing(lpr)
        if resume:
            accelerator.load_state(str(folder))
        x, y = data()
        pairs = list(zip(x.split(4), y.split(4), strict=True))
        for step in steps:
            if step % (2 * EVERY) == 0:
                lpr.refresh(data()[0][:20] + 1)
            with accelerator.accumulate(model):
                accelerator.backward(F.cross_entropy(model(pairs[step][0]), pairs[step][1]))
                optimizer.step()
                optimizer.zero_grad()
        if folder is not None and not resume:
            accelerator.save_state(str(folder))
        return weights(net)

    whole = run(range(12))
    run(range(6), tmp_path / "half")
    assert torch.equal(run(range(6, 12), tmp_path / "half", resume=True), whole)
