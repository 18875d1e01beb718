"""`headwater new`: packages that extend headwater."""

import keyword
from pathlib import Path

from headwater.util.errors import HeadwaterError, shown
from headwater.util.layout import PACKAGES, package_folder
from headwater_lab.cli.arguments import check_writable, say
from headwater_lab.cli.options import MAKE, FolderPath, add_group, command

# Templates and the names of the files made from them.
FILES = {
    "pyproject.toml.txt": "pyproject.toml",
    "README.md.txt": "README.md",
    "mechanism.py.txt": "@NAME@.py",
    "test_mechanism.py.txt": "tests/test_@NAME@.py",
}

new = add_group(MAKE, "new", "Write a small package that extends headwater.")


@command(new, "new mechanism value_shift")
def new_mechanism(name: str, *, out: FolderPath | None = None) -> None:
    """Write a package with a mechanism in one file, its equation in plain Python, contract tests and an entry point.

    name: Name of the mechanism and its module: lower-case letters, digits and _.
    out: The new folder; default: NAME.
    """
    from headwater.plugins.mechanisms import MECHANISMS
    from headwater.util.files import check_free, stage_folder

    if not name.isidentifier() or not name.isascii() or name != name.lower() or keyword.iskeyword(name):
        raise HeadwaterError(f"{shown(name)} is not a module name; use lower-case letters, digits and _.")
    if name in MECHANISMS.names:
        raise HeadwaterError(f"There is already a mechanism named {name!r}; choose another name.")
    if name in (*PACKAGES, "torch", "transformers", "test", "tests"):
        raise HeadwaterError(f"The module {name!r} would hide an existing one; choose another name.")
    folder = out or Path(name)
    check_free(folder)
    check_writable(folder, folder=True)
    words = {
        "@NAME@": name,
        "@CLASS@": "".join(word.capitalize() for word in name.split("_")),
        "@PROJECT@": f"headwater-{name.strip('_').replace('_', '-')}",
    }
    with stage_folder(folder.absolute()) as beside:
        for template, file in FILES.items():
            text = (package_folder(__name__) / "templates" / "mechanism" / template).read_text(encoding="utf-8")
            for mark, word in words.items():
                text, file = text.replace(mark, word), file.replace(mark, word)
            (beside / file).parent.mkdir(exist_ok=True)
            (beside / file).write_text(text, encoding="utf-8")
    quick = f'python -m pytest -k "llama-{name} and equal"'
    say(f"written to {folder}; try it with `cd {folder} && {quick}`")
