"""The doctor: every diagnosis we can make, as pure functions over `Facts`.

diagnose(facts)   what is wrong, worst first, each finding with its fix
DIAGNOSES         all of them; one page each in docs/doctor/
explain(code)     a page's text
"""

from __future__ import annotations

from anytorch.devices.doctor.registry import Diagnosis, Finding
from anytorch.devices.doctor.run import DIAGNOSES, DIAGNOSIS_FAILED, diagnose, explain, page

__all__ = ["DIAGNOSES", "DIAGNOSIS_FAILED", "Diagnosis", "Finding", "diagnose", "explain", "page"]
