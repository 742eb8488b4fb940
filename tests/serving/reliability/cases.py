"""Bad inputs and faults that a service must answer for, by number: the tests that show the answer, or why not.

Test ids are path::function; a string is the reason why there is none.
"""

from tests.serving.reliability.faults import FAULTS
from tests.serving.reliability.inputs import INPUTS

NUM_CASES = 72
CASES: dict[int, tuple[str, ...] | str] = INPUTS | FAULTS
