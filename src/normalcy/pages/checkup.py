"""The page of one checkup: what stands in it, in which order, and which layers are drawn.

Not for examining anything: it reads a finished checkup, the same that the command prints as JSON.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from markupsafe import Markup, escape

from normalcy.pages import figures
from normalcy.pages.figures import DRAWN
from normalcy.pages.numbers import measure, number, path
from normalcy.pages.page import embedded, render, shown
from normalcy.pages.variants import neighbours

_SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding with its address and, after a repair, whether it is `cured` or `remains`."""

    path: str
    where: str
    evidence: tuple[tuple[str, str], ...]
    cause: str
    remedy: str
    state: str


@dataclass(frozen=True, slots=True)
class Group:
    """The findings of one code; `cause` and `remedy` are given here where all places share them."""

    code: str
    title: str
    severity: str
    findings: tuple[Finding, ...]
    cause: str | None
    remedy: str | None


@dataclass(frozen=True, slots=True)
class Places:
    """Places of a model about which the same sentence is said."""

    what: str
    why: str
    places: tuple[str, ...]


def render_checkup(checkup: Mapping[str, Any]) -> str:
    """Render a checkup as one page that needs no network, no script and no other file.

    Args:
        checkup: what `normalcy doctor --json` prints, as a dictionary.

    Every number on the page stands in an element whose `data-json` is its address in the checkup
    (`pages.lookup` finds it there, `pages.number` writes it), and the checkup itself is embedded as JSON.

    Raises:
        MissingExtraError: Altair or vl-convert is not installed; `pages.require()` says so beforehand.

    Example:
        >>> from normalcy import pages
        >>> empty = {"findings": [], "sites": [], "unrecognized": [], "not_seen": [], "loss": None}
        >>> page = pages.render_checkup({
        ...     "normalcy": "0.1.0", "torch": "2.13.0", "target": "model.py:make",
        ...     "model": {"class": "Sequential", "parameters": 6, "norms": 0}, "baselines": None,
        ...     "before": empty, "repair": None, "after": None, "fold": None,
        ...     "proved": None, "notes": []})
        >>> "nothing to examine" in page
        True
    """
    before, after = checkup["before"], checkup["after"]
    sites = figures.sites(checkup)
    measured = [site for site in sites if site.has_gap]
    sampled = [site for site in sites if site.before["sample"] is not None]
    data, whole = embedded(checkup)
    status, sentences = _verdict(checkup)
    return render(
        "checkup.html",
        title=f"Checkup of {checkup['model']['class']}",
        checkup=checkup,
        shown=partial(shown, checkup),
        path=path,
        number=number,
        status=status,
        sentences=sentences,
        groups=_groups(before["findings"], "before", after),
        fresh=_groups(_fresh(before, after), "after", None),
        done=_places(checkup["repair"]["done"] if checkup["repair"] else ()),
        refused=_places(checkup["repair"]["refused"] if checkup["repair"] else ()),
        folded=_places(checkup["fold"]["done"] if checkup["fold"] else ()),
        unfolded=_places(checkup["fold"]["refused"] if checkup["fold"] else ()),
        unrecognized=_places(before["unrecognized"]),
        not_seen=_places(before["not_seen"]),
        losses=figures.losses(checkup),
        has_loss=checkup["baselines"] is not None or before["loss"] is not None,
        sites=sites,
        measured=measured,
        drawn=DRAWN,
        gaps=figures.gaps(measured[:DRAWN]),
        neighbours=neighbours(sites),
        warmup=figures.warmup(sites),
        layers=[(site, figures.activations(site)) for site in sampled[:DRAWN]],
        sampled=len(sampled),
        data=data,
        whole=whole,
    )


def _verdict(checkup: Mapping[str, Any]) -> tuple[str, list[Markup]]:
    """Say in a sentence or two how the model stands, and give the status that colours it."""
    status, sentences = _found(checkup)
    before, after, fold = checkup["before"], checkup["after"], checkup["fold"]
    if after and before["loss"] and after["loss"]:
        sentences.append(_loss_sentence(checkup))
    if before["sites"] and (before["unrecognized"] or before["not_seen"]):
        sentences.append(escape("What was not recognized or not seen is listed below."))
    if checkup["proved"] is False:
        sentences.append(escape("A change could not be proved equal; it was taken back, and is named below."))
        return "bad", sentences
    if fold and fold["done"]:
        sentences.append(escape("What was folded for inference was proved equal."))
    return status, sentences


