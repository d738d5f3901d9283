"""What a rule is: words, a severity, and a look at the evidence that yields findings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from normalcy.doctor.evidence import Evidence
from normalcy.doctor.findings import Finding, Severity


class Rule(ABC):
    """One kind of fault. `check` yields a finding for each place where it stands."""

    code: ClassVar[str]
    title: ClassVar[str]
    cause: ClassVar[str]
    remedy: ClassVar[str]
    severity: ClassVar[Severity] = "error"

    @abstractmethod
    def check(self, evidence: Evidence) -> Iterator[Finding]:
        """Yield what is found."""

    def found(
        self,
        where: str,
        evidence: dict[str, float | int | str | None],
        *,
        severity: Severity | None = None,
        cause: str = "",
        remedy: str = "",
    ) -> Finding:
        """A finding of this rule; what is None is left out of the evidence."""
        numbers = {name: value for name, value in evidence.items() if value is not None}
        return Finding(
            self.code,
            self.title,
            severity or self.severity,
            where,
            numbers,
            cause or self.cause,
            remedy or self.remedy,
        )
