"""Every case there is."""

from __future__ import annotations

from tests.gate.corpus import archives, claims, code, contents, importing, using
from tests.gate.corpus.case import Case
from tests.gate.corpus.honest import as_built, odd_in_every_way, passing

BROKEN: list[Case] = [
    case
    for table in (
        archives.TABLE,
        claims.TABLE,
        code.TABLE,
        contents.TABLE,
        importing.TABLE,
        using.TABLE,
    )
    for case in table.cases
]

TESTS = tuple(dict.fromkeys(test for case in BROKEN for test in case.tests))
"""All regression tests that some case needs: a wheel that nothing was done to passes them."""

HONEST: list[Case] = [
    passing("as-built", as_built, TESTS, using.SECONDS),
    passing("odd-in-every-way", odd_in_every_way, importing.TESTS, using.SECONDS),
]
