"""JSON that others wrote, read with errors of this package."""

import json
from typing import Any

from diloco.errors import DilocoError, translated

MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What reading plain values ends in that are not what they should be: of another type, missing, too large, too deep."""


def read_json(text: str | bytes, what: str, error: type[DilocoError], advice: str) -> Any:
    """The values of a JSON text.

    Raises:
        DilocoError: an `error` that names `what` is not JSON, or too deep, and gives the advice.
    """
    with translated((ValueError, RecursionError), error, f"{what} is not JSON", advice):
        return json.loads(text)
