"""Golden files: what the code does, written down once, so that a rewritten part can be seen to do the same.

    python tests/golden/make.py [NAME …]            compute all of them, or these, and write them
    python tests/golden/make.py --check [NAME …]    compute them, and compare them with the files

They change only in commits that say why. `test_golden.py` compares the code with them.

    recipes      which runs of the shipped recipes are the same run (not their hashes)
    estimates    `plan --json` of every preset
    models       a tiny model a mechanism, both vanilla bases, combinations, images: fp64 logits (models.safetensors),
                 which exported folders also have, and greedy tokens
    runs         a tiny run a kind of data, and a few other ways to train: losses, evaluations, weights
    pictures     the same for images
    comparison   two arms with two seeds: verdict, intervals, table, records
    served       what a server says
    verdicts     all that `results/*.jsonl` decide: claims of the papers' tables and the ledger's, cells, comparisons;
                 and papers/verdicts.json, which `headwater reproduce --list` shows

Numbers are compared with small tolerances, so that they hold on any machine. What stands under "same machine" (hashes
of exact bits, runs that round to bf16) is compared only where the CPU and the version of PyTorch are those that the
file names. All names of the package's come from `product.py`.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path

GOLDEN = {
    "recipes": "shipped:recipe_runs",
    "estimates": "shipped:estimates",
    "models": "tiny_models:models",
    "runs": "tiny_runs:data_runs",
    "pictures": "tiny_runs:picture_runs",
    "comparison": "tiny_runs:comparison",
    "served": "served:served",
    "verdicts": "verdicts:verdicts",
}


def main(arguments: list[str]) -> None:
    names = [name for name in arguments if name != "--check"] or [*GOLDEN]
    if unknown := sorted(set(names) - set(GOLDEN)):
        sys.exit(f"There is no golden file {', '.join(unknown)}; name some of: {', '.join(GOLDEN)}.")
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    sys.path.append(str(Path(__file__).parents[1]))
    import torch
    from matching import check, write
    from product import SHIPPED, without_timings
    from verdicts import count_shipped

    torch.set_num_threads(1)
    for name in names:
        module, _, function = GOLDEN[name].partition(":")
        with without_timings():
            content = getattr(import_module(module), function)()
        if "--check" in arguments:
            check(name, content)
        else:
            write(name, content)
            if name == "verdicts":
                lines = [
                    f"{json.dumps(table)}: {json.dumps(of)}" for table, of in count_shipped(content["tables"]).items()
                ]
                SHIPPED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        print(f"{name}: {'as in the file' if '--check' in arguments else 'written'}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
