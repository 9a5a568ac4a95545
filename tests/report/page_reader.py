"""Reads a page as a browser and a screen reader would, and says what is wrong with it."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"meta", "link", "img", "path", "circle", "br"}


class Page(HTMLParser):
    """problems: in words. ids, links, headings, tags, images: what was found. text: all of it."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.problems: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.headings: list[int] = []
        self.tags: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(source)
        self.close()
        self._check(source)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.tags.append(tag)
        if tag not in VOID:
            self._open.append(tag)
        if "id" in found:
            self.ids.append(found["id"])
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if tag == "a":
            self.links.append(found["href"])
        if tag == "img":
            self.images.append(found)
        self._check_tag(tag, found)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag):
        if not self._open or self._open.pop() != tag:
            self.problems.append(f"</{tag}> closes nothing, or something else")

    def handle_data(self, data):
        if "style" not in self._open:
            self.text += data

    def _check_tag(self, tag, found):
        if tag in ("img", "svg") and not (
            found.get("alt") or found.get("aria-label") or found.get("aria-hidden")
        ):
            self.problems.append(f"<{tag}> has no text for those who do not see it")
        if tag == "svg" and found.get("aria-label") and found.get("role") != "img":
            self.problems.append("a labelled <svg> must have the role of an image")
        if tag == "th" and found.get("scope") not in ("col", "row"):
            self.problems.append("<th> without scope")
        for name in ("src", "href", "poster", "data", "action", "xlink:href"):
            value = found.get(name)
            if value is not None and not value.startswith(("#", "data:")):
                self.problems.append(f"<{tag} {name}={value!r}> loads something from outside")
        if any(name.startswith("on") for name in found) or tag in ("script", "iframe", "object"):
            self.problems.append(f"<{tag}> runs something")

    def _check(self, source):
        if self._open:
            self.problems.append(f"never closed: {self._open}")
        if twice := {one for one in self.ids if self.ids.count(one) > 1}:
            self.problems.append(f"ids that are there twice: {twice}")
        if missing := {one for one in self.links if one[1:] not in self.ids}:
            self.problems.append(f"links to nowhere: {missing}")
        if self.headings.count(1) != 1 or self.headings[0] != 1:
            self.problems.append("the page needs one <h1>, first")
        steps = zip(self.headings, self.headings[1:], strict=False)
        if any(after > before + 1 for before, after in steps):
            self.problems.append(f"headings skip a level: {self.headings}")
        for landmark in ("header", "nav", "main", "footer"):
            if self.tags.count(landmark) != 1:
                self.problems.append(f"the page needs one <{landmark}>")
        if self.tags.count("table") != self.tags.count("caption"):
            self.problems.append("a table has no caption")
        if 'lang="en"' not in source:
            self.problems.append("the page does not say its language")
        if re.search(r"@import|url\(", source):
            self.problems.append("the style sheet loads something")
