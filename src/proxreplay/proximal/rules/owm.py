"""OWM and AOP: directions that the stream has used are closed, a batch at a time.

For every layer, with ``R`` the rows of the batch-mean input (one row for a Linear, one for every
position of a convolution),

    P <- P - P R' (diag(alpha) + R P R')^-1 R P,   P_0 = I,   G <- G P   (G: [out, d]),

which after all batches is ``P = (I + sum_m r_m' r_m / alpha_m)^-1``: the proximal update whose
representative rows are the batch means of the past, at the weights of their time.

``P`` is kept as ``S S'``. In float32, subtracting from ``P`` itself gives negative eigenvalues
within a few steps at alpha = 1e-5, and then diverges; ``S S'`` has none whatever the rounding.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor, nn

from proxreplay.batch import Batch
from proxreplay.distributed import Processes
from proxreplay.errors import InputError, RefreshError
from proxreplay.options import one_of
from proxreplay.proximal.gram.patches import PatchRows
from proxreplay.proximal.gram.rows import Rows
from proxreplay.proximal.layers.batches import count_samples, own_share
from proxreplay.proximal.layers.capture import Call, visit
from proxreplay.proximal.layers.selection import Selector, check_selectors, override_of
from proxreplay.proximal.layers.sites import Site, Survey, unwrap
from proxreplay.proximal.rules.alpha import AdaptiveAlpha, Alpha, ConstantAlpha
from proxreplay.proximal.rules.layerwise import (
    LayerOptions,
    LayerwiseRule,
    Treatment,
    check_options,
)
from proxreplay.proximal.rules.norms import Norms, plain_norm, tied_weight
from proxreplay.proximal.shrinkage.forms import RootShrinkage

Means = tuple[Tensor, Tensor]
"""Mean rows of a site, with the columns of biases and without, ``[groups, rows, d]`` each."""
Reasons = dict[str, str]


class OWM(LayerwiseRule):
    """Orthogonal weight modification: gradients orthogonal to the mean inputs of past batches.

    `observe` absorbs a batch; it runs the model once, in evaluation mode and without a trace. No
    memory is used. With several processes it is the mean over the examples of all that counts.

    Args:
        model: any module, also compiled or wrapped for data parallelism.
        alpha: a number for every row at every time, or a schedule (`DecayingAlpha`, ...); the lower
            the harder the projection. None for the default of the rule.
        norms: "plain" lets the scales and shifts of normalisation layers follow the plain gradient
            and names them in `untreated`; "treat" gives them a matrix for each channel.
        overrides: another alpha for some layers, by name or type; the longest name that fits goes
            before a type, a derived type before its base.
        layers: ``include``, ``exclude`` and ``max_dim``, see `LayerOptions`.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> owm = OWM(model, alpha=1e-3)
    >>> batch = Batch(torch.randn(10, 4), torch.zeros(10, dtype=torch.int64))
    >>> model(batch.inputs).sum().backward()
    >>> owm.observe(batch)
    >>> owm.precondition_()
    """

    _not_yet, _begin = "no batch observed yet.", "call observe(batch) first."
    default_alpha: ClassVar[ConstantAlpha | AdaptiveAlpha] = ConstantAlpha()

    def __init__(
        self,
        model: nn.Module,
        alpha: float | Alpha | None = None,
        *,
        norms: Norms = "plain",
        overrides: Mapping[Selector, float | Alpha] | None = None,
        **layers: Unpack[LayerOptions],
    ) -> None:
        check_options(type(self), layers, LayerOptions.__optional_keys__)
        rule = type(self).__name__
        one_of(("plain", "treat"), **{f"{rule}: norms": norms})
        self.norms = norms
        self.alpha: Alpha = self.default_alpha if alpha is None else _as_alpha(alpha)
        self.overrides = {key: _as_alpha(value) for key, value in (overrides or {}).items()}
        self._observed = 0
        check_selectors(unwrap(model), self.overrides, f"{rule}(overrides=...)")
        leave = [tied_weight, *([plain_norm] if norms == "plain" else [])]
        super().__init__(model, leave=leave, **layers)

    def refresh(self, examples: Any, of: int | None = None) -> None:
        """Nothing: what it knows came with the stream, by `observe`."""

    @torch.no_grad()
    def observe(self, incoming: Batch, reference: Batch | None = None) -> None:
        """Absorb the mean inputs of a batch, which closes their directions for the next steps.

        If anything goes wrong, all is as before.

        Args:
            incoming: as the model sees it.
            reference: not looked at.
        """
        survey, processes = self._survey(), self.processes
        inputs, n = incoming.inputs, len(incoming)
        if processes.replicated and not processes.alone:
            inputs = own_share(inputs, processes, 0)
            n = 0 if inputs is None else count_samples(inputs)
        found, skipped = processes.together("observe", lambda: self._means(survey, inputs, n))
        if not processes.alone:
            found, skipped = means_of_all(processes, found, skipped, n, self._device)
        treatments = {n: one for n, one in self._treatments.items() if n in survey.sites}
        for name, R in found.items():
            treatments[name] = self._absorb(survey.sites[name], *R)
        without = {
            name: skipped.get(name, "not called in the forward pass of any batch observed.")
            for name in survey.sites
            if name not in treatments
        }
        self._put_in_force(treatments, survey.untreated | without)
        self._observed += 1

    def _means(self, survey: Survey, inputs: Any, n: int) -> tuple[dict[str, Means], Reasons]:
        """The mean rows of every site over the examples of this process, if it has any."""
        found = _MeanRows(n, self.max_dim)
        if survey.sites and n:
            model, verifier = unwrap(self.model), self._verifier
            visit(model, survey.sites, [inputs], found.add, verifier=verifier, call=self._call)
            found.skipped |= verifier.wrong
        found.check_finite()
        return found.joined(), found.skipped

    def _absorb(self, site: Site, R: Tensor, Z: Tensor) -> Treatment:
        """The treatment of a site after rows ``R`` (with the columns of biases; ``Z`` without)."""
        module = site.module(unwrap(self.model))
        schedule = override_of(self.overrides, site.name, module, self.alpha)
        alpha = schedule(module, Z, self._observed)
        before = self._treatments.get(site.name)
        if before is None:
            S = torch.eye(R.shape[2], dtype=R.dtype, device=R.device).expand(len(R), -1, -1)
        else:
            assert isinstance(before.factor, RootShrinkage)
            S = before.factor.S
            if S.shape[::2] != R.shape[::2]:
                raise RefreshError(
                    f"{type(self).__name__}: {site} had {S.shape[2]} columns in {len(S)} groups, "
                    f"but has {R.shape[2]} in {len(R)} now; make the rule anew."
                )
        return Treatment(site, RootShrinkage(absorb(S, R, alpha)), float(R.shape[1]))

    def state_dict(self) -> dict[str, Any]:
        """Every root, and how many batches were observed."""
        return {**super().state_dict(), "observed": self._observed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` of the same rule on a model of the same shape gave."""
        super().load_state_dict(state)
        self._observed = int(state["observed"])


