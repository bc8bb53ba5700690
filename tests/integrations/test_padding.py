"""Padded tokens are not data: a padded batch gives what the sequences alone give."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from proxreplay import LPR, Batch
from proxreplay.errors import InputError
from proxreplay.options import StepOptions
from proxreplay.proximal import KroneckerLPR
from tests.reference import assert_same_state

LENGTHS = (4, 7, 2)
rule_of = partial(LPR, omega_0=1.0, beta=1.0)  # a strength that depends on counts only


def tokens(seed=0, lengths=LENGTHS):
    rng = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 30, (length,), generator=rng) for length in lengths]


def padded(sequences, value=0):
    x = nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=value)
    mask = torch.stack([torch.arange(x.shape[1]) < len(one) for one in sequences])
    return x, mask.long()


def assert_same_rule(a, b):
    """The same layers, positions, strengths and factors."""
    assert a.layers.keys() == b.layers.keys()
    assert not a.untreated
    assert_same_state(b.state_dict()["layers"], a.state_dict()["layers"], rtol=1e-9, atol=1e-11)


def model_of(name):
    transformers = pytest.importorskip("transformers", reason="needs the extra 'integrations'")
    small = {"vocab_size": 30, "num_hidden_layers": 1, "num_attention_heads": 2}
    wide = {"hidden_size": 8, "intermediate_size": 12}
    made = {
        "BERT": lambda t: t.BertForSequenceClassification(t.BertConfig(**small, **wide)),
        "GPT-2": lambda t: t.GPT2LMHeadModel(
            t.GPT2Config(
                vocab_size=30,
                n_embd=8,
                n_layer=1,
                n_head=2,
                n_positions=16,
                bos_token_id=1,
                eos_token_id=1,
            )
        ),
        "Qwen": lambda t: t.Qwen3ForCausalLM(
            t.Qwen3Config(**small, **wide, num_key_value_heads=1, head_dim=4)
        ),
        "T5": lambda t: t.T5ForConditionalGeneration(
            t.T5Config(vocab_size=30, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2)
        ),
    }
    torch.manual_seed(0)
    return made[name](transformers).double()


@pytest.mark.parametrize("name", ["BERT", "GPT-2", "Qwen"])
def test_a_padded_batch_equals_its_sequences_alone(name):
    model = model_of(name)
    sequences = tokens()
    x, mask = padded(sequences)
    together, alone, careless = rule_of(model), rule_of(model), rule_of(model)
    together.refresh({"input_ids": x, "attention_mask": mask})
    alone.refresh([{"input_ids": one[None]} for one in sequences])
    assert_same_rule(together, alone)
    careless.refresh({"input_ids": x, "attention_mask": mask}, mask=False)
    layer = next(n for n, one in alone.layers.items() if one.kind in ("Linear", "Conv1D"))
    assert together.layers[layer].positions == sum(LENGTHS) / 3
    assert careless.layers[layer].positions == 7


@pytest.mark.parametrize("targets", [(3, 5, 2), (4, 2, 7)], ids=["shorter", "as-long"])
def test_encoder_and_decoder_have_masks_of_their_own(targets):
    model = model_of("T5")
    sources, answers = tokens(), tokens(1, targets)
    x, mask = padded(sources)
    y, decoder_mask = padded(answers)
    together, alone = rule_of(model), rule_of(model)
    together.refresh(
        {
            "input_ids": x,
            "attention_mask": mask,
            "decoder_input_ids": y,
            "decoder_attention_mask": decoder_mask,
        }
    )
    alone.refresh(
        [
            {"input_ids": a[None], "decoder_input_ids": b[None]}
            for a, b in zip(sources, answers, strict=True)
        ]
    )
    assert_same_rule(together, alone)


class Tagger(nn.Module):
    """Positions, a class token in front, recurrence, a convolution and a pooled head."""

    def __init__(self, positions="bare"):
        super().__init__()
        self.embed = nn.Embedding(30, 4)
        self.positions = nn.Parameter(torch.randn(1, 9, 4))
        self.look = nn.Embedding(9, 4)
        self.scale = nn.Parameter(torch.randn(4))
        self.recurrent = nn.GRU(4, 4, batch_first=True)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        T = x.shape[1]
        h = self.embed(x) + self.positions[:, :T] + self.look(torch.arange(T))
        h = self.recurrent(h * self.scale)[0]
        return self.head(self.norm(h.mT).mT[:, 0])


def test_layers_that_are_no_attention_follow_the_mask_too():
    torch.manual_seed(0)
    model = Tagger().double()
    sequences = tokens()
    x, mask = padded(sequences)
    together, alone = rule_of(model), rule_of(model)
    together.refresh(x, mask=mask)
    alone.refresh([one[None] for one in sequences])
    assert_same_rule(together, alone)
    assert together.layers["head"].positions == 1  # pooled: one row per example
    assert together.layers["look"].positions == together.layers["embed"].positions


@pytest.mark.parametrize("how", ["tensor", "bool", "array", "split", "loader", "dict-loader"])
def test_a_mask_is_given_in_many_ways(how):
    torch.manual_seed(0)
    model = Tagger().double()
    x, mask = padded(tokens())
    expected = rule_of(model)
    expected.refresh(x, mask=mask)
    lpr = rule_of(model, batch_size=2 if how == "split" else None)
    if how == "loader":
        lpr.refresh([(x, mask)], inputs=lambda batch: batch[0], mask=lambda batch: batch[1])
    elif how == "dict-loader":
        batches = [{"x": x[i : i + 1], "keep": mask[i : i + 1]} for i in range(3)]
        lpr.refresh(batches, inputs=lambda b: b["x"], mask=lambda b: b["keep"])
    else:
        lpr.refresh(x, mask={"bool": mask.bool(), "array": mask.numpy()}.get(how, mask))
    assert_same_rule(lpr, expected)


def test_attention_of_torch_with_the_sequence_first():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0).double()
    x, mask = torch.randn(7, 3, 4).double(), padded(tokens())[1]
    together, alone = rule_of(layer), rule_of(layer)
    call = {"src": x, "src_key_padding_mask": mask == 0}
    together.refresh([call], mask=lambda batch: mask, batch_dim=1)
    alone.refresh([(x[:length, i : i + 1],) for i, length in enumerate(LENGTHS)], batch_dim=1)
    assert_same_rule(together, alone)


def test_rows_that_cannot_be_matched_are_named():
    class Chosen(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(30, 4)
            self.expert = nn.Linear(4, 2)

        def forward(self, x):
            return self.expert(self.embed(x).flatten(0, 1)[:5])

    x, mask = padded(tokens())
    with pytest.warns(UserWarning, match=r"'expert': its 5 rows cannot be matched .*\(3, 7\)"):
        rule_of(Chosen()).refresh(x, mask=mask)


NEWEST = StepOptions(every=1, rebuild=1, decay=0.0)
STEP_RULES = {
    "LPR": partial(LPR, omega_0=1.0, beta=1.0, statistics=NEWEST, tolerance=0),
    "KroneckerLPR": partial(KroneckerLPR, steps=NEWEST, form="inverses", tolerance=0),
}


def step_of(make, model, calls, losses):
    """The rule after one step over several calls of the model, which is left as it was."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.0)
    rule = make(model).attach(optimizer)
    for call, loss in zip(calls, losses, strict=True):
        loss(call()).backward()
    optimizer.step()
    rule.detach()
    optimizer.zero_grad()
    return rule


