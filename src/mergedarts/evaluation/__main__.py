"""`python -m mergedarts.evaluation` is the harness's own command, `lm_eval`, with the model `mergedarts` known to it.

Releases of lm-evaluation-harness that read the entry points `lm_eval.models` know it without this.
"""

from __future__ import annotations

import sys

from ..errors import UserError


def main() -> None:
    try:
        from .harness import check_installed

        check_installed()
        from lm_eval.__main__ import cli_evaluate

        from . import lm  # noqa: F401  (registers the model)

        cli_evaluate()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