class AOP(OWM):
    """Adaptive orthogonal projection: OWM with an alpha that the rows themselves decide.

    All options are those of `OWM`; alpha is a schedule by default (`AdaptiveAlpha`, to which the
    progress of tasks or stream can be given). With a number it is OWM: the LPR paper describes its
    AOP as one with a very low alpha.
    """

    default_alpha = AdaptiveAlpha()


def absorb(S: Tensor, R: Tensor, alpha: Tensor) -> Tensor:
    """A root of ``P - P R' (diag(alpha) + R P R')^-1 R P`` from a root of ``P``.

    With ``V = diag(alpha)^-1/2 R S = A diag(sigma) B'`` that is ``S (I + V'V)^-1/2``, or

        S - S B diag(1 - (1 + sigma^2)^-1/2) B'.

    Args:
        S: ``[groups, d, d]`` with ``P = S S'``.
        R: ``[groups, rows, d]``, any number of rows.
        alpha: ``[groups, rows]``, greater than 0.
    """
    V = (R / alpha.sqrt()[:, :, None]) @ S
    _, sigma, Bt = torch.linalg.svd(V, full_matrices=False)
    lost = 1 - (1 + sigma.square()).rsqrt()
    closed: Tensor = ((S @ Bt.mT) * lost[:, None]) @ Bt
    return S - closed


