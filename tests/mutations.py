"""Change the code in 300 places, one at a time, and count the changes that no test notices: `make mutations`.

mutmut makes the changes under [tool.mutmut] in pyproject.toml; a seeded sample of them is tried. A change that cannot
be noticed, because the code does the same after it, is listed with its reason in tests/equivalent_mutants.toml and
counts neither way. Exits with 1 if less than 85 % of the others are caught.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

from mutmut.configuration import config
from mutmut.mutation.file_mutation import mutate_file_contents
from mutmut.utils.format_utils import get_mutant_name

SHARE = 0.85
EQUIVALENT = Path(__file__).parent / "equivalent_mutants.toml"
CAUGHT = "killed", "timeout", "segfault"


def list_mutants() -> list[str]:
    """The names of all changes, in the order of files and lines."""
    files = {path for pattern in config().only_mutate for path in Path().glob(pattern) if path.suffix == ".py"}
    left_out = {Path(path) for path in config().do_not_mutate}
    return [
        get_mutant_name(path, name)
        for path in sorted(files - left_out)
        for name in mutate_file_contents(str(path), path.read_text()).mutant_names
    ]


def read_results(names: set[str]) -> dict[str, str]:
    """What became of each change: killed, survived, timeout, no tests, …"""
    command = [sys.executable, "-m", "mutmut", "results", "--all", "true"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    results = dict(line.strip().rsplit(": ", 1) for line in lines.splitlines() if ": " in line)
    return {name: results.get(name, "not checked") for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="number of changes to try (default 300)")
    parser.add_argument("--seed", type=int, default=0, help="which changes (default 0)")
    options = parser.parse_args()
    mutants = list_mutants()
    sample = set(random.Random(options.seed).sample(mutants, min(options.count, len(mutants))))
    environment = os.environ | {"SPARSE": "1"}  # of sampled matrices three times as many cells as in `make test`
    if subprocess.run([sys.executable, "-m", "mutmut", "run", *sorted(sample)], env=environment).returncode:
        sys.exit("mutmut could not run; see above.")
    equivalent = tomllib.loads(EQUIVALENT.read_text())
    results = {name: result for name, result in read_results(sample).items() if name not in equivalent}
    missed = sorted(name for name, result in results.items() if result not in CAUGHT)
    for name in missed:
        print(f"{name}: {results[name]}")
    share = 1 - len(missed) / len(results)
    print(
        f"{len(mutants):,} changes, {len(sample)} tried (seed {options.seed}): {dict(Counter(results.values()))}, "
        f"{len(sample) - len(results)} equivalent; {share:.1%} caught"
    )
    sys.exit(share < SHARE)


if __name__ == "__main__":
    main()