def _found(checkup: Mapping[str, Any]) -> tuple[str, list[Markup]]:
    say = partial(shown, checkup)
    before, after = checkup["before"], checkup["after"]
    count, left = len(before["findings"]), after["findings"] if after else before["findings"]
    if not before["sites"] and not count:
        if before["unrecognized"] or before["not_seen"]:
            return "mixed", [
                escape("No normalization layer was examined; what could not be is listed below.")
            ]
        return "plain", [escape("There is nothing to examine: the model has no normalization layer.")]
    if not count and not left:
        return "good", [
            Markup("Nothing wrong was found; normalization layers: {}.").format(say("model.norms"))
        ]
    found = Markup("{} finding{}").format(say("before.findings.length"), "" if count == 1 else "s")
    gravest = min((finding["severity"] for finding in left), key=_SEVERITIES.index, default="")
    status = {"error": "bad", "warning": "mixed"}.get(gravest, "good")
    told = f"the gravest {'an error' if gravest == 'error' else f'a {gravest}'}"
    if after is None:
        return status, [Markup("{}, {}; nothing was repaired.").format(found, told)]
    if not left:
        return status, [Markup("{} before the repair, none after it.").format(found)]
    remain = say("after.findings.length")
    return status, [Markup("{} before the repair, {} after it, {}.").format(found, remain, told)]


def _loss_sentence(checkup: Mapping[str, Any]) -> Markup:
    say = partial(shown, checkup)
    old, new = (measure(checkup[when]["loss"]["eval"]) for when in ("before", "after"))
    old, new = math.nan if old is None else old, math.nan if new is None else new
    verb = "fell" if new < old else "rose" if new > old else "went"
    sentence = Markup("The evaluation loss {} from {} to {}").format(
        verb, say("before.loss.eval"), say("after.loss.eval")
    )
    bigram = measure(checkup["baselines"]["bigram"]) if checkup["baselines"] else None
    if bigram is None:
        return Markup("{}.").format(sentence)
    than = [
        "worse than" if loss > bigram else "better than" if loss < bigram else "against"
        for loss in (old, new)
    ]
    return Markup("{}: {} a bigram table ({}) before, {} it after.").format(
        sentence, than[0], say("baselines.bigram"), than[1]
    )


def _key(finding: Mapping[str, Any]) -> tuple[str, str]:
    return finding["code"], finding["where"]


def _fresh(before: Mapping[str, Any], after: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Give what only the second examination found, and {} in the place of the rest: addresses stay right."""
    known = {_key(finding) for finding in before["findings"]}
    return [finding if _key(finding) not in known else {} for finding in (after["findings"] if after else [])]


def _groups(findings: list[Mapping[str, Any]], when: str, after: Mapping[str, Any] | None) -> list[Group]:
    remaining = {_key(finding) for finding in after["findings"]} if after else set()
    kinds: dict[tuple[str, str, str], list[Finding]] = {}
    for i, found in enumerate(findings):
        if not found:
            continue
        state = "" if after is None else "remains" if _key(found) in remaining else "cured"
        here = (when, "findings", i)
        evidence = tuple((name, path(*here, "evidence", name)) for name in found["evidence"])
        kinds.setdefault((found["severity"], found["code"], found["title"]), []).append(
            Finding(path(*here), found["where"], evidence, found["cause"], found["remedy"], state)
        )
    return [
        Group(
            code,
            title,
            severity,
            tuple(items),
            cause=items[0].cause if len({item.cause for item in items}) == 1 else None,
            remedy=items[0].remedy if len({item.remedy for item in items}) == 1 else None,
        )
        for (severity, code, title), items in sorted(
            kinds.items(), key=lambda kind: _SEVERITIES.index(kind[0][0])
        )
    ]


def _places(items: Iterable[Mapping[str, Any]]) -> list[Places]:
    grouped: dict[tuple[str, str], list[str]] = {}
    for item in items:
        grouped.setdefault((item.get("what", ""), item["why"]), []).append(item["where"])
    return [Places(what, why, tuple(places)) for (what, why), places in grouped.items()]