def mean_rows(rows: Rows, samples: int) -> Tensor:
    """The mean over the examples at every position, ``[groups, positions, d]``.

    Args:
        rows: ``Z: [groups, samples * positions, d]``, examples first.
        samples: number of examples.
    """
    if isinstance(rows, PatchRows):  # linear in the input, so its mean may be taken before
        dtype = torch.promote_types(rows.x.dtype, torch.float32)
        mean = rows.x.unflatten(0, (samples, -1)).mean(dim=0, dtype=dtype)
        return replace(rows, x=mean).dense()
    Z = rows.dense()
    by_example: Tensor = Z.unflatten(1, (samples, -1))
    return by_example.mean(dim=1, dtype=torch.promote_types(Z.dtype, torch.float32))


def means_of_all(
    processes: Processes, own: Mapping[str, Means], skipped: Reasons, n: int, device: torch.device
) -> tuple[dict[str, Means], Reasons]:
    """Mean rows over the examples of all processes, ``sum_r n_r R_r / sum_r n_r``.

    Args:
        processes: each with its own examples.
        own: mean rows over those of this process.
        skipped: why other sites have none.
        n: the number of its examples.
        device: of sites that this process has not met.
    """
    mine = {name: ([R.shape, Z.shape], R.dtype) for name, (R, Z) in own.items()}
    kinds: dict[str, Any] = {}
    counts, reasons = Counter[str](), dict(skipped)
    for m, theirs, why in processes.tell((n, mine, skipped)):
        reasons |= why
        for name, kind in theirs.items():
            counts[name] += m
            if kinds.setdefault(name, kind) != kind:
                raise RefreshError(
                    f"observe: the rows of '{name}' have other shapes in other processes ({kind}; "
                    f"{kinds[name]}); they have no mean. Leave it out with exclude."
                )
    sums = {
        name: [row.double() * n for row in own[name]]
        if name in own
        else [torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes]
        for name, (shapes, _) in kinds.items()
        if name not in reasons
    }
    processes.sum_([row for rows in sums.values() for row in rows])
    means = {}
    for name, rows in sums.items():
        R, Z = ((row / counts[name]).to(kinds[name][1]) for row in rows)
        means[name] = (R, Z)
    return means, reasons


class _MeanRows:
    """Collects the batch-mean rows of every site, and why a site has none."""

    def __init__(self, samples: int, max_dim: int) -> None:
        self.samples = samples
        self.max_dim = max_dim
        self.skipped: dict[str, str] = {}
        self._rows: defaultdict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)

    def add(self, call: Call) -> None:
        site, (_, count, d) = call.site, call.rows.shape
        if site.width(d) > self.max_dim:
            self.skipped[site.name] = f"d = {site.width(d)} is more than max_dim = {self.max_dim}."
        elif count % self.samples:
            self.skipped[site.name] = (
                f"{count} rows for {self.samples} examples; their mean is not defined."
            )
        else:
            Z = mean_rows(call.rows, self.samples)
            ones = Z.new_zeros(*Z.shape[:2], len(site.biases))
            if call.member.bias is not None:
                ones[:, :, call.member.bias] = 1
            R = ones if site.weight is None else torch.cat([Z, ones], dim=2)
            self._rows[site.name].append((R, Z))

    def joined(self) -> dict[str, Means]:
        """Rows with and without the columns of biases; those of several calls together."""
        return {
            name: (torch.cat([R for R, _ in calls], dim=1), torch.cat([Z for _, Z in calls], dim=1))
            for name, calls in self._rows.items()
            if name not in self.skipped
        }

    def check_finite(self) -> None:
        """One look from the host for all layers."""
        flags = [(name, Z.isfinite().all()) for name, calls in self._rows.items() for _, Z in calls]
        if not flags:
            return
        together = torch.stack([flag.to(flags[0][1].device) for _, flag in flags])
        for (name, _), finite in zip(flags, together.tolist(), strict=True):
            if not finite:
                raise RefreshError(
                    f"observe: the inputs of '{name}' are not finite; the batch was not absorbed. "
                    "Look for NaN or infinity in it or in the weights before that layer."
                )


def _as_alpha(alpha: float | Alpha) -> Alpha:
    if callable(alpha):
        return alpha
    if not 0 < alpha < float("inf"):
        raise InputError(f"alpha={alpha}; give a finite number greater than 0, or a schedule.")
    return ConstantAlpha(alpha)
