"""The quick tests on each supported version: `make test-versions`, or `nox -l` for the list.

A session is one pair of Python and PyTorch with the newest Hugging Face libraries. "newest" is the
newest release of PyTorch on the registry that day, so that whoever runs it next month tests next
month's. One more session has the oldest supported transformers. For most versions of PyTorch the
registry has a CUDA build of several gigabytes. A session whose interpreter is not installed is
skipped. The last line of a session's output is pytest's summary.
"""

from __future__ import annotations

import nox

PYTHONS = ("3.11", "3.12", "3.13")
NEWEST = "newest"
TORCHES = ("2.11.0", "2.12.0", "2.13.0", "2.14.1", NEWEST)
OLDEST_TRANSFORMERS = "5.17.0"
# What the tests need beside PyTorch. Linters and documentation tools have tests of their own.
TEST_TOOLS = ("pytest>=8", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "setuptools")
# Which the tests skip where they are missing.
LIBRARIES = ("bitsandbytes", "lightning", "torchao", "trl")

nox.options.default_venv_backend = "venv"
nox.options.error_on_missing_interpreters = False
nox.options.reuse_existing_virtualenvs = True


@nox.session(python=PYTHONS)
@nox.parametrize("torch", TORCHES)
def tests(session: nox.Session, torch: str) -> None:
    """The quick tests with one version of PyTorch."""
    run_tests(session, torch)


@nox.session(python=PYTHONS[0])
def oldest_transformers(session: nox.Session) -> None:
    """The quick tests with the oldest supported transformers."""
    run_tests(session, TORCHES[0], f"transformers=={OLDEST_TRANSFORMERS}")


def run_tests(session: nox.Session, torch: str, *pinned: str) -> None:
    """Installs this package with the given versions and runs all its quick tests.

    PyTorch is installed first and alone, so that pip settles on its build before others ask for it.
    """
    build = "torch" if torch == NEWEST else f"torch=={torch}"
    session.install("--upgrade", build)
    upgraded = ("--upgrade", *LIBRARIES) if torch == NEWEST else ()
    session.install(build, *pinned, *TEST_TOOLS, *upgraded, "--editable", ".[bench]")
    session.run("rockmate", "check")
    tiers = ("-m", "unit or model or integration")
    workers = ("-n", "logical", "--dist", "worksteal")
    session.run("python", "-m", "pytest", *workers, *tiers, *session.posargs)
