"""Check the title of a pull request, or the subject of a commit: `make title-check TITLE='…'`.

A title is an imperative of at most 72 characters, such as "Add a draft source for servers". Needs no package, so that a
workflow runs it without an installation.
"""

from __future__ import annotations

import re
import sys

MAX_CHARACTERS = 72

#: First words that end like another form of a verb, and are imperatives.
_IMPERATIVES = re.compile(
    r"(Access|Address|Assess|Bring|Bypass|Compress|Cross|Discuss|Dismiss|Embed|Express|Feed|Focus|Guess|Need|Pass|Ping|"
    r"Press|Process|Proceed|Seed|Speed|Suppress)$"
)
_OTHER_FORMS = re.compile(r"(ed|ing|s)$")


def problem_of(title: str) -> str | None:
    """Return what is wrong with a title, or None."""
    word = re.split(r"[\s:(!]", title, maxsplit=1)[0]
    if not word or title != title.strip() or "\n" in title:
        return "it is empty, or has spaces around it or a line end in it"
    if len(title) > MAX_CHARACTERS:
        return f"it has {len(title)} characters, the limit is {MAX_CHARACTERS}"
    if title[len(word) :].startswith((":", "(", "!")):
        return f"it begins with the label {word!r}; begin with a verb"
    if not word[0].isupper():
        return f"it begins with {word!r}; begin with a capital letter"
    if title.endswith("."):
        return "it ends with a full stop"
    if re.match(r"Merge (branch|commit|pull request|remote-tracking|tag)\b", title):
        return "it is the subject of a merge; say what changes"
    if _OTHER_FORMS.search(word) and not _IMPERATIVES.match(word):
        return f"it begins with {word!r}; begin with an imperative, such as Add, Fix or Rename"
    return None


def main(title: str) -> int:
    """Print what is wrong with a title, and return the exit code."""
    problem = problem_of(title)
    if problem:
        print(f"error: title {title!r}: {problem}", file=sys.stderr)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))