def of_all(output):
    """A loss of the logits that is a mean over three examples."""
    return output.logits.flatten(1).square().sum(1).mean()


@pytest.mark.parametrize("make", STEP_RULES.values(), ids=STEP_RULES.keys())
@pytest.mark.parametrize("way", ["named", "positional", "inner"])
def test_a_padded_training_step_equals_a_step_on_its_sequences_alone(make, way):
    model = model_of("BERT")
    sequences = tokens()
    x, mask = padded(sequences)
    whole = model
    if way == "inner":  # as a LightningModule does it: the rule's model is not called itself
        whole = nn.ModuleDict({"net": model})
    together = {"positional": lambda: model(x, mask)}.get(
        way, lambda: model(input_ids=x, attention_mask=mask)
    )
    ones = [torch.ones_like(one[None]) for one in sequences]
    alone = [lambda a=a[None], b=b: model(a, b) for a, b in zip(sequences, ones, strict=True)]
    third = [lambda output: of_all(output) / 3] * 3
    assert_same_rule(step_of(make, whole, [together], [of_all]), step_of(make, whole, alone, third))
    careless = step_of(make, whole, [lambda: model(x)], [of_all])
    layer = next(n for n, one in careless.layers.items() if n.endswith("query"))
    assert careless.layers[layer].positions == 7


