"""``megaprof patch``: adds megaprof's options and hooks to a host's source, or removes them."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

from megaprof.cli import CommandError, UsageError
from megaprof.integrations.patch_files import MISSING, ORIGINAL, OTHER, PATCHED, Patch, known_hosts, patches_of

DESCRIPTION = """Add megaprof's options and the call of install_hooks to a host's own source. This only adds lines, and
only to versions whose checksums are known. Most hosts need no patch: see megaprof run."""

EXAMPLES = (
    "megaprof patch megatron-lm ~/Megatron-LM --check",
    "megaprof patch slime ~/slime --revert",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument("host", metavar="HOST", help=", ".join(known_hosts()))
    parser.add_argument(
        "directory", metavar="DIR", type=Path, help="the host's checkout, or the site-packages that contains it"
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--check", action="store_true", help="change nothing; print the version, and whether it is patched"
    )
    action.add_argument("--revert", action="store_true", help="remove the patch and restore every byte")


def run(args: argparse.Namespace) -> int:
    """Patches, reverts or checks a host. Raises UsageError for an unknown host, and CommandError, without changing
    anything, for an unknown version."""
    if args.host not in known_hosts():
        raise UsageError(f"{args.host}: no such host; known: {', '.join(known_hosts())}")
    if not args.directory.is_dir():
        raise CommandError(f"{args.directory} is not a directory")
    patch, root = find(args.host, args.directory)
    states = set(patch.states(root).values())
    name = f"{patch.host} {patch.version} in {root}"
    try:
        if args.check:
            state = "patched" if states == {PATCHED} else "half patched" if PATCHED in states else "unpatched"
            print(f"{name}: {state}")
        elif args.revert:
            _say(name, "reverted", patch.revert(root), "it is not patched")
        else:
            _say(name, "patched", patch.apply(root), "it is already patched")
    except OSError as fault:
        raise CommandError(f"{fault.filename or root}: {fault.strerror}; nothing was changed") from None
    return 0


def find(host: str, directory: Path) -> tuple[Patch, Path]:
    """Returns the patch that knows all of its files in ``directory`` or in ``src`` below it, and that directory.

    Raises CommandError if there is none; it names the files that are missing or differ from the most similar version.
    """
    patches = patches_of(host)
    places = [(patch, root) for root in (directory, directory / "src") for patch in patches]
    for patch, root in places:
        if set(patch.states(root).values()) <= {ORIGINAL, PATCHED}:
            return patch, root

    def unknown(candidate: tuple[Patch, Path]) -> tuple[int, int]:
        count = Counter(candidate[0].states(candidate[1]).values())
        return count[MISSING], count[OTHER]

    nearest, root = min(places, key=unknown)
    differences = [f"{path} is {_WORDS[state]}" for path, state in nearest.states(root).items() if state in _WORDS]
    versions = ", ".join(patch.version for patch in patches)
    raise CommandError(
        f"{directory} is not a known version of {host} (known: {versions}); compared with {nearest.version}, "
        f"{'; '.join(differences)}. Nothing was changed"
    )


_WORDS = {MISSING: "missing", OTHER: "not the released file"}


def _say(name: str, verb: str, paths: list[str], reason: str) -> None:
    print(f"{name}: {verb} {', '.join(paths)}" if paths else f"{name}: {reason}, nothing to do")
