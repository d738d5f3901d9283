"""Rules on how a model is trained: weight decay on γ and β, a norm in another mode than its model."""

from __future__ import annotations

from collections.abc import Iterator

from normalcy.doctor.evidence import Evidence
from normalcy.doctor.findings import Finding
from normalcy.doctor.rules.base import Rule


class DecayedNorm(Rule):
    """Weight decay on γ and β."""

    code = "decayed-norm"
    title = "Weight decay acts on γ and β"
    cause = (
        "Decay pulls the scale γ and the shift β towards zero, which regularizes no function: the layers "
        "around the norm can undo it, and it shrinks what the norm lets through."
    )
    remedy = ""
    severity = "warning"

    def check(self, evidence: Evidence) -> Iterator[Finding]:
        """One finding for each parameter group that decays parameters of known norms."""
        if evidence.optimizer is None:
            return
        owners = {
            id(parameter): norm.where
            for norm in evidence.norms
            if norm.module is not None
            for parameter in norm.module.parameters(recurse=False)
        }
        for number, group in enumerate(evidence.optimizer.param_groups):
            hit = [p for p in group["params"] if id(p) in owners]
            if not hit or not group.get("weight_decay"):
                continue
            places = list(dict.fromkeys(owners[id(p)] for p in hit))
            yield self.found(
                f"optimizer group {number}",
                {
                    "weight_decay": float(group["weight_decay"]),
                    "tensors": len(hit),
                    "parameters": sum(p.numel() for p in hit),
                    "norms": ", ".join(places[:6]) + (f" and {len(places) - 6} more" if places[6:] else ""),
                },
                remedy=(
                    "Give the norms' parameters a group of their own: "
                    f"{type(evidence.optimizer).__name__}([{{'params': weights}}, "
                    "{'params': norms_and_biases, 'weight_decay': 0.0}])."
                ),
            )


class WrongMode(Rule):
    """A norm in another mode than its model."""

    code = "wrong-mode"
    title = "A norm is in another mode than its model"
    cause = ""
    remedy = ""

    def check(self, evidence: Evidence) -> Iterator[Finding]:
        """Only norms whose result depends on the mode."""
        for norm in evidence.norms:
            if norm.module is None or norm.kind not in ("batch", "instance") or norm.stored is None:
                continue
            if norm.module.training == evidence.model.training:
                continue
            if norm.module.training:
                yield self.found(
                    norm.where,
                    {"model": "eval", "norm": "train"},
                    cause=(
                        "In training mode its output depends on the other examples of the batch, and every "
                        "pass moves its running statistics."
                    ),
                    remedy="Call model.eval() after everything that sets modes, or .eval() on this layer.",
                )
                continue
            trains = [p for p in norm.module.parameters(recurse=False) if p.requires_grad]
            yield self.found(
                norm.where,
                {"model": "train", "norm": "eval", "trainable": sum(p.numel() for p in trains)},
                severity="warning" if trains else "note",
                cause=(
                    "It normalizes with stored statistics while the model trains. If it is frozen on "
                    "purpose, the next model.train() undoes that"
                    + ("; its γ and β still train." if trains else ".")
                ),
                remedy="If that is not meant, call model.train(); else call .eval() after every train().",
            )