def test_a_padded_step_tells_incoming_from_replayed_examples():
    model = model_of("BERT")
    sequences = tokens()
    x, mask = padded(sequences)
    rule = STEP_RULES["KroneckerLPR"](model, steps=replace(NEWEST, incoming=0.0))
    model.train()
    with rule.watched(
        Batch({"x": x[:1]}, torch.zeros(1).long()), Batch({"x": x[1:]}, torch.zeros(2).long())
    ):
        of_all(model(input_ids=x, attention_mask=mask)).backward()
    rule.step_()
    layer = next(n for n in rule.layers if n.endswith("query"))
    assert rule.layers[layer].positions == sum(LENGTHS[1:]) / 2


def test_a_wrong_mask_of_a_training_step_is_refused():
    class Masked(Tagger):
        def forward(self, x, attention_mask=None):
            return super().forward(x)

    model = Masked().train()
    x, mask = padded(tokens())
    STEP_RULES["LPR"](model).attach(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(InputError, match=r"steps: attention_mask has shape \(3, 1, 7\); a mask of"):
        model(x, attention_mask=mask[:, None])


BAD = {
    "a dimension too many": (lambda m: m[:, None, None], r"shape \(3, 1, 1, 7\); a mask .* n = 3"),
    "too few examples": (lambda m: m[:2], r"shape \(2, 7\); a mask of padding is \[n, T\]"),
    "another length": (lambda m: m[:, :5], r"shape \(3, 5\), but .* \[7\] places"),
    "other values": (lambda m: (1.0 - m) * -1e9, "other values than 0"),
    "an example without data": (lambda m: m * torch.tensor([[1], [0], [1]]), "all of example 1"),
}


@pytest.mark.parametrize(("spoil", "message"), BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("how", ["argument", "dict"])
def test_a_wrong_mask_is_refused_before_anything_changes(spoil, message, how):
    class Masked(Tagger):
        def forward(self, x, attention_mask=None):
            return super().forward(x)

    model = Masked()
    x, mask = padded(tokens())
    lpr = rule_of(model)
    lpr.refresh(x)
    before = lpr.state_dict()
    wrong = spoil(mask)
    call = {"x": x, "attention_mask": wrong} if how == "dict" else x
    with pytest.raises(InputError, match=message):
        lpr.refresh(call, mask=None if how == "dict" else wrong)
    assert_same_state(lpr.state_dict(), before)


def test_one_mask_for_many_batches_and_missing_arguments_are_refused():
    model = Tagger()
    x, mask = padded(tokens())
    lpr = rule_of(model)
    with pytest.raises(InputError, match="one mask for several batches; give a function"):
        lpr.refresh([x], mask=mask)
    with pytest.raises(InputError, match="mask=True"):
        lpr.refresh(x, mask=True)
    with pytest.raises(InputError, match=r"Tagger cannot be called with \['y'\] .*argument"):
        lpr.refresh({"y": x})
