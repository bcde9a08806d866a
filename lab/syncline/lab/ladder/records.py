"""What a level found, and the whole climb: the contract's own shapes, under the names that levels use."""

from __future__ import annotations

from syncline.contract.validation import TITLES as TITLES
from syncline.contract.validation import Check as Check
from syncline.contract.validation import Diagnosis as Diagnosis
from syncline.contract.validation import Level as Level
from syncline.contract.validation import Report as Report
from syncline.contract.validation import Result as Result
from syncline.contract.validation import absent as absent
from syncline.contract.validation import same as same
